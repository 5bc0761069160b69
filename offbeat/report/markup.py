"""HTML made of parts that are escaped unless they were made here."""

import html
from collections.abc import Iterable, Sequence

_VOID = ("meta", "link", "br", "hr")


class Safe(str):
    """HTML that needs no escaping any more."""


def escaped(text: str) -> Safe:
    """Text as HTML; what no page may contain becomes a replacement character."""
    if isinstance(text, Safe):
        return text
    kept = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Safe(html.escape(kept))


def joined(parts: Iterable[str]) -> Safe:
    return Safe("".join(escaped(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | None) -> Safe:
    """An element; `class_` and `aria_label` stand for `class` and `aria-label`; no None."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{escaped(value)}"')
    opening = f"<{' '.join(words)}>"
    return Safe(opening if name in _VOID else f"{opening}{joined(children)}</{name}>")


def table(
    label: str, columns: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1
) -> Safe:  # fmt: skip
    """A table in a region of its own, which scrolls where it is too wide.

    The first `names` columns are words, the others numbers.
    """
    body = []
    for row in rows:
        cells = [tag("th", row[0], scope="row")]
        for number, text in enumerate(row[1:], 1):
            cells.append(tag("td", text, class_="word" if number < names else None))
        body.append(tag("tr", *cells))
    head = [
        tag("th", text, scope="col", class_="word" if number < names else None)
        for number, text in enumerate(columns)
    ]
    whole = tag(
        "table",
        tag("caption", label),
        tag("thead", tag("tr", *head)),
        tag("tbody", *body),
    )
    # Who has no pointer scrolls with the keyboard, so the region can be focused.
    return tag("div", whole, class_="scroll", role="region", tabindex="0", aria_label=label)
