"""A display of a comparison while it goes: two bars in a terminal, a line per cell elsewhere."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.compare.plan import Point
from offbeat.compare.runner import Watcher
from offbeat.report.live import REDRAW, Progress
from offbeat.report.screen import can_show
from offbeat.report.summary import Summary
from offbeat.report.tables import percent, rate, seconds, share
from offbeat.report.words import visible

LINES = 20.0  # real seconds between two plain lines about one cell
BAR = 24


class Estimate:
    """Real seconds left, if the rest costs as much per unit of expected work as what is done."""

    def __init__(self, work: Mapping[Point, float]):
        self.missing = dict(work)
        self.done = self.spent = 0.0

    def ended(self, point: Point, seconds: float) -> None:
        """A cell has been run; one that failed early says little, and is counted all the same."""
        self.done += self.missing.pop(point)
        self.spent += seconds

    def left(
        self, now: Point | None = None, done: float = 0.0, seconds: float = 0.0
    ) -> float | None:
        """Seconds left, when of the cell `now` the share `done` took `seconds`; None at first."""
        part = done * self.missing[now] if now is not None else 0.0
        if self.done + part <= 0:
            return None
        each = (self.spent + seconds) / (self.done + part)
        return each * max(0.0, sum(self.missing.values()) - part)


class Display(Progress, Watcher):
    """Shows cells done, the one that runs, and the time left on standard error."""

    def __init__(self, file: IO[str] | None = None, virtual: bool = False):
        super().__init__(file=file or sys.stderr, virtual=virtual)
        self.interval = REDRAW if can_show(self.file) else LINES
        self.estimate = Estimate({})
        self.point: Point | None = None
        self.began = 0.0
        self.ended = self.cells = 0
        self.failures = 0

    # ------------------------------------------------------------ cells

    def planned(self, work: Mapping[Point, float], kept: int) -> None:
        self.estimate = Estimate(work)
        self.cells, self.ended = len(work) + kept, kept
        if kept:
            self.say(f"{kept} of {self.cells} cells are there already")
        if work:
            self.open()

    def starts(self, point: Point) -> None:
        self.point, self.began, self.store = point, time.monotonic(), None
        self.title = str(point)
        if self.live is not None:
            self.draw()

    def ends(self, point: Point, summary: Summary | None, failed: str = "") -> None:
        self.estimate.ended(point, time.monotonic() - self.began)
        self.point, self.store = None, None
        self.ended += 1
        self.failures += summary is None
        if summary is None:
            words = f"failed: {failed}"
        else:
            unit = "virtual s" if self.virtual else "s"
            words = (
                f"{rate(summary.samples_per_second)} samples/{'virtual s' * self.virtual or 's'}"
            )
            words += f", {seconds(summary.seconds)} {unit}"
            if summary.metric is not None:
                words = f"{summary.metric_name} {summary.metric:.4g}, {words}"
            elif summary.accuracy is not None:
                words = f"{percent(summary.accuracy)}, {words}"
            elif summary.loss is not None:
                words = f"test loss {summary.loss:.4g}, {words}"
        if self.live is None or summary is None:
            self.say(f"{self.ended}/{self.cells} {point}: {words}{self.left()}")
        else:
            self.draw()

    def left(self) -> str:
        """The time left in words, where something is known of it."""
        done = self.done if self.store is not None else 0.0
        spent = time.monotonic() - self.began if self.point is not None else 0.0
        left = self.estimate.left(self.point, done, spent)
        if left is None or (self.point is None and not self.estimate.missing):
            return ""
        return f"; about {in_words(left)} left"

    def say(self, words: str) -> None:
        if self.live is not None:
            self.live.above(f"{visible(words)}\n".encode())
        else:
            self.console.print(words, markup=False, soft_wrap=True)

    # ------------------------------------------------------------ the run of one cell

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.samples = store, samples
        self.staleness = [0] * store.cells.shape[1]
        self.time, self.loss = 0.0, None
        self.stale_sum = self.parts = 0
        self.due = time.monotonic() + self.interval

    def end(self) -> None:
        """A run is over, and another comes: the display stays."""

    def close(self) -> None:
        """The comparison is over, or has been stopped."""
        super().end()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    # ------------------------------------------------------------ pictures

    def draw(self) -> None:
        if self.live is not None:
            self.live.show(self.picture())
        elif self.store is not None:
            self.say(f"{self.ended + 1}/{self.cells} {self.title}: {share(self.done)}{self.left()}")

    def picture(self) -> RenderableType:
        """A bar for all cells, a bar for the one that runs, and its figures in one line."""
        failed = f", {self.failures} failed" if self.failures else ""
        rows = Table.grid(padding=(0, 1))
        rows.add_column(no_wrap=True, max_width=28)
        rows.add_row(
            Text("comparison", style="bold"),
            ProgressBar(total=max(1, self.cells), completed=self.ended, width=BAR),
            f"{self.ended}/{self.cells}{failed}{self.left()}",
        )
        running = self.store is not None
        done = self.done if running else 0.0
        if self.point is not None:
            rows.add_row(
                Text(self.title), ProgressBar(total=1.0, completed=done, width=BAR), share(done)
            )
        return Group(rows, Text(self.line() if running else "", no_wrap=True))


def in_words(seconds: float) -> str:
    """A duration as one says it: 40 s, 3 min, 2 h 10 min."""
    if seconds < 60:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
