"""A run in the few numbers that its page shows, from its folder alone, however long its log."""

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from offbeat.errors import CheckpointError
from offbeat.folder.checkpoint import RunFolder
from offbeat.folder.disk import read_json
from offbeat.log.files import last_lines
from offbeat.log.records import (
    Dropped,
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
from offbeat.report.recount import Recount
from offbeat.report.score import Climbs, Judged, Kind
from offbeat.report.summary import LayoutFigures, Step, Summary, Tally, Test, height, thinned
from offbeat.report.timeline import Segment, Timeline

CURVE = 400  # points at most of a curve; more cannot be told apart on a page
SEGMENTS = 2000  # stretches at most of a timeline, of all workers together
PROCESSES = 1000  # of a replica at most
EVENTS = 500  # at most, the first ones
SPEEDS = 100  # stretches of time at most in which samples are counted
PER_SPEED = 4  # updates on average at least in each, or there is more noise than speed

_HUGE = 1 << 40  # no honest count in one record is above this
_AGES = 1e15  # nor any number of seconds


class RunEvent(msgspec.Struct, frozen=True):
    """Something rare: a worker "joined", was "lost", "left", or had a contribution "refused"."""

    time: float
    kind: str
    worker: int


class Speed(msgspec.Struct, frozen=True):
    """Samples per second in the stretch of time that ends at `time`."""

    time: float
    samples_per_second: float


class RunDigest(msgspec.Struct):
    """A run, finished or not."""

    name: str  # of its folder
    summary: Summary  # counted again from the log; memory and hash as the run told them
    finished: bool
    batch_size: int
    virtual: bool  # its seconds are simulated
    ideal: float | None  # samples/s if everybody computed all the time, at the speeds seen
    tests: list[Test] = []
    losses: list[Step] = []
    speeds: list[Speed] = []
    segments: list[Segment] = []
    window: tuple[float, float] = (0.0, 0.0)  # the stretch of time that `segments` covers
    events: list[RunEvent] = []
    metric: Judged | None = None  # the user's own, if there is one
    climbs: Climbs | None = None  # what was reached and kept, from all tests that there were

    def __post_init__(self) -> None:
        if self.climbs is None:
            self.climbs = Climbs.of(self.tests, self.metric)

    def time_to(self, target: float, score: Kind = "accuracy") -> float | None:
        """Seconds until `target` was reached and kept, as in `History.time_to`, or None."""
        assert self.climbs is not None
        return self.climbs.by(score).time_to(target)

    def best(self, score: Kind = "accuracy") -> float | None:
        """The best level that was reached and kept."""
        assert self.climbs is not None
        return self.climbs.by(score).best()


def digest(folder: str | Path) -> RunDigest:
    """The digest of the run in `folder`, also while it goes on."""
    files = RunFolder(folder)
    config = _converted(files.config(), files.config_file, _Config)
    sums = files.manifest()
    finished = files.summary_file.exists()
    if sums is not None and finished:
        finished = files.summary_file.name in sums.files  # or it is just being written
    length = None
    if sums is not None and finished:
        sums.check(files.summary_file)
        length = files.finished_log(sums)
    told = _Told(emulated=config.emulate or [])
    if finished:
        told = _converted(read_json(files.summary_file), files.summary_file, _Told)
    count = _Count(config, _end(files.log_file))
    records = files.records(length) if files.log_file.exists() else iter(())
    for number, record in enumerate(records, 1):
        try:
            count.see(record)
        except ValueError as error:
            raise CheckpointError(f"{files.log_file} line {number} {error}") from None
    return count.digest(files.path.resolve().name, told, finished)


# ---------------------------------------------------------------- what the folder says

Count = Annotated[int, msgspec.Meta(ge=1, le=_HUGE)]


class _Config(msgspec.Struct):
    """What is read of run.json."""

    discipline: str
    engine: str
    workers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    batch_size: Count
    epochs: Count
    samples: Count
    emulate: list[float] | None = None
    accumulate: Count = 1
    drop_last: bool = False
    shares: str | None = None
    metric: Judged | None = None

    @property
    def left_out(self) -> int:
        """Samples of each epoch that make no whole batch, and are not trained on."""
        return self.samples % (self.batch_size * self.accumulate) if self.drop_last else 0


class _Told(msgspec.Struct):
    """What is read of summary.json: only what the log does not hold."""

    memory: dict[str, int] = {}
    parameter_hash: str = ""
    overlap: dict[str, float] = {}
    emulated: list[float] = []
    layout: LayoutFigures | None = None
    wire_bytes: int = 0  # of runs whose log does not say it
    turned_away: int = 0


S = TypeVar("S", _Config, _Told)


def _converted(value: Any, path: Path, kind: type[S]) -> S:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{path} is not of a run, or is damaged: {error}") from None


class _Timed(msgspec.Struct):
    time: float


def _end(path: Path) -> float:
    """About when a log ends: the latest time in its last lines."""
    latest = 0.0
    for line in last_lines(path):
        try:
            latest = max(latest, msgspec.json.decode(line, type=_Timed).time)
        except msgspec.MsgspecError:
            continue  # whoever reads the whole log says so, and in which line
    return latest


# ---------------------------------------------------------------- counting


class _Count:
    """Adds up what a digest holds, record by record, after looking at what a record claims."""

    def __init__(self, config: _Config, end: float):
        self.config = config
        self.virtual = config.engine == "sim"
        self.tally = Tally(config.workers, metric=config.metric)
        left_out = config.left_out
        self.ledger = Recount(config.samples - left_out, config.epochs, left_out)
        self.timeline = Timeline(config.workers, self.virtual, SEGMENTS, end / 2)
        self.width = end / SPEEDS
        self.counts = [0] * SPEEDS  # samples applied in each stretch of the run
        self.events: list[RunEvent] = []

    def see(self, record: Entry) -> None:
        """Count a record; ValueError says what is wrong with it."""
        if not 0 <= record.time <= _AGES:
            raise ValueError(f"happens at {record.time:g} s")
        if isinstance(record, Updated):
            for part in record.parts:
                self._check(part)
                self.ledger.settle(part.leases, "skipped" if part.skipped else "applied")
                if not part.skipped:
                    self._applied(record.time, part.samples)
        elif isinstance(record, Dropped):
            self._check(record.part)
            if not record.redo:
                self.ledger.settle(record.part.leases, "dropped")
        elif isinstance(record, Evaluated | Turned):
            self._sane(record.version, record.samples if isinstance(record, Evaluated) else 0)
        elif hasattr(record, "worker"):
            self._known(record.worker)
            if isinstance(record, Pulled):
                self._sane(record.bytes, 0)
            elif isinstance(record, Rested):
                self._lasting(record.wait, record.communication)
            elif isinstance(record, Linked):
                self._sane_link(record.round_trip)
            elif isinstance(record, Measured):
                self._sane(record.sent, record.received)
                self._sane(record.large_sent, record.large_received)
                self._sane_link(record.round_trip, record.sent_in, record.received_in)
            elif isinstance(record, Joined | Lost | Left | Refused):
                self._event(record)
        self.tally.see(record)
        self.timeline.see(record)

    def _check(self, part: Part) -> None:
        self._known(part.worker)
        self._sane(part.samples, part.bytes)
        self._sane(part.staleness, 0)
        self._lasting(part.compute, part.wait, part.communication)

    def _known(self, worker: int) -> None:
        if not 0 <= worker < self.config.workers:
            raise ValueError(f"is of worker {worker}, and run.json of {self.config.workers}")

    def _sane(self, one: int, other: int) -> None:
        if not (0 <= one <= _HUGE and 0 <= other <= _HUGE):
            raise ValueError(f"counts {one if not 0 <= one <= _HUGE else other}")

    def _lasting(self, *seconds: float) -> None:
        for one in seconds:
            if not -_AGES <= one <= _AGES:
                raise ValueError(f"lasts {one:g} s")

    def _sane_link(self, *seconds: float) -> None:
        for one in seconds:
            if not 0 <= one <= _AGES:
                raise ValueError(f"tells of a link that takes {one:g} s")

    def _applied(self, time: float, samples: int) -> None:
        if self.width > 0:
            self.counts[min(int(time / self.width), SPEEDS - 1)] += samples

    def _event(self, record: Joined | Lost | Left | Refused) -> None:
        first = isinstance(record, Joined) and not self.tally.figures[record.worker].joins
        if not first and len(self.events) < EVENTS:
            kind = {Joined: "joined", Lost: "lost", Left: "left", Refused: "refused"}[type(record)]
            self.events.append(RunEvent(record.time, kind, record.worker))

    def digest(self, name: str, told: _Told, finished: bool) -> RunDigest:
        config, tally = self.config, self.tally
        summary = tally.summary(
            config.discipline,
            config.engine,
            self.ledger.counts(),
            told.memory,
            told.parameter_hash if finished else tally.hash,
            {stage: share for stage, share in told.overlap.items() if math.isfinite(share)},
        )
        summary.emulated = [least for least in told.emulated if math.isfinite(least)]
        summary.layout = _measured(told.layout)
        summary.shares = config.shares or ""
        summary.wire_bytes = max(summary.wire_bytes, told.wire_bytes)
        summary.turned_away = told.turned_away
        summary.train_loss = _finite(summary.train_loss)
        steps = [step for step in tally.history.steps if math.isfinite(step.loss)]
        segments, window = self.timeline.cut(tally.seconds)
        return RunDigest(
            name=name,
            summary=summary,
            finished=finished,
            batch_size=config.batch_size,
            virtual=self.virtual,
            ideal=self._ideal(),
            tests=thinned(tally.history.tests, CURVE, height),
            losses=thinned(steps, CURVE, lambda step: step.loss),
            speeds=self._speeds(),
            segments=segments,
            window=window,
            events=self.events,
            metric=config.metric,
            climbs=tally.history.climbs,
        )

    def _ideal(self) -> float | None:
        at_work = [w for w in self.tally.figures if w.compute > 0]
        return _finite(sum(w.samples / w.compute for w in at_work)) if at_work else None

    def _speeds(self) -> list[Speed]:
        """As many stretches as there are updates to fill them."""
        if self.width <= 0:
            return []
        wanted = max(1, min(SPEEDS, self.tally.updates // PER_SPEED))
        divisors = [n for n in range(1, SPEEDS + 1) if SPEEDS % n == 0]
        together = next(n for n in divisors if SPEEDS // n <= wanted)
        width = self.width * together
        sums = [sum(self.counts[i : i + together]) for i in range(0, SPEEDS, together)]
        return [Speed((i + 1) * width, samples / width) for i, samples in enumerate(sums)]


def _measured(told: LayoutFigures | None) -> LayoutFigures | None:
    """What a run told of its processes; what follows from that is worked out again."""
    if told is None:
        return None
    whole = all(
        p.steps >= 0 and p.nbytes >= 0 and 0 <= p.busy <= p.total <= _AGES for p in told.per_process
    )
    found = LayoutFigures(
        told.layout,
        told.processes,
        predicted_seconds=_finite(told.predicted_seconds),
        predicted_idle_share=_finite(told.predicted_idle_share),
        per_process=told.per_process[:PROCESSES] if whole else [],
    )
    found.measure()
    return found


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
