"""A display of a run while it goes: bars in a terminal, a plain line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import IO, Any, Self

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from offbeat.log.log import Listener
from offbeat.log.records import Entry, Updated
from offbeat.report.screen import Screen, can_show
from offbeat.report.tables import COLUMNS, console, rate, seconds, share
from offbeat.store.board import NOBODY, UNBOUND, LinkState, Row, State, furthest_behind

REDRAW = 0.1  # real seconds between two pictures in a terminal
LINES = 2.0  # real seconds between two plain lines elsewhere
SMOOTH = 0.95  # how much of the smoothed loss an update leaves
SHOWN = 8  # workers with a row of their own


class Progress(Listener):
    """Shows a run on standard error; costs a look at the clock per record, and little else.

    `title` is shown beside the bar; `virtual` says that the run's seconds are simulated. Leaving
    the `with` block ends the display, whatever happened.
    """

    def __init__(self, title: str = "", file: IO[str] | None = None, virtual: bool = False):
        self.title, self.virtual = title, virtual
        self.file = file or sys.stderr
        self.console = console(self.file)
        self.interval = REDRAW if can_show(self.file) else LINES
        self.live: Screen | None = None
        self.store: Any = None
        self.samples = 0
        self.time = 0.0  # of the run
        self.loss: float | None = None
        self.staleness: list[int] = []  # of every worker's last contribution
        self.stale_sum = self.parts = 0
        self.due = 0.0  # real time of the next picture

    # ------------------------------------------------------------ a listener

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.samples = store, samples
        self.staleness = [0] * store.cells.shape[1]
        self.due = time.monotonic() + self.interval
        self.open()

    def open(self) -> None:
        """Take a part of the terminal, if there is one."""
        if self.live is None and can_show(self.file):
            # A process that is killed cannot show the cursor again, so it is never hidden.
            self.live = Screen(self.file)

    def see(self, record: Entry) -> None:
        self.time = record.time
        if isinstance(record, Updated):
            self._updated(record)
        self.idle()

    def idle(self) -> None:
        """Draw if it is time to; may be called when nothing has happened, too."""
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self.interval
            self.draw()

    def end(self) -> None:
        if self.live is not None:
            self.live.close()
            self.live = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _updated(self, record: Updated) -> None:
        for part in record.parts:
            self.staleness[part.worker] = part.staleness
            self.stale_sum += part.staleness
            self.parts += 1
            if part.skipped or part.loss is None:
                continue
            before = part.loss if self.loss is None else self.loss
            self.loss = SMOOTH * before + (1 - SMOOTH) * part.loss

    # ------------------------------------------------------------ pictures

    def draw(self) -> None:
        """Show how things stand now."""
        if self.live is not None:
            self.live.show(self.picture())
        else:
            self.console.print(f"{share(self.done):>5}  {self.line()}", markup=False)

    @property
    def done(self) -> float:
        """The share of the samples that have been dealt with."""
        done = self.store.applied + self.store.given_up
        return min(1.0, float(done) / max(1, self.samples))

    def line(self) -> str:
        """The run in one line."""
        speed = rate(self.store.applied / self.time if self.time else 0.0)
        words = [f"{speed} samples per virtual s" if self.virtual else f"{speed} samples/s"]
        if self.loss:  # runs without gradients have none
            words.append(f"loss {self.loss:.4g}")
        if self.parts:
            words.append(f"staleness {self.stale_sum / self.parts:.2f}")
        words.append(f"at {seconds(self.time)} {'virtual s' if self.virtual else 's'}")
        return "  ".join(words)

    def picture(self) -> RenderableType:
        """Bar, line and one row per worker."""
        head = Table.grid(padding=(0, 1))
        head.add_row(
            Text(self.title, style="bold"),
            ProgressBar(total=1.0, completed=self.done, width=30),
            share(self.done),
        )
        width = min(COLUMNS, self.console.width) - 1
        rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), width=width)
        rows.add_column("worker", width=7)
        rows.add_column("state", ratio=1, no_wrap=True)
        rows.add_column("clock", justify="right", width=9)
        rows.add_column("staleness", justify="right", width=9)
        cells = self.store.cells
        count = cells.shape[1]
        for worker in range(min(count, SHOWN)):
            clock = f"{int(cells[Row.CLOCK, worker]):,}"
            state = Text(*state_of(cells, worker))
            rows.add_row(str(worker), state, clock, str(self.staleness[worker]))
        if count > SHOWN:
            waiting = int((cells[Row.WAITING] == 1).sum())
            rows.add_row(f"+{count - SHOWN:,}", f"more; {waiting:,} of all {count:,} wait", "", "")
        return Group(head, Text(self.line()), rows)


_LINKS = {
    LinkState.SENDING: "in its link (sending)",
    LinkState.RECEIVING: "in its link (receiving)",
    LinkState.BROKEN: "out of reach",
}


def state_of(cells: Any, worker: int) -> tuple[str, str]:
    """What `worker` does now, in words, and the style to show it in."""
    state = int(cells[Row.STATE, worker])
    if state != State.ACTIVE:
        words = {State.ABSENT: "not there yet", State.RESTING: "resting", State.LOST: "lost"}
        words[State.LEFT] = "left its loop"
        return words[state], "red" if state == State.LOST else "dim"
    if not cells[Row.WAITING, worker]:
        link = _LINKS.get(int(cells[Row.LINK, worker]))
        return ("computing", "green") if link is None else (link, "cyan")
    blocker = int(cells[Row.BLOCKER, worker])
    if blocker != NOBODY and cells[Row.BINDING, blocker] == UNBOUND:
        blocker = furthest_behind(cells)  # it has contributed since; whoever has not holds all up
    if blocker == NOBODY or cells[Row.BINDING, blocker] == UNBOUND:
        return "waiting", "yellow"
    clock = int(cells[Row.CLOCK, blocker])
    behind = int(cells[Row.CLOCK, worker]) - clock
    where = f" (clock {clock:,}, {behind:,} behind)" if behind > 0 else ""
    return f"waiting for worker {blocker}{where}", "yellow"
