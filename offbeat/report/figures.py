"""The figures of a report against the number of devices, and the list of all its figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.report import grid as figures_of
from offbeat.report.drawing import Look, Picture, canvas, finish, legend, light, plain
from offbeat.report.figures_one import losses, pace, shares
from offbeat.report.figures_runs import curves, histogram, timeline
from offbeat.report.grid import CellGroup, Grid, Spread, marks
from offbeat.report.score import ACCURACY
from offbeat.report.tables import rate, seconds, share, size
from offbeat.report.words import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MANY_WORDS = 1500  # letters at most of what a figure shows in words; the table has it all


@dataclass(frozen=True)
class FigureMetric:
    """One figure of every run: how it is called, taken, written and scaled."""

    name: str
    title: str
    axis: str
    caption: str
    take: Callable[[CellGroup], Spread | None]
    write: Callable[[float], str]
    factor: float = 1.0  # from what is taken to what the axis shows
    from_zero: bool = True
    top: float | None = None


def pictures(grid: Grid) -> list[Picture]:
    """Every figure that there is something to show in."""
    if len(grid.groups()) == 1:  # nothing to compare: bars would stand alone
        drawn = [curves(grid), losses(grid), pace(grid), shares(grid)]
    else:
        drawn = [*(against_devices(grid, metric) for metric in metrics(grid)), curves(grid)]
    drawn += [histogram(grid), timeline(grid)]
    return [picture for picture in drawn if picture is not None]


def metrics(grid: Grid) -> list[FigureMetric]:
    """What is shown against the number of devices, in the order of the page."""
    aim, score = grid.aim(), grid.score() or ACCURACY
    classes = score.kind == "accuracy"
    scale, unit = _memory_unit(grid)
    whole = any("worker_peak" in d.summary.memory for d in grid.digests())
    return [
        FigureMetric(
            "speed", "Training speed", "samples per second",
            "Higher is better. Twice the devices should give twice the speed.",
            lambda g: g.span(figures_of.speed), rate,
        ),
        FigureMetric(
            score.kind, f"Final {plain(score.words)}",
            "accuracy on the test set, %" if classes else plain(score.words),
            f"{'Higher' if score.higher else 'Lower'} is better. "
            "What a discipline gains in speed it may lose here.",
            lambda g: g.final(score), score.write, factor=100 if classes else 1.0, from_zero=False,
        ),
        FigureMetric(
            "communication", "Communication time per worker", "seconds",
            "Lower is better. Time that a worker spends on exchange, not on waiting for others.",
            lambda g: g.span(figures_of.communication), lambda v: f"{seconds(v)} s",
        ),
        FigureMetric(
            "memory", "Memory per worker", unit,
            "Of the largest worker: its whole process at its peak." if whole
            else "Of the largest worker: parameters, gradients and what it keeps to send them.",
            lambda g: g.span(figures_of.memory), size, factor=1 / scale,
        ),
        FigureMetric(
            "target", f"Time to {plain(str(aim))}", "seconds",
            "Lower is better. A target counts when it is reached and kept.",
            lambda g: g.time_to(aim), lambda v: f"{seconds(v)} s",
        ),
        FigureMetric(
            "efficiency", "Efficiency against the ideal", "% of the ideal speed",
            "Higher is better. 100 % would mean that every worker computes all the time, "
            "at the speed it showed.",
            lambda g: g.span(figures_of.efficiency), share, factor=100, top=100,
        ),
    ]  # fmt: skip


def _memory_unit(grid: Grid) -> tuple[float, str]:
    most = max((m for d in grid.digests() if (m := figures_of.memory(d))), default=0)
    return next((u for u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= u[0]), (1.0, "B"))


def against_devices(grid: Grid, metric: FigureMetric) -> Picture | None:
    """Lines over the numbers of devices, or bars where there is only one number."""
    groups = grid.groups()
    found = [(g, span) for g in groups if (span := metric.take(g)) is not None]
    if not found:
        return None
    unreal = marks(d for g, _ in found for d in g.digests)
    missing = [g for g in groups if metric.take(g) is None] if metric.name == "target" else []
    title = metric.title
    if len(grid.devices()) > 1:
        figure = _lines(grid, metric, found, missing, unreal)
    else:
        title += f" on {counted(grid.devices()[0], 'device')}"
        figure = _bars(grid, metric, found, missing, (title, unreal))
    repeated = any(span.count > 1 for _, span in found)
    caption = metric.caption
    if missing and len(grid.devices()) > 1:
        caption += " A cross at the top: the target was not reached in every run."
    caption += " Whiskers: least and greatest of the repeats." if repeated else ""
    return Picture(metric.name, title, caption, _words(metric, found, missing), figure, unreal)


def _words(
    metric: FigureMetric, found: Sequence[tuple[CellGroup, Spread]], missing: Sequence[CellGroup]
) -> str:  # fmt: skip
    parts = [f"{plain(g.name)}: {metric.write(span.mean)}" for g, span in found]
    parts += [f"{plain(g.name)}: not reached" for g in missing]
    text = "; ".join(parts)
    return text if len(text) <= MANY_WORDS else text[:MANY_WORDS] + "… see the table of results"


Found = Sequence[tuple[CellGroup, Spread]]


def _lines(
    grid: Grid,
    metric: FigureMetric,
    found: Found,
    missing: Sequence[CellGroup],
    unreal: Sequence[str],
) -> Any:
    figure, (axis,) = canvas(3.4)
    names = grid.disciplines()
    shown, handles = [], []
    for name in names:
        number = names.index(name)
        look = Look.of(number)
        # A little apart, so that whiskers on the same number of devices do not hide each other.
        dodge = 1 + 0.03 * (number - (len(names) - 1) / 2)
        mine = sorted((g.devices, span) for g, span in found if g.discipline == name)
        lost = [g.devices * dodge for g in missing if g.discipline == name]
        if not mine and not lost:
            continue
        x = [devices * dodge for devices, _ in mine]
        handle = axis.errorbar(
            x, [span.mean * metric.factor for _, span in mine],
            yerr=_whiskers([span for _, span in mine], metric.factor),
            color=look.colour, marker=look.marker, linestyle=look.dashes, markersize=5.5,
            linewidth=1.8, capsize=2.5, elinewidth=1,
        )  # fmt: skip
        if lost:
            axis.plot(
                lost, [1.0] * len(lost), linestyle="none", marker="x", markersize=7,
                markeredgewidth=2, color=look.colour, clip_on=False,
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
        handles.append(handle)
        shown.append(plain(name))
    devices = grid.devices()
    axis.set_xscale("log", base=2)
    axis.set_xticks(devices, [str(n) for n in devices])
    axis.minorticks_off()
    axis.set_xlim(devices[0] / 1.2, devices[-1] * 1.2)
    axis.set_xlabel("devices")
    axis.set_ylabel(metric.axis)
    _scale(axis, metric, max(span.high for _, span in found) * metric.factor)
    legend(figure, handles, shown)
    finish(figure, metric.title, unreal)
    return figure


def _whiskers(spans: Sequence[Spread], factor: float) -> Any:
    if all(span.count == 1 for span in spans):
        return None
    low = [max(0.0, span.mean - span.low) * factor for span in spans]
    return low, [max(0.0, span.high - span.mean) * factor for span in spans]


def _scale(axis: "Axes", metric: FigureMetric, highest: float) -> None:
    if metric.from_zero:
        axis.set_ylim(0, 1.08 * highest or 1)
    _thousands(axis.yaxis)
    if metric.top is not None:
        axis.set_ylim(top=max(metric.top * 1.06, axis.get_ylim()[1]))
        axis.axhline(metric.top, color=light("soft"), linewidth=1, linestyle=(0, (4, 3)))


def _bars(
    grid: Grid, metric: FigureMetric, found: Found, missing: Sequence[CellGroup],
    said: tuple[str, Sequence[str]],
) -> Any:  # fmt: skip
    taken = {g.discipline for g, _ in found} | {g.discipline for g in missing}
    rows = [g for g in grid.groups() if g.discipline in taken]
    figure, (axis,) = canvas(1.25 + 0.34 * len(rows))
    spans = {g.discipline: span for g, span in found}
    names = grid.disciplines()
    ends = [span.high * metric.factor for _, span in found]
    starts = [span.low * metric.factor for _, span in found]
    least = 0.5 if metric.factor == 100 else 0.02 * abs(max(ends))  # half a point, or 2 %
    room = max(max(ends) - min(starts), least) or 1
    for row, group in enumerate(rows):
        look = Look.of(names.index(group.discipline))
        span = spans.get(group.discipline)
        if span is None:
            axis.text(0, row, " not reached", va="center", fontsize=9, color=light("soft"))
            continue
        value = span.mean * metric.factor
        if metric.from_zero:
            axis.barh(row, value, height=0.62, color=look.colour)
        else:  # a bar that does not begin at zero would lie about proportions
            axis.plot(value, row, marker=look.marker, color=look.colour, markersize=8)
        if span.count > 1:
            axis.errorbar(
                value, row, xerr=_whiskers([span], metric.factor), color=light("ink"), capsize=3,
                elinewidth=1.2,
            )  # fmt: skip
        axis.annotate(
            metric.write(span.mean), (span.high * metric.factor, row), xytext=(8, 0),
            textcoords="offset points", va="center", fontsize=9, color=light("ink"),
        )  # fmt: skip
    axis.set_yticks(range(len(rows)), [plain(g.discipline, 28) for g in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)
    axis.tick_params(axis="y", length=0)
    axis.grid(False, axis="y")
    if metric.from_zero:
        axis.set_xlim(0, max(max(ends) * 1.2, (metric.top or 0) * 1.06) or 1)
    else:
        axis.set_xlim(min(starts) - 0.08 * room, max(ends) + 0.3 * room)
    if metric.top is not None:
        axis.axvline(metric.top, color=light("soft"), linewidth=1, linestyle=(0, (4, 3)))
    _thousands(axis.xaxis)
    axis.set_xlabel(metric.axis)
    finish(figure, *said)
    return figure


def _thousands(axis: Any) -> None:
    """Large numbers as the text writes them: 5,000."""
    if axis.get_view_interval()[1] >= 1000:
        axis.set_major_formatter("{x:,.0f}")
