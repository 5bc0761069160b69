"""The figures of a page that shows one run alone, where there is nothing to compare it with."""

from offbeat.report.digest import CURVE
from offbeat.report.drawing import Look, Picture, canvas, finish, legend, light
from offbeat.report.figures_runs import OVER_LINKS, ROWS, kinds_of, turn_lines
from offbeat.report.grid import Grid, marks, thinned
from offbeat.report.tables import rate, seconds, share


def losses(grid: Grid) -> Picture | None:
    """The training loss over time, beside the accuracy; alone, that is already its curve."""
    digests = grid.groups()[0].digests
    if not any(d.losses for d in digests) or not any(d.tests for d in digests):
        return None
    series = [[(s.time, s.loss) for s in d.losses] for d in digests]
    words = f"{series[0][0][1]:.4g} at first, {series[0][-1][1]:.4g} at last" if series[0] else ""
    return _over_time(grid, "loss", ("Training loss", "loss", "Lower is better."), series, words)


def pace(grid: Grid) -> Picture | None:
    """Samples per second over time: a stop, a loss or a slow start shows here."""
    digests = grid.groups()[0].digests
    series = [[(s.time, s.samples_per_second) for s in d.speeds] for d in digests]
    if not any(series):
        return None
    rates = [y for points in series for _, y in points]
    words = f"between {rate(min(rates))} and {rate(max(rates))} samples per second"
    said = ("Speed over time", "samples per second", "A stop, a loss or a slow start shows here.")
    return _over_time(grid, "pace", said, series, words, from_zero=True)


def _over_time(
    grid: Grid,
    name: str,
    said: tuple[str, str, str],
    series: list[list[tuple[float, float]]],
    words: str,
    from_zero: bool = False,
) -> Picture:
    title, axis_label, caption = said
    figure, (axis,) = canvas(3.0)
    look = Look.of(0)
    for points in series:
        kept = thinned(points, CURVE)
        axis.plot(
            [x for x, _ in kept], [y for _, y in kept], color=look.colour, linewidth=1.4,
            marker=look.marker if len(kept) < 3 else None, markersize=4,
        )  # fmt: skip
    caption += turn_lines(axis, grid.groups()[0].digests)
    axis.set_xlim(left=0)
    if from_zero:
        axis.set_ylim(bottom=0)
    axis.set_xlabel("seconds")
    axis.set_ylabel(axis_label)
    unreal = marks(grid.digests())
    finish(figure, title, unreal)
    return Picture(name, title, caption, words, figure, unreal)


def shares(grid: Grid) -> Picture | None:
    """What each worker's time was made of, over the whole run."""
    workers = grid.groups()[0].digests[0].summary.per_worker[:ROWS]
    times = [(w.compute, w.communication, w.wait) for w in workers]
    if not any(sum(each) for each in times):
        return None
    from matplotlib.patches import Patch

    kinds = kinds_of(grid.groups()[:1])
    figure, (axis,) = canvas(1.5 + 0.28 * len(times))
    words = []
    for number, each in enumerate(times):
        total, left = sum(each) or 1.0, 0.0
        for kind, length in zip(kinds, each, strict=True):
            wide = 100 * length / total
            high = 0.42 if kind == "wait" else 0.74
            axis.barh(number, wide, left=left, height=high, color=light(kind))
            left += wide
        link = f", {share(workers[number].link_share)} in its link" if kinds is OVER_LINKS else ""
        words.append(
            f"worker {number} computed {share(each[0] / total)} of {seconds(total)} s{link}"
        )
    axis.set_xlim(0, 100)
    axis.set_ylim(len(times) - 0.4, -0.6)
    axis.set_yticks(range(len(times)), [f"worker {number}" for number in range(len(times))])
    axis.tick_params(axis="y", length=0)
    axis.grid(False, axis="y")
    axis.set_xlabel("% of its time")
    legend(figure, [Patch(facecolor=light(kind)) for kind in kinds], list(kinds.values()))
    unreal = marks(grid.digests())
    title = "Where each worker's time went"
    finish(figure, title, unreal)
    caption = "A fast worker that waits much is held up by a slow one that does not wait at all."
    if kinds is OVER_LINKS:
        caption += " One that is long in its link needs smaller or rarer exchanges."
    return Picture("shares", title, caption, "; ".join(words), figure, unreal)
