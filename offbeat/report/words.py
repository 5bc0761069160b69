"""Small words of every report: counts with their noun, and text that cannot command a terminal."""

_KEPT = "\n\t"


def counted(number: int, noun: str) -> str:
    """1 epoch, 2 epochs, 1,000 epochs."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def times(number: int) -> str:
    """Once, or so many times."""
    return "once" if number == 1 else f"{number:,} times"


def visible(text: str) -> str:
    """Text that may come from anywhere, with its control characters made visible.

    An escape becomes ␛, and whatever else has no picture, or turns the direction of a line around,
    becomes �. Ends of lines stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c in _KEPT or c.isprintable() else _picture(ord(c)) for c in text)


def _picture(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)
    return "\N{SYMBOL FOR DELETE}" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
