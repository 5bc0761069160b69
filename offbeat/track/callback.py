"""A callback: a few methods that are told how a run goes, in plain values."""

from collections.abc import Mapping
from time import monotonic
from typing import Any

import msgspec

from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.log.records import (
    Dropped,
    Entry,
    EpochDone,
    Evaluated,
    Joined,
    Left,
    Lost,
    Refused,
    Updated,
)
from offbeat.report.summary import Summary, Tally, Test
from offbeat.track.meter import UpdateMeter


class Begin(msgspec.Struct, frozen=True):
    """A run begins, or goes on where it was stopped."""

    workers: int
    samples: int  # of all epochs together
    settings: dict[str, Any]  # what run.json says of the run, as far as it is known


class Update(msgspec.Struct, frozen=True):
    """One update or the mean of several; seconds are the run's, virtual in a simulation."""

    time: float
    version: int  # of the last of them
    samples: int  # applied since the run began
    updates: int  # how many this stands for
    loss: float | None  # of the training batches; None where a script tells none
    staleness: float
    samples_per_second: float
    waiting: float  # share of all workers' time
    waiting_by_worker: tuple[float | None, ...]  # None where a worker sent nothing meanwhile


class Epoch(msgspec.Struct, frozen=True):
    """Every sample of an epoch has been dealt with; means are over what came since the last."""

    time: float
    version: int
    samples: int
    epoch: int  # from 0
    loss: float | None
    staleness: float
    samples_per_second: float
    waiting: float


class Event(msgspec.Struct, frozen=True):
    """A worker joined, was lost or left, or a contribution was refused or dropped."""

    time: float
    kind: str  # join, lost, left, refuse or drop
    worker: int
    incarnation: int
    samples: int = 0  # issued again after a loss, left out after a drop
    redo: bool = False  # whether they are issued again after a drop

    @property
    def text(self) -> str:
        """The event in words."""
        words = {
            "join": f"worker {self.worker} joined, for the {_nth(self.incarnation)} time",
            "lost": f"worker {self.worker} was lost; {self.samples} samples are issued again",
            "left": f"worker {self.worker} left its loop; {self.samples} samples are issued again",
            "refuse": f"a contribution of worker {self.worker}, given up before, was refused",
            "drop": f"a contribution of worker {self.worker} came late; "
            f"{self.samples} samples {'are issued again' if self.redo else 'were dropped'}",
        }
        return words[self.kind]


class End(msgspec.Struct, frozen=True):
    """The run is over, was stopped, or has failed."""

    finished: bool  # whether every sample has been dealt with
    summary: Summary  # of what this callback saw; ledger and memory are left empty


def _nth(number: int) -> str:
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class Callback(Listener):
    """Is told how a run goes: override what you need, and pass it as `listeners=[...]`.

    `on_update` is called at most every `interval` seconds of real time, with the means of the
    updates in between, so that a slow receiver does not hold the run up. With `every = n` it gets
    the mean of every n updates instead, the same at each repetition of a simulation. All methods
    are called in the process and thread that started the run.
    """

    every: int | None = None
    interval: float = 0.1

    # ------------------------------------------------------------ to be overridden

    def on_begin(self, begin: Begin) -> None:
        """The run begins; nothing has been forked yet."""

    def on_update(self, update: Update) -> None:
        """The store has made one update or several."""

    def on_test(self, test: Test) -> None:
        """The store's parameters have been tried on the test set."""

    def on_epoch(self, epoch: Epoch) -> None:
        """An epoch is complete."""

    def on_event(self, event: Event) -> None:
        """A worker joined or was lost, or a contribution was refused or dropped."""

    def on_end(self, end: End) -> None:
        """The run is over, was stopped, or has failed: close what you have opened."""

    # ------------------------------------------------------------ a listener

    _follower: "_Follower | None" = None
    _settings: Mapping[str, Any] = {}
    _applied: int | None = None

    def describe(self, settings: Mapping[str, Any], applied: int | None = None) -> None:
        """What run.json says of the run about to begin, and the samples it has behind it."""
        self._settings, self._applied = dict(settings), applied

    def begin(self, store: Any, samples: int) -> None:
        if self.every is not None and self.every < 1:
            raise ConfigError(f"every must be at least 1, not {self.every}")
        workers = store.cells.shape[1]
        settings = dict(self._settings)
        if "discipline" not in settings and hasattr(store, "course"):
            settings["discipline"] = str(store.course)
        self.on_begin(Begin(workers, samples, settings))
        names = (str(settings.get("discipline", "")), str(settings.get("engine", "")))
        self._follower = _Follower(self, store, Tally(workers, history=False), samples, names)
        self._follower.found = self._applied

    def see(self, record: Entry) -> None:
        if self._follower is not None:
            self._follower.see(record)

    def idle(self) -> None:
        if self._follower is not None:
            self._follower.flush_if_due()

    def end(self) -> None:
        """May be called twice: by the engine, and by whoever wants to be sure."""
        follower, self._follower = self._follower, None
        if follower is not None:
            try:
                follower.flush()
            finally:
                self.on_end(follower.end())


class _Follower:
    """Turns the records of one run into the calls of one callback."""

    def __init__(
        self, callback: Callback, store: Any, tally: Tally, wanted: int, names: tuple[str, str]
    ):
        self.callback, self.store, self.tally = callback, store, tally
        self.wanted, self.names = wanted, names
        self.meter, self.epochs = UpdateMeter(tally.figures), UpdateMeter(tally.figures)
        self.time, self.version, self.samples = 0.0, 0, 0
        self.found: int | None = None  # samples applied before the first record here
        self.began = False
        self.due = 0.0  # real time from which the next update is told

    def see(self, record: Entry) -> None:
        if not self.began:
            self.began = True
            if self.found is None:  # a little too many where a server is quicker than its records
                self.found = self.store.applied
            self.meter.since = self.epochs.since = record.time
        self.tally.see(record)
        self.time = max(self.time, record.time)
        call = self.callback
        if isinstance(record, Updated):
            self._updated(record)
        elif isinstance(record, Evaluated):
            call.on_test(Test.of(record))
        elif isinstance(record, EpochDone):
            self._epoch(record)
        elif isinstance(record, Joined):
            call.on_event(Event(record.time, "join", record.worker, record.incarnation))
        elif isinstance(record, Lost | Left):
            kind = "lost" if isinstance(record, Lost) else "left"
            again = sum(lease.samples for lease in record.leases)
            call.on_event(Event(record.time, kind, record.worker, record.incarnation, again))
        elif isinstance(record, Refused):
            call.on_event(Event(record.time, "refuse", record.worker, record.incarnation))
        elif isinstance(record, Dropped):
            part = record.part
            late = (part.worker, part.incarnation, part.samples, record.redo)
            call.on_event(Event(record.time, "drop", *late))

    def _updated(self, record: Updated) -> None:
        if self.version == 0 and record.version > 1:
            self.samples = self.found or 0  # a run that is gone on with
        elif 0 < record.version <= self.version:
            self.samples = self.store.applied  # a killed server went back to its checkpoint
        self.version = record.version
        self.samples += self.meter.add(record)
        self.epochs.add(record)
        every = self.callback.every
        if every is None:
            self.flush_if_due()
        elif self.meter.updates >= every:
            self.flush()

    def flush_if_due(self) -> None:
        if self.callback.every is None and self.meter.updates:
            now = monotonic()
            if now >= self.due:
                self.flush()
                self.due = monotonic() + self.callback.interval  # from when the receiver is done

    def flush(self) -> None:
        if not self.meter.updates:
            return
        means = self.meter.read(self.time)
        self.callback.on_update(
            Update(self.time, self.version, self.samples, **msgspec.structs.asdict(means))
        )

    def _epoch(self, record: EpochDone) -> None:
        means = self.epochs.read(record.time)
        self.callback.on_epoch(
            Epoch(
                record.time,
                record.version,
                self.samples,
                record.epoch,
                means.loss,
                means.staleness,
                means.samples_per_second,
                means.waiting,
            )
        )

    def end(self) -> End:
        # What was seen here: a server may have gone on after its launcher had failed.
        finished = self.samples + self.store.given_up >= self.wanted
        return End(finished, self.tally.summary(*self.names, [], {}, self.tally.hash))
