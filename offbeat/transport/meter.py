"""What a link is measured to carry: round trips, and bytes over the time of large transfers.

Both ends time what comes in, from the head of a frame to its last byte: what goes out is in the
system's hands before it is on its way. A worker tells its figures in a probe, which goes out before
a contribution now and then and is answered at once. So the store knows both directions, and a round
trip that no transfer and no other worker has held up.
"""

from dataclasses import dataclass, field

from offbeat.log.records import Measured
from offbeat.store.board import Cells, LinkState, Row

LARGE = 1 << 12  # bytes of a frame from which it is timed; in less, the round trip is all there is
EVERY = 0.1  # seconds between two probes at least
SOONEST, LATEST = 1.0, 60.0  # seconds between two records of a link
PART = 64  # of the time that a link has lasted: how long a record waits, between those two


@dataclass
class Transfers:
    """Large transfers in one direction: how many bytes, and in how long."""

    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        self.nbytes += nbytes
        self.seconds += seconds

    def since(self, before: "Transfers") -> "Transfers":
        """What has come to it since it was like that."""
        return Transfers(self.nbytes - before.nbytes, self.seconds - before.seconds)

    def copy(self) -> "Transfers":
        return Transfers(self.nbytes, self.seconds)

    @property
    def rate(self) -> int:
        """Bytes a second; 0 if nothing was timed."""
        return int(self.nbytes / self.seconds) if self.seconds > 0 else 0


class Gauge:
    """A worker's place on the board, where its link shows how it does."""

    def __init__(self, cells: Cells, worker: int):
        self.cells, self.worker = cells, worker
        self.state = LinkState.IDLE
        for row in (Row.LINK, Row.ROUND_TRIP_US, Row.UP, Row.DOWN):
            cells[row, worker] = 0

    def show(self, state: int) -> None:
        """What the link does now."""
        if state != self.state:
            self.state = state
            self.cells[Row.LINK, self.worker] = state

    def measured(self, round_trip: float, up: int, down: int) -> None:
        """The latest figures; 0 is not known, and what was known before stays."""
        found = ((Row.ROUND_TRIP_US, round(1e6 * round_trip)), (Row.UP, up), (Row.DOWN, down))
        for row, value in found:
            if value:
                self.cells[row, self.worker] = value


@dataclass
class Counted:
    """What had gone over a link at some time."""

    sent: int = 0  # bytes, by the worker
    received: int = 0
    up: Transfers = field(default_factory=Transfers)
    down: Transfers = field(default_factory=Transfers)


class Meter:
    """What the store knows of one link: the link's thread adds, whoever keeps the log takes."""

    def __init__(self, gauge: Gauge, up: Transfers, round_trip: float, now: float):
        """`up` grows as the worker's contributions come; `round_trip` was measured before."""
        self.gauge, self.up, self.down = gauge, up, Transfers()
        self.trips = [round_trip] if round_trip > 0 else []
        gauge.measured(max(0.0, round_trip), 0, 0)
        self.shown = Transfers()  # of `up`, when the board was told
        self.news = False
        self.began, self.due = now, now + SOONEST
        self.taken = Counted()

    def probed(self, round_trip: float, nbytes: int, seconds: float) -> None:
        """As the link's thread: its worker has told what it has measured."""
        down = Transfers(max(0, nbytes), max(0.0, seconds))
        self.down.add(down.nbytes, down.seconds)
        if round_trip > 0:
            self.trips.append(round_trip)
        up = self.up.copy()
        self.gauge.measured(max(0.0, round_trip), up.since(self.shown).rate, down.rate)
        self.shown = up
        self.news = True

    def is_due(self, now: float) -> bool:
        """Whether there is something to record, and the last time is long enough ago.

        A long run has rarer ones, so that they stay few.
        """
        if not self.news or now < self.due:
            return False
        self.due = now + min(LATEST, max(SOONEST, (now - self.began) / PART))
        return True

    def take(self, time: float, worker: int, sent: int, received: int) -> Measured | None:
        """What has come to it since the last time, as a record; None if that is nothing.

        `sent` and `received` are all bytes so far, by the worker. The least of the round trips is
        the one that nothing else has held up.
        """
        before, now = self.taken, Counted(sent, received, self.up.copy(), self.down.copy())
        trips, self.trips = self.trips, []
        self.taken, self.news = now, False
        if (sent, received) == (before.sent, before.received):
            return None
        up, down = now.up.since(before.up), now.down.since(before.down)
        return Measured(
            time,
            worker,
            round(min(trips, default=0.0), 7),
            max(0, sent - before.sent),
            max(0, received - before.received),
            up.nbytes,
            round(up.seconds, 6),
            down.nbytes,
            round(down.seconds, 6),
        )
