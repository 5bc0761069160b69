"""Run a log again in one process, in the order it says, and compare every hash on the way."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.config.describe import (
    Recorded,
    describe_job,
    first_difference,
    recorded_optimizer,
    settings_of,
)
from offbeat.config.job import Job
from offbeat.config.keywords import check_names
from offbeat.config.run_config import Options, RunConfig
from offbeat.config.setup import make_job
from offbeat.config.task import OptimizerFactory
from offbeat.data.lease import Lease
from offbeat.data.loader import unpacked
from offbeat.engine.session import fixed_arithmetic
from offbeat.errors import CheckpointError, ReplayMismatch
from offbeat.folder.checkpoint import RunFolder, model_tensors
from offbeat.folder.tensors import load_tensors
from offbeat.log.log import Log
from offbeat.log.records import (
    Admitted,
    Dropped,
    Entry,
    EpochDone,
    Joined,
    Left,
    Lost,
    Part,
    Pulled,
    Relaid,
    Rested,
    Turned,
    Updated,
)
from offbeat.model.objective import Loss
from offbeat.model.shared_model import untouched
from offbeat.model.table import check_tensors
from offbeat.worker.contribution import Contribution, Snapshot
from offbeat.worker.worker import Timing, Worker


@dataclass(frozen=True)
class Difference:
    """The first version at which replay and log part ways, and how."""

    version: int
    reason: str


@dataclass(frozen=True)
class Replay:
    """How far a replay went, and whether it arrived at the same bits."""

    versions: int
    compared: int
    difference: Difference | None = None

    @property
    def identical(self) -> bool:
        return self.difference is None

    def check(self) -> "Replay":
        """Raise ReplayMismatch unless everything was identical."""
        if self.difference is not None:
            raise ReplayMismatch(
                f"version {self.difference.version} is the first that differs: "
                f"{self.difference.reason}"
            )
        return self


def replay(
    folder: str | Path,
    model: nn.Module,
    data: Dataset[Any] | DataLoader[Any],
    loss: Loss,
    *,
    optimizer: OptimizerFactory | None = None,
    every: int = 1,
    **options: Unpack[Options],
) -> Replay:
    """Execute the log of the run in `folder` again and compare every `every`-th hash.

    Settings come from the folder; what is code (model, data, loss, schedules, a custom optimiser)
    has to be passed as it was to `train`. Initial parameters come from the folder too.
    """
    place = RunFolder(folder)
    config = settings_of(place)
    with fixed_arithmetic(config.threads), untouched(model):
        if optimizer is None:
            optimizer = recorded_optimizer(config, place)
        code = {"model": model, "data": data, "loss": loss, "optimizer": optimizer}
        asked = _config(config, code, options)
        make = partial(_with_layout, asked)
        job = make(config.layout)
        return follow(place, job, describe_job(asked, job), every, make)


Make = Callable[[str | None], Job]


def follow(
    place: RunFolder,
    job: Job,
    described: Mapping[str, Any],
    every: int = 1,
    make: Make | None = None,
) -> Replay:
    """Replay the run in `place` with a job that is described as its own is.

    `make` makes that job with another layout, for a run that went on with one.
    """
    config = place.config()
    # The bits are the same over any number of shards.
    different = first_difference(config, {k: v for k, v in described.items() if k != "shards"})
    if different is not None:
        raise CheckpointError(f"{place.path} cannot be replayed with this: {different}")
    job.discipline.check_order()
    job.check_here()
    initial = load_tensors(place.checked(place.initial_file))
    check_tensors(initial, model_tensors(job.content.model), str(place.initial_file))
    job.content.model.load_state_dict(initial)
    job.content.shared.begin()
    start = place.start_file
    replayer = _Replayer(job, every, place.checked(start) if start.exists() else start, make)
    if config.get("overlap") is True:
        replayer.overlap()
    with job.content.devices.single.entered():
        found = replayer.run(place)
    if found.identical:
        place.check_end()
    return found


def _config(told: Recorded, code: Mapping[str, Any], options: Mapping[str, Any]) -> RunConfig:
    """The run of a folder, with what is code; what a user passes wins."""
    check_names(options, Options.__annotations__)
    named = (
        *("discipline", "workers", "batch_size", "epochs", "seed", "numerics"),
        *("codec", "pull_codec"),
        *("nonfinite", "hash_every", "shuffle", "accumulate", "drop_last", "shares", "constrain"),
    )
    settings = {name: getattr(told, name) for name in named}
    return RunConfig(**unpacked(settings | {**code, **options}))


def _with_layout(config: RunConfig, layout: str | None) -> Job:
    return make_job(replace(config, layout=layout))


_MANY = 1 << 31  # of incarnations and local steps: more cannot be


class _Differs(Exception):
    """The replay cannot follow the log any further."""


class _Replayer:
    """A store and workers that do what the log says, when it says so."""

    def __init__(self, job: Job, every: int, start: Path, make: Make | None):
        self.job, self.every, self.make = job, every, make
        self.store = job.make_store(Log())
        self.parameters = self.store.parameters
        if start.exists():
            meta = self.parameters.meta()
            self.parameters.begin_with(load_tensors(start), meta, str(start))
        self.workers: dict[int, Worker] = {}
        self.waiting: dict[tuple[int, int, int], Contribution] = {}
        self.sequence: dict[int, int] = {}  # of each worker's last contribution
        self.resting: set[int] = set()
        self.most = job.lease_range[1]  # samples of a lease
        self.ahead = False  # whether workers computed on while a contribution was under way
        self.version = self.epoch = self.compared = 0
        self.settled = 0  # samples that have been dealt with
        self.course = job.course.for_workers(job.workers)
        self.stage, self.rate = 0, 1.0  # how many turns were made, and what the last one made of it
        self.late = False  # whether a turn was due when the last update had been made

    def overlap(self) -> None:
        self.ahead = True
        self.parameters.reads.allow(2)

    def run(self, place: RunFolder) -> Replay:
        try:
            for record in place.records():
                self._follow(record)
        except _Differs as difference:
            found = Difference(self.version + 1, str(difference))
            return Replay(self.version, self.compared, found)
        return Replay(self.version, self.compared)

    def _follow(self, record: Entry) -> None:
        if isinstance(record, Updated):
            self._update(record)
        elif isinstance(record, Pulled):
            self._pull(record)
        elif isinstance(record, Admitted):
            key = (record.worker, record.incarnation, record.sequence)
            self.waiting[key] = self._contribute(*key, record.leases)
            self.waiting[key].keep()
            self.parameters.wait(self.waiting[key])
        elif isinstance(record, Dropped):
            part = record.part
            made = self._contribute(part.worker, part.incarnation, part.sequence, part.leases)
            if not record.redo:
                self.settled += made.part.samples
        elif isinstance(record, Joined):
            incarnation = record.incarnation
            if not (0 <= record.worker < self.job.workers and 0 <= incarnation < _MANY):
                raise _Differs(f"worker {record.worker} joins as incarnation {incarnation}")
            self.parameters.enter(record.worker)
            if not record.averaged:  # as it was before there was a mean to begin with
                self.parameters.averages.reset()
            self.workers[record.worker] = self.job.make_worker_here(
                self.store, record.worker, incarnation
            )
            self.workers[record.worker].ahead = self.ahead
            self.sequence[record.worker] = -1
            self.resting.discard(record.worker)
        elif isinstance(record, Rested):
            self.resting.add(record.worker)
        elif isinstance(record, Lost | Left):
            self.parameters.forget(record.worker)
        elif isinstance(record, Turned):
            self._turn(record)
        elif isinstance(record, Relaid):
            self._relay(record)
        elif isinstance(record, EpochDone):
            if record.epoch != self.epoch:
                raise _Differs(f"epoch {record.epoch} is done while epoch {self.epoch} goes on")
            self.epoch = record.epoch + 1
            self._advance()

    def _advance(self) -> None:
        progress = self.store.leases.progress(self.settled)
        self.parameters.advance(self.version, self.epoch, progress)

    def _due(self) -> bool:
        """Whether the course asks for a turn now."""
        turns, samples = self.course.turns, self.job.samples * self.job.epochs
        return self.stage < len(turns) and turns[self.stage].due(
            self.version, self.settled, samples
        )

    def _turn(self, record: Turned) -> None:
        """Another discipline holds; the course has to say so too."""
        what = f"the log turns to {record.discipline} at version {record.version}"
        if not self._due() or (record.stage, record.version) != (self.stage + 1, self.version):
            raise _Differs(f"{what}, and the course does not")
        turn = self.course.turns[self.stage]
        told = self.job.course.turns[self.stage]
        if record.discipline != str(told.discipline) or record.rate != turn.rate:
            raise _Differs(f"{what} with rate {record.rate}, the course to {told}")
        self.stage, self.rate = record.stage, record.rate
        self.late = self._due()

    def _relay(self, record: Relaid) -> None:
        """Everybody joins again, as replicas that are split in another way."""
        if self.make is None:
            raise CheckpointError(
                f"the run went on with layout {record.layout}, which only ob.replay can follow"
            )
        if not 1 <= record.threads <= 1 << 12:
            raise _Differs(f"the run goes on with {record.threads} threads")
        torch.set_num_threads(record.threads)
        self.job.content.shared.give_back()
        self.job = self.make(record.layout)
        before, self.store = self.parameters, self.job.make_store(Log())
        self.parameters = self.store.parameters
        self.parameters.averages.start = dict(before.averages.start)
        self.parameters.load(before.state(), before.meta())
        self._advance()
        self.workers.clear()
        self.waiting.clear()

    def _worker(self, number: int) -> Worker:
        if number not in self.workers:
            raise _Differs(f"worker {number} acts before it has joined")
        return self.workers[number]

    def _pull(self, record: Pulled) -> None:
        if record.version != self.version:
            raise _Differs(
                f"worker {record.worker} pulls version {record.version} while the store is at "
                f"{self.version}"
            )
        if not 1 <= record.steps < _MANY:
            raise _Differs(f"worker {record.worker} is to make {record.steps} steps")
        worker = self._worker(record.worker)
        self.resting.discard(record.worker)
        self._compute(worker, record.leases)
        self.parameters.remember(record.worker, self.version)
        worker.accept(
            Snapshot(
                self.version,
                record.steps,
                self.epoch,
                self.parameters.of(record.worker),
                self.parameters.updater_state,
                self.store.leases.progress(self.settled),
            )
        )

    def _compute(self, worker: Worker, leases: list[Lease]) -> None:
        for lease in leases:
            here = 0 <= lease.start < lease.stop <= self.job.samples
            if not here or lease.samples > self.most:
                raise _Differs(f"samples {lease.start} to {lease.stop} are not in the data")
            if not 0 <= lease.epoch < self.job.epochs:
                raise _Differs(f"epoch {lease.epoch} is not one of {self.job.epochs}")
            worker.take(lease)
        worker.catch_up()

    def _contribute(
        self, number: int, incarnation: int, sequence: int, leases: list[Lease]
    ) -> Contribution:
        worker = self._worker(number)
        if worker.incarnation != incarnation:
            raise _Differs(
                f"worker {number} contributes as incarnation {incarnation}, "
                f"but it joined as {worker.incarnation}"
            )
        if sequence != self.sequence[number] + 1 or number in self.resting:
            raise _Differs(f"worker {number} contributes out of turn")
        self.sequence[number] = sequence
        done = len(worker.computed())  # before an earlier pull of the same block
        if not leases[:done] == worker.computed() or len(leases) == 0:
            raise _Differs(f"worker {number} contributes other samples than it computed")
        self._compute(worker, leases[done:])
        return worker.contribution(sequence, Timing(), self.job.seed)

    def _update(self, record: Updated) -> None:
        if record.version != self.version + 1:
            raise _Differs(f"the log goes from version {self.version} to {record.version}")
        if self.late:
            turn = self.job.course.turns[self.stage]
            raise _Differs(f"the course turns to {turn.discipline} here, and the log does not")
        group = [self._gathered(part) for part in record.parts]
        self.parameters.update(group)
        for mine, part in zip(group, record.parts, strict=True):
            if mine.part.partner != part.partner:
                raise _Differs(
                    f"worker {part.worker} meets {mine.part.partner}, the log says {part.partner}"
                )
        self.version += 1
        self.settled += sum(one.part.samples for one in group)
        self.late = self._due()
        self._advance()
        if record.hash and self.version % self.every == 0:
            self.compared += 1
            here = self.parameters.digest()
            if here != record.hash:
                self.version -= 1
                raise _Differs(f"the parameters hash to {here}, the log says {record.hash}")

    def _gathered(self, part: Part) -> Contribution:
        key = (part.worker, part.incarnation, part.sequence)
        contribution = self.waiting.pop(key, None) or self._contribute(*key, part.leases)
        mine = contribution.part
        if mine.leases != part.leases:
            raise _Differs(f"worker {part.worker} contributed other samples than the log says")
        if mine.base != part.base:
            raise _Differs(
                f"worker {part.worker} computed on version {mine.base}, the log says {part.base}"
            )
        mine.settings = part.settings
        mine.staleness = self.version - mine.base
        mine.weight = self.course.stages[self.stage].weigh.factor(mine.staleness) * self.rate
        return contribution
