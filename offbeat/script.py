"""What a script with a loop of its own and the engine that runs it say to each other."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat.chance import seed_all
from offbeat.codec import Codec
from offbeat.data import Collate, mix
from offbeat.discipline import Discipline, as_discipline
from offbeat.job import Job, Place
from offbeat.layout.value import Layout, in_halves, replicas_of
from offbeat.lease import Lease
from offbeat.link.base import Over, Refused
from offbeat.log import Listener
from offbeat.loop import Loop
from offbeat.replica.front import Stages
from offbeat.replica.open import OpenReplica
from offbeat.replica.soundness import check_hooks
from offbeat.setup import Essentials, describe, describe_optimizer, make_job, numerics_of
from offbeat.store.constraint import Constraint, constraints_of
from offbeat.store.core import Store
from offbeat.store.schedule import Schedule
from offbeat.store.table import Placement, fingerprint
from offbeat.store.updater import Clip
from offbeat.task import OptimizerFactory
from offbeat.worker import NumberWorker


@dataclass(frozen=True)
class Settings:
    """How a script is run: what `join` was given, and over it what the command line says."""

    discipline: Discipline | str = "bsp"
    seed: int = 0
    out: str | Path | None = None
    resume: bool = False
    patience: float | None = None  # None is what the engine has
    via: str = "store"  # how contributions meet; one worker alone meets nobody
    codec: Codec | str | None = None
    shards: int | Placement = 1
    policies: Mapping[str, str] = field(default_factory=dict)
    nonfinite: Literal["stop", "skip"] = "stop"
    hash_every: int | None = None
    checkpoint_every: int | None = None
    listeners: Sequence[Listener] = ()
    layout: Layout | str | None = None


@dataclass(frozen=True)
class Wanted:
    """All that a script has said by the time it asks for its first batch."""

    model: nn.Module
    optimizer: OptimizerFactory | None
    data: Dataset[Any]
    batch_size: int
    epochs: int
    workers: int
    settings: Settings
    schedule: Schedule | None = None
    clip: Clip | None = None
    groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None = None
    shuffle: bool = True
    collate: Collate | None = None
    drop_last: bool = False
    constrain: Constraint | str | Sequence[Constraint | str] | None = None

    @property
    def rule(self) -> OptimizerFactory | None:
        """The script's optimiser, unless the discipline brings a rule of its own."""
        own = as_discipline(self.settings.discipline).brings_rule
        return None if own else self.optimizer

    def job(self) -> Job:
        """The run, checked and put together; its loss is known to the script alone."""
        settings, model = self.settings, self.model
        if settings.layout is not None:  # stages are made of it while the script holds the front
            check_hooks(model)
            model = copy.deepcopy(model)
        essentials = Essentials(
            model,
            self.data,
            None,
            settings.discipline,
            self.rule,
            self.workers,
            self.batch_size,
            self.epochs,
            settings.seed,
            numerics_of(settings.out, settings.resume),
        )
        kept = ("codec", "shards", "policies", "nonfinite", "hash_every")
        options = {name: getattr(settings, name) for name in kept}
        mine = ("schedule", "clip", "groups", "shuffle", "collate", "drop_last", "constrain")
        options |= {name: getattr(self, name) for name in mine}
        return make_job(essentials, options | {"layout": self._layout()})

    def _layout(self) -> Layout | None:
        if self.settings.layout is None:
            return None
        layout = in_halves(self.settings.layout)
        replicas_of(layout, self.workers)
        return layout

    def described(self, job: Job) -> dict[str, Any]:
        return describe(job, self.rule)

    def sketch(self) -> dict[str, Any]:
        """The part of the description that every worker has to agree on."""
        return {
            "model": fingerprint(self.model),
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "samples": len(self.data),  # type: ignore[arg-type]
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "optimizer": describe_optimizer(self.rule),
            "constrain": [str(one) for one in constraints_of(self.constrain, self.model)] or None,
        }


class Seat(Protocol):
    """One participant as its script sees it: samples come, steps go."""

    rank: int

    @property
    def stages(self) -> Stages:
        """What computes the script's model, where that is split."""

    @property
    def version(self) -> int:
        """The version that its model holds."""

    @property
    def epochs(self) -> int:
        """Epochs that were done by then."""

    def next(self) -> Lease | None:
        """The first samples; None when there are none for it."""

    def batch(self, lease: Lease) -> Any:
        """The batch of `lease`, which is about to be computed."""

    def done(self, lease: Lease, loss: float | None, last: bool) -> Lease | None:
        """The gradient of `lease` lies on the parameters; returns the next samples.

        On return the model holds what was pulled. None says that the run is over, and that the
        model holds the final parameters. After the `last` step the run ends for everybody.
        """

    def stop(self) -> None:
        """End the run for everybody; on return the model holds the final parameters."""

    def leave(self) -> None:
        """The script has left its loop: the others go on, and the model holds `version`."""

    def left(self, error: BaseException | None) -> None:
        """The script has left the `with` block."""


class Host(Protocol):
    """Who runs the script; without one it trains alone."""

    @property
    def rank(self) -> int:
        """This worker's number, or 0 where that is not known yet."""

    @property
    def workers(self) -> int:
        """How many take part."""

    def settle(self, defaults: Settings) -> Settings:
        """What `join` was given, with what the host insists on."""

    def seat(self, wanted: Wanted) -> Seat:
        """Everything is known: enter the run."""


host: ContextVar[Host | None] = ContextVar("host", default=None)


# ---------------------------------------------------------------- a script as a program


@dataclass(frozen=True)
class Script:
    """A file to be run as `python FILE ARGUMENTS` would."""

    path: Path
    arguments: tuple[str, ...] = ()

    @cached_property
    def code(self) -> CodeType:
        return compile(self.path.read_bytes(), str(self.path), "exec")

    def module(self) -> ModuleType:
        """A fresh `__main__`."""
        module = ModuleType("__main__")
        module.__file__ = str(self.path)
        return module

    def play(self, module: ModuleType) -> None:
        exec(self.code, vars(module))

    @contextmanager
    def as_program(self) -> Iterator[None]:
        """Arguments and import path are the script's, and afterwards what they were."""
        arguments, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
        sys.argv = [str(self.path), *self.arguments]
        sys.path.insert(0, str(self.path.resolve().parent))
        try:
            yield
        finally:
            sys.argv, sys.path[:] = arguments, path
            sys.modules["__main__"] = main


def reseed(seed: int, lease: Lease) -> None:
    """Whatever a script draws while it computes `lease` depends on nothing else."""
    seed_all(mix(seed, 2, lease.epoch, lease.start))


# ---------------------------------------------------------------- a worker over a script's model


def script_worker(
    job: Job, store: Store, number: int, incarnation: int, place: Place
) -> NumberWorker:
    """A worker of which the script computes the gradients, on its own model (`place.model`).

    Parameters come with the first pull. Buffers begin as the store has them, also where the object
    has been trained by an earlier incarnation.
    """
    worker = Job.make_worker(job, store, number, incarnation, place)
    assert isinstance(worker, NumberWorker)
    return worker


def stages_of(worker: NumberWorker) -> Stages:
    """What computes a split model: this process alone, or it and others."""
    sender = worker.sender
    computing = sender if isinstance(sender, Stages) else sender.replica
    assert isinstance(computing, Stages)
    return computing


@torch.no_grad()
def show_version(worker: NumberWorker, statistics: Mapping[str, Tensor] | None = None) -> None:
    """Let the script's model hold the version that was pulled, also where stages computed it.

    `statistics` are buffers of stages in other processes.
    """
    worker.sender.back_to_version()
    replica = worker.sender.replica
    if isinstance(replica, OpenReplica):
        shown = dict(replica.model.named_buffers())
        for name, buffer in (dict(statistics or {}) | dict(replica.named_buffers())).items():
            shown[name].copy_(buffer)


class LoopSeat:
    """A seat in real time, over a link.

    `enter` joins and makes the loop, and is called again when the store has given this worker up;
    `finish` puts the final parameters into the model when the run is over, and says their version.
    """

    def __init__(self, rank: int, enter: Callable[[], Loop], finish: Callable[[Over], int]):
        self.rank, self.enter, self.finish = rank, enter, finish
        self.loop = enter()

    @property
    def worker(self) -> NumberWorker:
        worker = self.loop.worker
        assert isinstance(worker, NumberWorker)
        return worker

    @property
    def version(self) -> int:
        return self.worker.base

    @property
    def epochs(self) -> int:
        return self.worker.epochs

    @property
    def stages(self) -> Stages:
        return stages_of(self.worker)

    def next(self) -> Lease | None:
        while True:
            try:
                lease = self.loop.next()
            except Refused:
                self.loop = self.enter()
            except Over as over:
                self.worker.base = self.finish(over)
                return None
            else:
                # Here and not when the batch is read: the script is still inside `step`, so the
                # gradient that an elastic worker has not applied yet has not been cleared.
                self.worker.sender.begin()
                return lease

    def batch(self, lease: Lease) -> Any:
        self.loop.began = perf_counter()
        reseed(self.loop.seed, lease)
        return self.worker.sender.replica.reader.read(lease)

    def done(self, lease: Lease, loss: float | None, last: bool) -> Lease | None:
        try:
            self.worker.finish(lease, loss)
            self.loop.computed()
        except Refused:
            self.loop = self.enter()
        except Over as over:
            self.worker.base = self.finish(over)
            return None
        if last:
            self.stop()
        return None if last else self.next()

    def stop(self) -> None:
        raise NotImplementedError
