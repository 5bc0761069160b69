"""How figures look and leave: one palette for light and dark, matplotlib behind it, SVG and PNG."""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from offbeat.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.8  # inches; narrow, so that letters stay legible when a phone shows the whole figure
LONGEST = 48  # letters of a label

# name of the CSS variable: (light, dark). The light colours are also how the page finds what to
# replace by a variable, so no two may be equal.
COLOURS: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#1c2127", "#eceff3"),
    "soft": ("#566069", "#a9b4bf"),
    "line": ("#d5dade", "#3a434c"),
    "note": ("#8a4b08", "#ffc27a"),
    "series-1": ("#0b6db0", "#62b6f2"),
    "series-2": ("#c14f0c", "#ff9b57"),
    "series-3": ("#0a7f5d", "#3fd3a2"),
    "series-4": ("#8a3d8c", "#dd9ee0"),
    "series-5": ("#876600", "#e3c04b"),
    "series-6": ("#4b5560", "#c3ccd5"),
    "series-7": ("#b3285c", "#ff8fb6"),
    "series-8": ("#3c52b4", "#a3b2ff"),
    "compute": ("#1b74a8", "#5fb3e4"),
    "exchange": ("#a06a00", "#e8b84a"),
    "wait": ("#87919b", "#6f7b87"),
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # seven beside eight colours: pairs repeat late
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1, 1, 1, 1, 1)))
FONTS = ["DejaVu Sans", "sans-serif"]


def light(name: str) -> str:
    return COLOURS[name][0]


@dataclass(frozen=True)
class Look:
    """What tells one series from the others, with or without colour."""

    colour: str
    marker: str
    dashes: Any

    @classmethod
    def of(cls, number: int) -> "Look":
        return cls(
            light(f"series-{number % 8 + 1}"),
            MARKERS[number % len(MARKERS)],
            DASHES[number % len(DASHES)],
        )


def plain(text: str, longest: int = LONGEST) -> str:
    """A name as it can be shown anywhere: no control characters, no half characters, not long."""
    kept = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return kept if len(kept) <= longest else kept[: longest - 1] + "…"


@dataclass
class Picture:
    """A figure with the words that go with it; `labels` name marks that can be pointed at."""

    name: str  # of its file
    title: str
    caption: str  # what to look for
    words: str  # what it shows, for who cannot see it
    figure: "Figure"
    marks: Sequence[str] = ()  # what is not real about it
    labels: dict[str, str] = field(default_factory=dict)  # id of a mark: its words
    rows: dict[str, int] = field(default_factory=dict)  # id of a mark: the row it lies in
    drawn: dict[str, bytes] = field(default_factory=dict, init=False)  # by kind; drawing is slow

    def png(self) -> bytes:
        return self._drawn("png", dpi=160)

    def svg(self) -> str:
        """A file of its own, in light colours."""
        return self._drawn("svg", metadata={"Date": None}).decode()

    def inline(self) -> str:
        """The same for a page, in the colours that the page defines."""
        return _inline(self)

    def _drawn(self, kind: str, **options: Any) -> bytes:
        if kind not in self.drawn:
            self.drawn[kind] = self._draw(kind, **options)
        return self.drawn[kind]

    def _draw(self, kind: str, **options: Any) -> bytes:
        matplotlib = _matplotlib()
        from matplotlib.text import Text

        for text in self.figure.findobj(Text):
            assert isinstance(text, Text)
            text.set_parse_math(False)  # a dollar in a name is a dollar
        target = io.BytesIO()
        settings = {
            "svg.fonttype": "none",
            "svg.hashsalt": self.name,
            "text.parse_math": False,  # for texts made while drawing
            "font.family": FONTS[0],
        }
        with matplotlib.rc_context(settings), warnings.catch_warnings():
            # A name may have letters that the font lacks; the browser has others.
            warnings.simplefilter("ignore", UserWarning)
            self.figure.savefig(target, format=kind, facecolor=light("paper"), **options)
        self.figure.set_layout_engine("none")  # it has found its places, once for all kinds
        return target.getvalue()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "the report draws its figures with matplotlib: pip install offbeat[plot]"
        ) from None
    return matplotlib


def canvas(
    height: float,
    panels: int = 1,
    width: float = WIDTH,
    shared: bool = False,
    ratios: Sequence[float] | None = None,
) -> "tuple[Figure, list[Axes]]":
    """An empty figure of so many panels, one below the other."""
    _matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(panels, 1, squeeze=False, sharex=shared, height_ratios=ratios)
    for axis in axes[:, 0]:
        _quiet(axis)
    return figure, list(axes[:, 0])


def _quiet(axis: "Axes") -> None:
    """Only what carries something: a faint grid, a base line, letters of one size."""
    axis.set_facecolor("none")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(light("soft"))
    axis.tick_params(colors=light("soft"), labelcolor=light("ink"), labelsize=9.5, length=3)
    axis.grid(True, color=light("line"), linewidth=0.7)
    axis.set_axisbelow(True)
    axis.xaxis.label.set(color=light("ink"), fontsize=9.5)
    axis.yaxis.label.set(color=light("ink"), fontsize=9.5)


def finish(figure: "Figure", title: str, marks: Sequence[str]) -> None:
    """The title, and what is not real about the figure, on the figure itself."""
    said = f"\n{'; '.join(marks)}" if marks else ""
    figure.suptitle(
        title + ("\n" if marks else ""), x=0.01, ha="left", fontsize=11, color=light("ink"),
        weight="bold",
    )  # fmt: skip
    if said:
        figure.text(
            0.01, 1 - 0.27 / figure.get_figheight(), "; ".join(marks), ha="left", va="top",
            fontsize=8.5, color=light("note"), style="italic",
        )  # fmt: skip


def legend(figure: "Figure", handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the figure, where it hides nothing; in as many columns as fit.

    One series alone needs none.
    """
    if len(labels) == 1:
        return
    # What a line holds, in letters: every label has its sample and the space around it.
    one_line = sum(len(label) + 9 for label in labels) <= 61
    columns = len(labels) if one_line else max(1, 61 // (max(map(len, labels)) + 9))
    figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, fontsize=9.5, frameon=False,
        labelcolor=light("ink"), handlelength=3.2, columnspacing=1.2, borderaxespad=0.1,
    )  # fmt: skip


# ---------------------------------------------------------------- into a page

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_FONT = re.compile(r"font: (?P<rest>[^;]*?)(?P<size>[\d.]+px) [^;]*")


def _inline(picture: Picture) -> str:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(picture.svg())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    ids = {e.get("id"): f"{picture.name}-{n}" for n, e in enumerate(root.iter()) if e.get("id")}
    variables = {light: f"var(--{name})" for name, (light, _) in COLOURS.items()}
    colour = re.compile("|".join(variables))
    for element in root.iter():
        known = element.get("id")
        if known in picture.labels:
            _point_at(element, picture.labels[known], picture.rows[known])
        if known:
            element.set("id", ids[known])
        if (link := element.get(_XLINK)) is not None:
            element.set(_XLINK, "#" + ids[link.removeprefix("#")])
        if (clip := element.get("clip-path")) is not None:
            element.set("clip-path", f"url(#{ids[clip[5:-1]]})")
        if (style := element.get("style")) is not None:
            style = colour.sub(lambda found: variables[found[0]], style)
            element.set("style", _FONT.sub(r"font: \g<rest>\g<size> var(--font)", style))
    _describe(root, picture)
    return ElementTree.tostring(root, encoding="unicode")


def _point_at(element: ElementTree.Element, words: str, row: int) -> None:
    """A mark that tells its words when pointed at or reached by keyboard."""
    for key, value in (
        ("class", "mark"), ("role", "img"), ("aria-label", words), ("tabindex", "-1"),
        ("data-row", str(row)),
    ):  # fmt: skip
        element.set(key, value)


def _describe(root: ElementTree.Element, picture: Picture) -> None:
    """Its size becomes the page's affair, and its words are there for those who cannot see it."""
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    # Children of role img are hidden from assistive technology: not where they can be focused.
    texts = [("desc", "; ".join([*picture.marks, picture.words]))]
    if picture.labels:
        root.set("role", "group")
        root.set("aria-label", picture.title)  # a title would cover the words of the marks
    else:
        root.set("role", "img")
        root.set("aria-labelledby", f"{picture.name}-title")
        texts.insert(0, ("title", picture.title))
    root.set("aria-describedby", f"{picture.name}-desc")
    for place, (tag, text) in enumerate(texts):
        element = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{picture.name}-{tag}"})
        element.text = text
        root.insert(place, element)
