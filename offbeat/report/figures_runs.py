"""The figures that look into runs: curves over time, staleness, and who did what when."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offbeat.report.digest import CURVE, RunDigest
from offbeat.report.drawing import Look, Picture, canvas, finish, legend, light, plain
from offbeat.report.grid import CellGroup, Grid, marks, thinned
from offbeat.report.score import Score
from offbeat.report.tables import seconds
from offbeat.report.timeline import Segment
from offbeat.report.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = 4  # numbers of devices whose curves are shown, the greatest
BINS = 40  # columns of a histogram
HISTOGRAMS = 8  # panels at most; a page of more is not read
TIMELINES = 6
TURNS = 60  # lines for the turns of one run
STRETCHES = 1600  # of all timelines of a page together, to bound its size
ROWS = 16  # workers of one timeline
KINDS = {"compute": "computing", "exchange": "exchanging", "wait": "waiting"}
OVER_LINKS = KINDS | {"exchange": "exchanging over its link", "wait": "waiting for another"}

# ---------------------------------------------------------------- curves over time


def curves(grid: Grid) -> Picture | None:
    """The score against time; where nobody was tested, the training loss."""
    score, aim = grid.score(), grid.aim()
    words = "training loss" if score is None else plain(score.words)
    what = words[:1].upper() + words[1:]
    unit = ", %" if score is not None and score.kind == "accuracy" else ""
    drawable = [g for g in grid.groups() if any(_points(d, score) for d in g.digests)]
    if not drawable:
        return None
    devices = sorted({g.devices for g in drawable})[-PANELS:]
    shown = [g for g in drawable if g.devices in devices]
    figure, axes = canvas(1.0 + 2.1 * len(devices), len(devices), shared=True)
    names, handles = grid.disciplines(), {}
    for axis, number in zip(axes, reversed(devices), strict=True):
        for group in (g for g in shown if g.devices == number):
            handles[group.discipline] = _curve(axis, group, names, score)
        if aim is not None:
            level = _scale(aim.score) * aim.target
            axis.axhline(level, color=light("soft"), linewidth=1, linestyle=(0, (4, 3)))
        axis.set_ylabel(f"{words if score is not None else 'loss'}{unit}")
        if len(devices) > 1 or len(grid.devices()) > 1:
            axis.set_title(counted(number, "device"), loc="left", fontsize=9.5, color=light("ink"))
    axes[-1].set_xlim(left=0)
    axes[-1].set_xlabel("seconds")
    legend(figure, list(handles.values()), [plain(name) for name in handles])
    unreal = marks(d for g in shown for d in g.digests)
    finish(figure, f"{what} against time", unreal)
    turned = {
        turn_lines(axis, (d for g in shown for d in g.digests if g.devices == number))
        for axis, number in zip(axes, reversed(devices), strict=True)
    }
    caption = "Further left is sooner." + (
        " The dashed line is the target." if aim is not None else ""
    )
    if any(len(g.digests) > 1 for g in shown):
        caption += " Each repeat has a line of its own."
    caption += max(turned)
    ends = "; ".join(
        f"{plain(g.name)}: {_ends(_points(g.digests[0], score), unit.strip(','))}" for g in shown
    )
    return Picture("curves", f"{what} against time", caption, ends, figure, unreal)


def turn_lines(axis: "Axes", digests: Iterable[RunDigest]) -> str:
    """A dotted line where the discipline changed; returns what the caption says of it."""
    times = [turn.time for digest in digests for turn in digest.summary.turns[:TURNS]]
    for time in times:
        axis.axvline(time, color=light("note"), linewidth=0.9, linestyle=":")
    return " A dotted line is a turn to another discipline." if times else ""


def _scale(score: Score) -> float:
    return 100.0 if score.kind == "accuracy" else 1.0


def _points(digest: RunDigest, score: Score | None) -> list[tuple[float, float]]:
    if score is None:
        return [(s.time, s.loss) for s in digest.losses]
    values = ((t.time, score.of(t)) for t in digest.tests)
    return [(time, _scale(score) * value) for time, value in values if value is not None]


def _ends(points: Sequence[tuple[float, float]], unit: str) -> str:
    if not points:
        return "nothing yet"
    (first, low), (last, high) = points[0], points[-1]
    return f"{low:.3g}{unit} at {seconds(first)} s to {high:.3g}{unit} at {seconds(last)} s"


def _curve(axis: "Axes", group: CellGroup, names: Sequence[str], score: Score | None) -> Any:
    look = Look.of(names.index(group.discipline))
    handle: Any = None
    for number, digest in enumerate(group.digests):
        points = thinned(_points(digest, score), CURVE)
        (line,) = axis.plot(
            [x for x, _ in points], [y for _, y in points], color=look.colour,
            linestyle=look.dashes, linewidth=1.8 if number == 0 else 0.9,
            marker=look.marker if len(points) <= 40 else None, markersize=3.5,
        )  # fmt: skip
        handle = handle or line
    return handle


# ---------------------------------------------------------------- staleness


def histogram(grid: Grid) -> Picture | None:
    """How stale contributions were, a panel for each discipline."""
    found = [(g, counts) for g in grid.on_most() if (counts := g.staleness())][:HISTOGRAMS]
    if not found:
        return None
    from matplotlib.ticker import MaxNLocator

    most = max(max(counts) for _, counts in found)
    wide = max(1, -(-(most + 1) // BINS))  # updates in one column
    figure, axes = canvas(1.1 + 0.95 * len(found), len(found), shared=True)
    names = grid.disciplines()
    for axis, (group, counts) in zip(axes, found, strict=True):
        total = sum(counts.values())
        bins: dict[int, float] = {}
        for staleness, count in counts.items():
            bins[staleness // wide] = bins.get(staleness // wide, 0.0) + 100 * count / total
        look = Look.of(names.index(group.discipline))
        axis.bar(
            [wide * (b + 0.5) - 0.5 for b in bins], list(bins.values()), width=0.86 * wide,
            color=look.colour,
        )  # fmt: skip
        axis.set_ylim(0, 100)
        axis.set_yticks([0, 50, 100])
        axis.grid(False, axis="x")
        mean = sum(s * n for s, n in counts.items()) / total
        axis.set_title(
            f"{plain(_name(group, grid), 24)}: {mean:.1f} on average, {max(counts)} at most",
            loc="left", fontsize=9.5, color=light("ink"),
        )  # fmt: skip
    axes[-1].set_xlim(-0.6, max(wide * (most // wide + 1) - 0.4, 1.6))
    axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("staleness, updates")
    figure.supylabel("% of contributions", fontsize=9.5, color=light("ink"))
    unreal = marks(d for g, _ in found for d in g.digests)
    title = f"Staleness{_on(grid)}"
    finish(figure, title, unreal)
    words = "; ".join(f"{plain(g.name)}: at most {max(c)} updates" for g, c in found)
    caption = "How many updates the store had made since a worker had fetched its parameters."
    return Picture("staleness", title, caption, words, figure, unreal)


def _on(grid: Grid) -> str:
    counts = {g.devices for g in grid.on_most()}
    return f" on {counted(counts.pop(), 'device')}" if len(counts) == 1 else ""


def _name(group: CellGroup, grid: Grid) -> str:
    return group.discipline if _on(grid) else group.name


# ---------------------------------------------------------------- who did what when


def timelines(grid: Grid) -> list[tuple[CellGroup, list[Segment], float, float]]:
    """A stretch of the first repeat of each discipline: its segments, its beginning and end.

    All stretches are equally long, so that panels can be compared, and short enough that all
    their segments together can be drawn.
    """
    found = [(g, g.digests[0]) for g in grid.on_most() if g.digests[0].segments][:TIMELINES]
    if not found:
        return []
    each = STRETCHES // len(found)
    lengths = []
    for _, digest in found:
        begin, end = digest.window
        times = sorted(s.start for s in digest.segments if s.worker < ROWS)
        until = times[each] if len(times) > each else max(end, times[-1] if times else end)
        lengths.append(max(until - begin, 1e-9))
    length = min(lengths)
    return [(g, *_cut(d.segments, d.window[0], d.window[0] + length)) for g, d in found]


def _cut(
    segments: Sequence[Segment], begin: float, end: float
) -> tuple[list[Segment], float, float]:
    inside = [s for s in segments if s.worker < ROWS and s.start < end and s.end > begin]
    return inside, begin, end


def timeline(grid: Grid) -> Picture | None:
    """What every worker did when, a panel for each discipline."""
    found = timelines(grid)
    if not found:
        return None
    rows = [max(s.worker for s in segments) + 1 for _, segments, _, _ in found]
    height = 1.2 + sum(0.5 + 0.24 * n for n in rows)
    figure, axes = canvas(height, len(found), width=6.8, ratios=[1.2 + n for n in rows])
    labels: dict[str, str] = {}
    places: dict[str, int] = {}
    above = 0
    for axis, (group, segments, begin, end), count in zip(axes, found, rows, strict=True):
        for segment in segments:
            known = f"mark-{len(labels)}"
            _stretch(axis, segment, known)
            what = said(segment, kinds_of([group]))
            labels[known] = plain(f"{plain(_name(group, grid))}, {what}", 200)
            places[known] = above + segment.worker
        above += count
        _frame(axis, begin, end, count)
        axis.set_title(plain(_name(group, grid)), loc="left", fontsize=9.5, color=light("ink"))
    axes[-1].set_xlabel("seconds since the run began")
    _kinds(figure, kinds_of([group for group, *_ in found]))
    unreal = marks(g.digests[0] for g, *_ in found)
    title = f"Who did what when{_on(grid)}"
    finish(figure, title, unreal)
    caption = (
        "Point at a stretch, or reach the figure with Tab and move with the arrow keys, to read "
        "how long it was and whom it waited for."
    )
    words = "The table below has the sums."
    return Picture("timeline", title, caption, words, figure, unreal, labels, places)


def kinds_of(groups: Sequence[CellGroup]) -> dict[str, str]:
    """What stretches are called: over a network, exchange goes over links."""
    wired = [any(w.link for w in g.digests[0].summary.per_worker) for g in groups]
    return OVER_LINKS if wired and all(wired) else KINDS


def said(segment: Segment, kinds: Mapping[str, str] = KINDS) -> str:
    """A stretch in words: who, what, how long, because of whom."""
    what = kinds.get(segment.kind, segment.kind)
    whom = ""
    if segment.whom is not None:
        what, whom = KINDS.get(segment.kind, segment.kind), f" for worker {segment.whom}"
    length = seconds(segment.end - segment.start)
    return f"worker {segment.worker}: {what}{whom}, {length} s from {seconds(segment.start)} s"


def _stretch(axis: "Axes", segment: Segment, known: str) -> None:
    from matplotlib.patches import Rectangle

    thin = 0.4 if segment.kind == "wait" else 0.76  # waiting differs in height, not only in colour
    patch = Rectangle(
        (segment.start, segment.worker - thin / 2), segment.end - segment.start, thin,
        facecolor=light(segment.kind) if segment.kind in KINDS else light("soft"),
        edgecolor=light("paper"), linewidth=0.4,
    )  # fmt: skip
    patch.set_gid(known)
    patch.set_in_layout(False)  # thousands of them, all inside the axes: measuring them is slow
    axis.add_artist(patch)


def _frame(axis: "Axes", begin: float, end: float, count: int) -> None:
    axis.set_xlim(begin, end)
    axis.set_ylim(count - 0.4, -0.6)
    axis.set_yticks(range(count), [f"worker {n}" for n in range(count)])
    axis.tick_params(axis="y", length=0)
    axis.grid(False, axis="y")


def _kinds(figure: Any, kinds: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=light(kind)) for kind in kinds]
    legend(figure, handles, list(kinds.values()))
