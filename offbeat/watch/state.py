"""How a run stands, from its log alone: curves, speed, staleness, and who waits for whom."""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from offbeat.data.lease import Lease
from offbeat.log.records import (
    Admitted,
    Dropped,
    Ended,
    Entry,
    EpochDone,
    Evaluated,
    Joined,
    Left,
    Linked,
    Lost,
    Part,
    Pulled,
    Refused,
    Rested,
    Turned,
    Updated,
)
from offbeat.store.board import Cells, LinkState
from offbeat.store.board import Row as On
from offbeat.watch.picture import (
    POINTS,
    Curve,
    LivePicture,
    RareEvent,
    WorkerRow,
    bars,
    flow,
    listed,
    seconds,
    short,
)

LOOKS = 8  # over which the speed is measured
RECENT = 512  # contributions in the histogram of staleness
EVENTS = 60  # rare events that are kept
ROWS = 100  # workers with a row of their own

ABSENT, STARTING, COMPUTING, WAITING = "not there yet", "starting", "computing", "waiting"
RESTING, LOST, LEFT, DONE, STOPPED = "resting", "lost", "left", "done", "stopped"
IN_LINK = "in its link"  # it waits for its link, and for nobody
BUSY = {
    LinkState.SENDING: "(sending)",
    LinkState.RECEIVING: "(receiving)",
    LinkState.BROKEN: "(out of reach)",
}


class WorkerState:
    """What the log has told of one worker."""

    __slots__ = (
        *("number", "state", "clock", "staleness", "contributions", "incarnation", "counted"),
        *("since", "pending", "free", "missed"),
    )

    def __init__(self, number: int):
        self.number, self.state = number, ABSENT
        self.clock = self.staleness = self.contributions = self.incarnation = 0
        self.counted = -1  # sequence of its last contribution
        self.since: float | None = None  # when it contributed, until it pulls again
        self.pending = False  # its contribution is in an unfinished round
        self.free = False  # it goes on without a pull, so that it never waits for one
        self.missed = ""  # who waited for it when it was lost

    @property
    def at_work(self) -> bool:
        """Whether others may have to wait for it."""
        return self.state in (STARTING, COMPUTING) and not self.pending

    def waits(self, now: float) -> bool:
        """Between a contribution and the next pull no time passes, unless it has to wait."""
        held = self.since is not None and self.since < now and not self.free
        return held and self.state == COMPUTING


class RunState:
    """Takes the records of a run one by one, and draws a picture of it at any moment."""

    def __init__(
        self, workers: int, title: str = "", virtual: bool = False, overlaps: bool = False
    ):
        """`overlaps` says that workers compute while their links are busy."""
        self.title, self.virtual, self.overlaps = title, virtual, overlaps
        self.linked = False  # whether some are on other hosts
        self.states = [WorkerState(number) for number in range(workers)]
        self.time = 0.0
        self.began = False  # whether anybody is at work
        self.version = self.epochs = self.trained = 0
        self.loss, self.rate = Curve(), Curve()
        self.tests: list[Evaluated] = []
        self.last: float | None = None  # loss, smoothed
        self.stale_sum = self.parts = 0
        self.recent: deque[int] = deque(maxlen=RECENT)
        self.looks: deque[tuple[float, int]] = deque(maxlen=LOOKS)
        self.counts = dict.fromkeys(("dropped", "skipped", "reissued", "refused", "lost"), 0)
        self.events: deque[RareEvent] = deque(maxlen=EVENTS)
        self.told = 0  # events so far
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            Updated: self._updated,
            Pulled: self._pulled,
            Admitted: self._admitted,
            Dropped: self._dropped,
            Joined: self._joined,
            Lost: self._lost,
            Left: self._left,
            Linked: self._linked,
            Ended: self._ended,
            Turned: self._turned,
            Refused: self._refused,
            Rested: self._rested,
            EpochDone: self._epoch_done,
            Evaluated: self._evaluated,
        }

    def see(self, record: Entry) -> None:
        handler = self._handlers.get(type(record))
        if handler is not None:
            handler(record)
        if record.time > self.time:  # a test tells of the moment it was asked for
            self.time = record.time

    # ------------------------------------------------------------ the path of a gradient

    def _pulled(self, record: Pulled) -> None:
        worker = self.states[record.worker]
        if worker.state == RESTING:  # woken, and level with the slowest
            worker.clock = max([worker.clock, *(one.clock for one in self.at_work()[:1])])
        worker.since, worker.pending, worker.state = None, False, COMPUTING
        self.began = True

    def _admitted(self, record: Admitted) -> None:
        worker = self.states[record.worker]
        self._contributed(worker, record.sequence, record.leases, record.time)
        worker.pending = True

    def _updated(self, record: Updated) -> None:
        if record.version <= self.version:  # the store went back to a checkpoint
            self._went_back(record.time)
        self.version = record.version
        loss = told = 0.0
        for part in record.parts:
            worker = self.states[part.worker]
            if part.incarnation == worker.incarnation:
                if part.sequence > worker.counted:
                    self._contributed(worker, part.sequence, part.leases, record.time)
                if worker.pending:  # the round is over: it may go on, whether it does or not
                    worker.pending, worker.since = False, None
            worker.staleness = part.staleness
            worker.contributions += 1
            self.stale_sum += part.staleness
            self.parts += 1
            self.recent.append(part.staleness)
            if part.skipped:
                self._skipped(part, record.time)
                continue
            self.trained += part.samples
            if part.loss is not None:
                told += part.samples
                loss += part.loss * part.samples
        if told:
            self.loss.add(record.time, loss / told)
            self.last = loss / told if self.last is None else 0.9 * self.last + 0.1 * loss / told

    def _dropped(self, record: Dropped) -> None:
        part = record.part
        worker = self.states[part.worker]
        if part.incarnation == worker.incarnation:
            self._contributed(worker, part.sequence, part.leases, record.time)
        worker.contributions += 1
        self.counts["reissued" if record.redo else "dropped"] += part.samples

    def _contributed(
        self, worker: WorkerState, sequence: int, leases: Sequence[Lease], time: float
    ) -> None:
        worker.counted = sequence
        worker.clock += len(leases)
        if worker.since is not None:
            worker.free = True  # it has gone on from its last contribution without a pull
        worker.since = time

    def _skipped(self, part: Part, time: float) -> None:
        self.counts["skipped"] += part.samples
        what = f"worker {part.worker}: a contribution that is not finite was skipped"
        self._tell(time, "skipped", what)

    def _went_back(self, time: float) -> None:
        self._tell(time, "back", "the server was killed; the run goes on from a checkpoint")
        for curve in (self.loss, self.rate):
            curve.cut(time)
        self.tests = [test for test in self.tests if test.time <= time]
        self.looks.clear()
        self.time = time

    # ------------------------------------------------------------ workers come and go

    def _joined(self, record: Joined) -> None:
        old = self.states[record.worker]
        worker = self.states[record.worker] = WorkerState(record.worker)
        worker.state, worker.clock, worker.incarnation = STARTING, record.clock, record.incarnation
        worker.contributions, worker.staleness = old.contributions, old.staleness
        again = old.incarnation > 0
        if again or self.version:
            words = f" again, as incarnation {record.incarnation}" if again else ""
            self._tell(record.time, "joined", f"worker {record.worker} joined{words}")

    def _rested(self, record: Rested) -> None:
        worker = self.states[record.worker]
        worker.state, worker.since = RESTING, None

    def _lost(self, record: Lost) -> None:
        worker, now = self.states[record.worker], record.time
        at_work = self.at_work()
        waited = (
            [one for one in self.states if one.waits(now) and worker in blocking(one, at_work)]
            if worker in at_work
            else []
        )
        back = sum(lease.samples for lease in record.leases)
        self.counts["lost"] += 1
        self.counts["reissued"] += back
        worker.missed = ""
        if waited:
            longest = max(now - one.since for one in waited if one.since is not None)
            who = listed([one.number for one in waited])
            worker.missed = f"{who} waited {seconds(longest)} for it"
        worker.state, worker.since, worker.pending = LOST, None, False
        told = [f"worker {record.worker} was lost"]
        told += [worker.missed] if waited else ["nobody waited for it"]
        told += [f"{back:,} samples go out again"] if back else []
        self._tell(now, "lost", "; ".join(told))

    def _left(self, record: Left) -> None:
        worker, back = self.states[record.worker], sum(lease.samples for lease in record.leases)
        self.counts["reissued"] += back
        worker.state, worker.since, worker.pending, worker.missed = LEFT, None, False, ""
        again = f"; {back:,} samples go out again" if back else ""
        self._tell(record.time, "left", f"worker {record.worker} left its loop{again}")

    def _linked(self, record: Linked) -> None:
        self.linked = True
        far = f"round trip {1e3 * record.round_trip:.2g} ms"
        self._tell(record.time, "link", f"worker {record.worker} calls from {record.host}, {far}")

    def _ended(self, record: Ended) -> None:
        self._tell(record.time, "ended", f"worker {record.worker} ended the run for all")

    def _turned(self, record: Turned) -> None:
        if record.level:
            at_work = self.at_work()
            for worker in at_work:
                worker.clock = at_work[0].clock
        rate = f", rate × {record.rate:.3g}" if record.rate != 1 else ""
        self._tell(record.time, "turn", f"from here on {record.discipline}{rate}: {record.why}")

    def _refused(self, record: Refused) -> None:
        self.counts["refused"] += 1
        what = f"a contribution of worker {record.worker}, incarnation {record.incarnation}"
        self._tell(record.time, "refused", f"{what}, was refused: it had been given up")

    def _epoch_done(self, record: EpochDone) -> None:
        self.epochs = record.epoch + 1

    def _evaluated(self, record: Evaluated) -> None:
        self.tests.append(record)
        if len(self.tests) > POINTS:  # the last one stays
            self.tests = self.tests[1::2] if len(self.tests) % 2 == 0 else self.tests[::2]

    def _tell(self, time: float, kind: str, text: str) -> None:
        self.told += 1
        self.events.append(RareEvent(self.told, short(time), kind, text))

    # ------------------------------------------------------------ who waits for whom

    def at_work(self) -> list[WorkerState]:
        """Those for whom others may have to wait, the furthest behind first."""
        return sorted(
            (worker for worker in self.states if worker.at_work), key=lambda worker: worker.clock
        )

    def _row(
        self,
        worker: WorkerState,
        now: float,
        over: str,
        at_work: list[WorkerState],
        links: Mapping[int, str],
    ) -> WorkerRow:
        state, about = worker.state, ""
        if state == LOST:
            about = f"({worker.missed})" if worker.missed else ""
        elif over and state != LEFT:
            state = DONE if over == "finished" else STOPPED
        elif worker.waits(now) and (blockers := blocking(worker, at_work)):
            state, first = WAITING, blockers[0]
            behind = worker.clock - first.clock
            more = f", {behind:,} behind" if behind > 0 else ""
            link = ", in its link" if links.get(first.number) else ""
            about = f"for worker {first.number} (clock {first.clock:,}{more}{link})"
            if len(blockers) > 1:
                about += f" and {len(blockers) - 1:,} more"
        elif state in (STARTING, COMPUTING) and (busy := links.get(worker.number)):
            if not self.overlaps:
                state = IN_LINK
            about = busy
        return WorkerRow(
            worker.number, state, about, worker.clock, worker.staleness, worker.contributions
        )

    def _links(self, cells: Cells | None) -> dict[int, str]:
        """What links are busy with now, by worker."""
        if not self.linked or cells is None:
            return {}
        found = cells[On.LINK].tolist()
        return {number: BUSY[one] for number, one in enumerate(found) if one in BUSY}

    def _shown(self, rows: list[WorkerRow]) -> list[WorkerRow]:
        """All, or those that are worth a look and then the first ones."""
        if len(rows) <= ROWS:
            return rows
        rows = sorted(rows, key=lambda row: (row.state != LOST, row.state == WAITING))
        return sorted(rows[:ROWS], key=lambda row: row.number)

    # ------------------------------------------------------------ pictures

    def picture(
        self,
        now: float,
        applied: int,
        given_up: int,
        samples: int,
        over: str,
        cells: Cells | None = None,
    ) -> LivePicture:
        """How things stand at `now`; the counts of samples, and the board, are the store's own."""
        if not self.looks or now > self.looks[-1][0]:
            self.looks.append((now, self.trained))
        (start, before), (end, after) = self.looks[0], self.looks[-1]
        rate = (after - before) / (end - start) if end > start else 0.0
        if end > start and not over:
            self.rate.add(end, rate)
        if over and now > 0 and len(self.rate.points) < 2:
            rate = self.trained / now  # over before there was a second look
        at_work = self.at_work()
        links = self._links(cells)
        rows = [self._row(worker, now, over, at_work, links) for worker in self.states]
        if self.linked and cells is not None:
            for row in rows:
                found = (cells.item(one, row.number) for one in (On.ROUND_TRIP_US, On.UP, On.DOWN))
                row.link = flow(*found)
        test = self.tests[-1] if self.tests else None
        recent = sum(self.recent) / len(self.recent) if self.recent else 0.0
        return LivePicture(
            title=self.title,
            virtual=self.virtual,
            over=over,
            time=short(now),
            done=min(1.0, (applied + given_up) / max(1, samples)),
            samples=samples,
            version=self.version,
            epochs=self.epochs,
            rate=short(rate),
            loss=self.last,
            test_loss=test.loss if test else None,
            accuracy=test.accuracy if test else None,
            staleness=self.stale_sum / self.parts if self.parts else 0.0,
            staleness_recent=recent,
            bars=bars(self.recent),
            counts={"applied": applied, **self.counts},
            curves={
                "loss": self.loss.points,
                "rate": self.rate.points,
                "test_loss": [(short(t.time), t.loss) for t in self.tests if t.loss is not None],
                "accuracy": [
                    (short(t.time), t.accuracy) for t in self.tests if t.accuracy is not None
                ],
            },
            workers=len(rows),
            states=dict(Counter(row.state for row in rows)),
            rows=self._shown(rows),
            linked=self.linked,
            events=list(self.events),
        )


def blocking(waiting: WorkerState, at_work: list[WorkerState]) -> list[WorkerState]:
    """Those of `at_work`, which begins with the furthest behind, that `waiting` waits for.

    In an unfinished round these are all: they have not contributed to it. Otherwise clocks bind,
    and it is whoever is furthest behind: that one never waits itself.
    """
    if waiting.pending or not at_work:
        return at_work
    lowest = at_work[0].clock
    if lowest >= waiting.clock:
        return []
    return list(takewhile(lambda worker: worker.clock == lowest, at_work))
