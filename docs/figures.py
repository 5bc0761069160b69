"""Draws the pictures of the documentation from the records of simulated runs.

    python docs/figures.py

writes docs/images/ anew. The runs are cost-only: who waits for whom depends on times alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import offbeat as ob
from offbeat.cluster import Machine
from offbeat.log import Admitted, Pulled, Updated
from offbeat.pace import distribution

IMAGES = Path(__file__).resolve().parent / "images"
PANELS = (
    ("Lock-step (bsp): a round is as long as its slowest step", "bsp"),
    ("Slack (ssp:2): at most two steps ahead of the slowest", "ssp:2"),
    ("Free-running (asp): nobody waits", "asp"),
)
# Every worker hiccups now and then, and the last is a little slower than the others.
TIMES = ("lognormal:20ms,0.5", "lognormal:20ms,0.5", "lognormal:20ms,0.5", "lognormal:28ms,0.5")
STEPS, UNTIL, SEED = 40, 0.46, 3
COLOURS = ("#3b6fb6", "#2f8f7f", "#8a5fb0", "#c2622d")
PAPER, INK, FAINT = "#fbfaf7", "#22262b", "#d9d6cf"


@dataclass(frozen=True)
class Bar:
    """What one worker did for a while; `blocker` is whom it waited for."""

    worker: int
    kind: str
    since: float
    until: float
    blocker: int | None = None


class Recorder(ob.Listener):
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def see(self, record: Any) -> None:
        self.records.append(record)


def timeline(sync: str) -> list[Bar]:
    """Each worker's bars: computing from a pull to its push, waiting from there to the next."""
    cluster = ob.Cluster(tuple(Machine(distribution(text)) for text in TIMES))
    recorder = Recorder()
    ob.estimate(cluster, sync, steps=STEPS, seed=SEED, listeners=[recorder])
    return list(_bars(recorder.records))


def _bars(records: Iterable[Any]) -> Iterable[Bar]:
    pulled: dict[int, float] = {}
    pushed: dict[int, float] = {}
    last = 0  # the worker whose push let the others go
    for record in records:
        if isinstance(record, Pulled):
            since = pushed.pop(record.worker, record.time)
            if record.time > since:
                yield Bar(record.worker, "wait", since, record.time, last)
            pulled[record.worker] = record.time
        elif isinstance(record, Admitted | Updated):
            senders = (
                [record.worker]
                if isinstance(record, Admitted)
                else [part.worker for part in record.parts if part.worker not in pushed]
            )
            for worker in senders:
                yield Bar(worker, "compute", pulled[worker], record.time)
                pushed[worker] = record.time
                last = worker


def draw(path: Path) -> None:
    """The three timelines, one below the other."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "offbeat", "font.family": "DejaVu Sans"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(PANELS), 1, figsize=(8.6, 6.0), sharex=True)
    figure.set_facecolor(PAPER)
    for axis, (title, sync) in zip(axes, PANELS, strict=True):
        bars = timeline(sync)
        for bar in bars:
            if bar.since < UNTIL:
                _draw_bar(axis, bar)
        steps = sum(bar.kind == "compute" and bar.until <= UNTIL for bar in bars)
        axis.set_title(title, loc="left", fontsize=10.5, color=INK, weight="bold")
        axis.set_title(f"{steps} steps done", loc="right", fontsize=9.5, color=INK)
        axis.set_yticks(range(len(TIMES)), [f"worker {n}" for n in range(len(TIMES))])
        axis.invert_yaxis()
        axis.set_xlim(0, UNTIL)
        axis.set_facecolor(PAPER)
        axis.tick_params(length=0, labelsize=9, colors=INK)
        for spine in axis.spines.values():
            spine.set_visible(False)
    axes[-1].set_xlabel(
        "virtual seconds; coloured: computing, grey: waiting for the worker of that number",
        fontsize=9.5,
        color=INK,
    )
    figure.tight_layout(h_pad=1.2)
    figure.savefig(path, metadata={"Date": None}, facecolor=PAPER)
    pyplot.close(figure)


def _draw_bar(axis: Any, bar: Bar) -> None:
    width = min(bar.until, UNTIL) - bar.since
    if bar.kind == "compute":
        axis.barh(
            bar.worker, width, left=bar.since, height=0.62, color=COLOURS[bar.worker],
            edgecolor=PAPER, linewidth=1.2,
        )  # fmt: skip
        return
    assert bar.blocker is not None
    axis.barh(
        bar.worker, width, left=bar.since, height=0.62, color=FAINT, edgecolor=PAPER,
        linewidth=1.2,
    )  # fmt: skip
    if width > 0.008:
        axis.text(
            bar.since + width / 2, bar.worker, str(bar.blocker), ha="center", va="center",
            fontsize=8.5, weight="bold", color=COLOURS[bar.blocker],
        )  # fmt: skip


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw(IMAGES / "timeline.svg")
