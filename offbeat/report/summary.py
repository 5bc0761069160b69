"""The figures of a run, added up record by record: speed, staleness, waiting, bytes, samples."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from offbeat.log.log import Listener
from offbeat.log.records import (
    Admitted,
    Dropped,
    Ended,
    Entry,
    Evaluated,
    Joined,
    Left,
    Linked,
    Lost,
    Measured,
    Part,
    Pulled,
    Refused,
    Rested,
    Turned,
    Updated,
)
from offbeat.report.score import Climbs, Judged, Kind
from offbeat.report.words import counted, visible

STEPS = 8192  # updates at most in a history; then it is thinned, and the log still has them all
TESTS = 4096  # tests at most in a history
MOST_TURNS = 8  # rows of a table


class LinkFigures(msgspec.Struct):
    """How the link of a worker on another host did; 0 is not known."""

    host: str
    round_trip: float  # seconds; on average, or when it was reached if it was not measured again
    sent: int = 0  # bytes over the network, with all that goes beside contributions
    received: int = 0
    up: float = 0.0  # bytes a second of large transfers to the store
    down: float = 0.0  # and from it
    transfers: float = 0.0  # seconds that these took, either way


class WorkerFigures(msgspec.Struct):
    """Where one worker's time and bytes went; seconds are the engine's, virtual in a simulation."""

    steps: int = 0
    contributions: int = 0
    samples: int = 0
    compute: float = 0.0
    wait: float = 0.0
    communication: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    staleness: float = 0.0  # mean
    joins: int = 0
    link: LinkFigures | None = None  # None where there is no network

    @property
    def batch(self) -> float:
        """Samples of a step on average."""
        return self.samples / self.steps if self.steps else 0.0

    @property
    def in_link(self) -> float:
        """Seconds that its link took: what was timed, and a round trip for each exchange.

        The rest of its exchange was the store's. What was hidden behind a step took nothing.
        """
        if self.link is None or not self.link.sent:  # a log that does not tell
            return self.communication
        timed = self.link.transfers + self.contributions * self.link.round_trip
        return min(self.communication, timed)

    @property
    def link_share(self) -> float:
        """Of its time, what its link took."""
        busy = self.compute + self.wait + self.communication
        return self.in_link / busy if busy else 0.0


class ProcessFigures(msgspec.Struct):
    """One process of a split replica, added up over all replicas."""

    steps: int
    busy: float  # seconds in forward and backward passes
    total: float  # seconds of these steps, with reading, waiting and handing over
    nbytes: int  # parameters, gradients and state: the most that one of them held
    idle_share: float = 0.0  # of the time that the replica's step takes


class LayoutFigures(msgspec.Struct):
    """What a split run was predicted to take, and what it took; None is not known.

    A simulator computes all stages in one process, so that there it measures nothing.
    """

    layout: str
    processes: int  # of all replicas
    seconds: float | None = None  # of a replica's step
    idle_share: float | None = None  # of the processes' time in a step
    predicted_seconds: float | None = None
    predicted_idle_share: float | None = None
    per_process: list[ProcessFigures] = []

    def measure(self) -> None:
        """Seconds and idle shares from what the processes counted; the slowest ends a step."""
        mine = [p for p in self.per_process if p.steps > 0]
        longest = max((p.total / p.steps for p in mine), default=0.0)
        if not longest > 0 or len(mine) < len(self.per_process):
            return
        for process in mine:
            process.idle_share = 1 - process.busy / process.steps / longest
        self.seconds = longest
        self.idle_share = sum(p.idle_share for p in mine) / len(mine)


class TurnFigures(msgspec.Struct):
    """A change of the discipline: when, to what, with which rate, and why."""

    time: float
    version: int
    discipline: str
    rate: float
    why: str

    def __str__(self) -> str:
        when = f"at {self.time:.4g} s, version {self.version:,}"
        return visible(f"to {self.discipline} {when}, rate × {self.rate:.3g}: {self.why}")


class Summary(msgspec.Struct):
    """What a run came to. Two simulations with the same seed give equal summaries."""

    discipline: str
    engine: str
    workers: int
    seconds: float
    updates: int
    samples: int
    samples_per_second: float
    loss: float | None  # of the last test
    accuracy: float | None
    train_loss: float | None  # of the last update
    staleness_mean: float
    staleness_max: int
    staleness_counts: dict[int, int]
    wait_share: float  # of all workers' time
    dropped: int
    refused: int
    lost: int
    skipped: int
    bytes_sent: int
    bytes_received: int
    memory: dict[str, int]
    overlap: dict[str, float]  # how well the stages of a worker overlapped; empty where they don't
    per_worker: list[WorkerFigures]
    ledger: list[dict[str, int]]
    parameter_hash: str
    emulated: list[float] = []  # least seconds of each worker's step; empty where speeds are real
    layout: LayoutFigures | None = None  # None where a replica is one process
    metric: float | None = None  # of the last test, where the user gave one
    metric_name: str = ""
    metrics: dict[str, float | None] = {}  # others of the last test
    left: list[int] = []  # workers whose script has left its loop before the end
    ended_by: int | None = None  # the worker whose script has ended the run for all
    wire_bytes: int = 0  # over the network, both ways, with all that goes beside contributions
    turns: list[TurnFigures] = []  # of the course, in order; a discipline that holds has none
    shares: str = ""  # of a round's samples, as they were asked for; empty where they are equal
    turned_away: int = 0  # connections from others that did not belong to the run

    @property
    def turn_rows(self) -> list[str]:
        """The turns of its course in words; of many the first, and the last."""
        rows = [str(turn) for turn in self.turns]
        if len(rows) > MOST_TURNS:
            rows[MOST_TURNS - 2 : -1] = [f"{len(rows) - MOST_TURNS + 1:,} more"]
        return rows

    def to_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self, str_keys=True)
        for worker in built["per_worker"]:
            if worker["link"] is None:
                del worker["link"]
        return built


class Test(msgspec.Struct, frozen=True):
    """One evaluation on the test set."""

    time: float
    version: int
    samples: int
    loss: float | None
    accuracy: float | None
    metric: float | None = None  # the user's own
    metrics: dict[str, float | None] = {}  # others beside it

    @classmethod
    def of(cls, record: Evaluated) -> "Test":
        return cls(
            *(record.time, record.version, record.samples),
            *(record.loss, record.accuracy, record.metric),
            metrics=record.metrics,
        )


class Step(msgspec.Struct, frozen=True, gc=False):
    """One update as the history keeps it."""

    time: float
    version: int
    samples: int
    loss: float


class History(msgspec.Struct):
    """Loss and scores over time, versions and samples.

    Of a very long run it holds thousands of tests and updates, and not all: the first, the last,
    and the extremes between. The log in a run's folder has them all.
    """

    tests: list[Test] = []
    steps: list[Step] = []
    climbs: Climbs | None = None  # what was reached and kept, from all tests that there were

    def __post_init__(self) -> None:
        if self.climbs is None:
            self.climbs = Climbs.of(self.tests)

    def time_to(self, target: float, score: Kind = "accuracy") -> float | None:
        """Seconds until `target` was reached and kept, or None.

        Kept: a test is there, and so is the mean of it and the next two; at the end of a run, of
        those that are left. `score` is "accuracy", "loss" or "metric", the user's own.
        """
        assert self.climbs is not None
        return self.climbs.by(score).time_to(target)

    def tested(self, test: Test) -> None:
        """Another test."""
        assert self.climbs is not None
        self.climbs.see(test)
        self.tests.append(test)
        if len(self.tests) > TESTS:
            self.tests = thinned(self.tests, TESTS // 2, height)

    def stepped(self, step: Step) -> None:
        """Another update."""
        self.steps.append(step)
        if len(self.steps) > STEPS:
            self.steps = thinned(self.steps, STEPS // 2, lambda one: one.loss)

    def copy(self) -> "History":
        assert self.climbs is not None
        return History(list(self.tests), list(self.steps), self.climbs.copy())

    def __repr__(self) -> str:
        """One line, however long the run was."""
        return f"<History: {counted(len(self.tests), 'test')}, {counted(len(self.steps), 'step')}>"


P = TypeVar("P", Test, Step)


def thinned(points: list[P], most: int, value: Callable[[P], float]) -> list[P]:
    """At most `most` points: the first, the last, and the extremes of equal stretches of time."""
    if len(points) <= most:
        return list(points)
    begin, values = points[0].time, [value(point) for point in points]
    stretches = (most - 2) // 2
    span = points[-1].time - begin
    per = stretches / span if span > 0 else 0.0
    lowest: list[int] = [0] * stretches  # where; 0 is nowhere yet, and the first stays anyway
    highest: list[int] = [0] * stretches
    for index in range(1, len(points) - 1):
        here = values[index]
        place = max(0, min(int((points[index].time - begin) * per), stretches - 1))
        if not lowest[place]:
            lowest[place] = highest[place] = index
        elif here < values[lowest[place]]:
            lowest[place] = index
        elif here > values[highest[place]]:
            highest[place] = index
    return [points[index] for index in sorted({0, len(points) - 1, *lowest, *highest})]


def height(test: Test) -> float:
    """What a curve of tests shows of one."""
    found = next((v for v in (test.metric, test.accuracy, test.loss) if v is not None), 0.0)
    return found


class LinkSums(msgspec.Struct):
    """What has been measured of a link so far, and what it comes to."""

    host: str
    reached: float  # seconds of a round trip, when it was reached
    trips: int = 0
    round_trips: float = 0.0
    sent: int = 0
    received: int = 0
    large_sent: int = 0
    sent_in: float = 0.0
    large_received: int = 0
    received_in: float = 0.0

    def add(self, record: Measured) -> None:
        self.trips += record.round_trip > 0
        self.round_trips += record.round_trip
        self.sent += record.sent
        self.received += record.received
        self.large_sent += record.large_sent
        self.sent_in += record.sent_in
        self.large_received += record.large_received
        self.received_in += record.received_in

    def figures(self) -> LinkFigures:
        return LinkFigures(
            self.host,
            self.round_trips / self.trips if self.trips else self.reached,
            self.sent,
            self.received,
            self.large_sent / self.sent_in if self.sent_in > 0 else 0.0,
            self.large_received / self.received_in if self.received_in > 0 else 0.0,
            self.sent_in + self.received_in,
        )


class Tally(Listener):
    """Adds a run up as its records pass; `history=False` keeps tests alone."""

    def __init__(self, workers: int, history: bool = True, metric: Judged | None = None):
        self.figures = [WorkerFigures() for _ in range(workers)]
        self.links: dict[int, LinkSums] = {}  # of workers on other hosts
        self.metric = metric
        self.history = History([], [], Climbs.of(metric=metric))
        self.keep = history
        self.staleness: Counter[int] = Counter()
        self.updates = self.samples = self.dropped = self.refused = self.lost = self.skipped = 0
        self.left: set[int] = set()
        self.turns: list[TurnFigures] = []
        self.ended_by: int | None = None
        self.seconds = 0.0
        self.hash = ""

    def copy(self) -> "Tally":
        """What it has come to so far, to go back to."""
        other = Tally(0, self.keep)
        for name, value in vars(self).items():
            setattr(other, name, copy.copy(value))
        other.figures = [copy.copy(mine) for mine in self.figures]
        other.links = {worker: copy.copy(sums) for worker, sums in self.links.items()}
        other.history = self.history.copy()
        return other

    def see(self, record: Entry) -> None:
        if type(record) is Measured:  # the last ones come when all is over
            self._measured(record)
            return
        if record.time > self.seconds:
            self.seconds = record.time
        # By far the most are of these three, and isinstance takes its time with such values.
        if type(record) is Updated:
            self._updated(record)
        elif type(record) is Pulled:
            self.figures[record.worker].bytes_received += record.bytes
        elif type(record) is Admitted:
            return  # it counts when it is applied
        elif isinstance(record, Evaluated):
            self.history.tested(Test.of(record))
        elif isinstance(record, Joined):
            self.figures[record.worker].joins += 1
            if record.worker in self.left:  # it failed, and was started again
                self.left.discard(record.worker)
                self.lost += 1
        elif isinstance(record, Dropped):
            self.dropped += 1
            self._spent(record.part)
        elif isinstance(record, Rested):
            self.figures[record.worker].wait += record.wait
            self.figures[record.worker].communication += record.communication
        elif isinstance(record, Refused):
            self.refused += 1
        elif isinstance(record, Turned):
            told = (record.time, record.version, record.discipline, record.rate, record.why)
            self.turns.append(TurnFigures(*told))
        elif isinstance(record, Lost):
            self.lost += 1
        elif isinstance(record, Left):
            self.left.add(record.worker)
        elif isinstance(record, Ended):
            self.ended_by = record.worker
        elif isinstance(record, Linked):
            self._linked(record)

    def _linked(self, record: Linked) -> None:
        sums = self.links.setdefault(record.worker, LinkSums(record.host, record.round_trip))
        sums.host, sums.reached = record.host, record.round_trip
        self.figures[record.worker].link = sums.figures()

    def _measured(self, record: Measured) -> None:
        sums = self.links.setdefault(record.worker, LinkSums("", record.round_trip))
        sums.add(record)
        self.figures[record.worker].link = sums.figures()

    def _updated(self, record: Updated) -> None:
        self.updates += 1
        self.hash = record.hash or self.hash
        loss = told = 0.0
        for part in record.parts:
            self._spent(part)
            self.staleness[part.staleness] += 1
            if part.skipped:
                self.skipped += 1
                continue
            self.samples += part.samples
            if self.keep and part.loss is not None:  # a script need not tell
                told += part.samples
                loss += part.loss * part.samples
        if told:
            self.history.stepped(Step(record.time, record.version, self.samples, loss / told))

    def _spent(self, part: Part) -> None:
        mine = self.figures[part.worker]
        mine.steps += len(part.leases)
        mine.samples += part.samples
        mine.compute += part.compute
        mine.wait += part.wait
        mine.communication += part.communication
        mine.bytes_sent += part.bytes
        mine.staleness += (part.staleness - mine.staleness) / (mine.contributions + 1)
        mine.contributions += 1

    def summary(
        self,
        discipline: str,
        engine: str,
        ledger: list[dict[str, int]],
        memory: dict[str, int],
        parameter_hash: str,
        overlap: dict[str, float] | None = None,
    ) -> Summary:
        total = sum(self.staleness.values())
        busy = sum(w.compute + w.wait + w.communication for w in self.figures)
        last = self.history.tests[-1] if self.history.tests else None
        return Summary(
            discipline=discipline,
            engine=engine,
            workers=len(self.figures),
            seconds=self.seconds,
            updates=self.updates,
            samples=self.samples,
            samples_per_second=self.samples / self.seconds if self.seconds else 0.0,
            loss=last.loss if last else None,
            accuracy=last.accuracy if last else None,
            train_loss=self.history.steps[-1].loss if self.history.steps else None,
            staleness_mean=(
                sum(s * n for s, n in self.staleness.items()) / total if total else 0.0
            ),
            staleness_max=max(self.staleness, default=0),
            staleness_counts=dict(sorted(self.staleness.items())),
            wait_share=sum(w.wait for w in self.figures) / busy if busy else 0.0,
            dropped=self.dropped,
            refused=self.refused,
            lost=self.lost,
            skipped=self.skipped,
            bytes_sent=sum(w.bytes_sent for w in self.figures),
            bytes_received=sum(w.bytes_received for w in self.figures),
            memory=memory,
            overlap=overlap or {},
            per_worker=self.figures,
            ledger=ledger,
            parameter_hash=parameter_hash,
            metric=last.metric if last else None,
            metric_name=self.metric.name if self.metric else "",
            metrics=dict(last.metrics) if last else {},
            left=sorted(self.left),
            ended_by=self.ended_by,
            turns=list(self.turns),
            wire_bytes=sum(w.link.sent + w.link.received for w in self.figures if w.link),
        )
