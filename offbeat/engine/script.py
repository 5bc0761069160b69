"""What a script with a loop of its own and the engine that runs it say to each other."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from offbeat.config.devices import named
from offbeat.config.job import Job, WorkerMemory
from offbeat.config.run_config import RunConfig, configure
from offbeat.config.setup import make_job
from offbeat.data.lease import Lease
from offbeat.data.random_state import seed_all
from offbeat.data.reader import mix
from offbeat.discipline.course import as_course
from offbeat.errors import ConfigError
from offbeat.model.checks import check_copies, check_hooks
from offbeat.split.layout import in_halves
from offbeat.split.script_model import Stages
from offbeat.split.script_replica import ScriptReplica
from offbeat.store.store import Store
from offbeat.transport.link import GivenUp, RunOver
from offbeat.worker.loop import Loop
from offbeat.worker.worker import NumberWorker, ScriptStep


def script_config(given: Mapping[str, Any]) -> RunConfig:
    """What a script and its host ask for together."""
    given = dict(given)
    if given.get("layout") is not None:
        given["layout"] = in_halves(given["layout"])
    config = configure(given)
    # A script keeps its optimiser under every discipline, also where it is not used.
    own = as_course(config.discipline).first.brings_rule
    return replace(config, optimizer=None) if own else config


def script_job(config: RunConfig) -> Job:
    """The job of a script; its loss is known to the script alone."""
    if config.layout is None:
        return make_job(config)
    # Stages are made of the model while the script holds the front.
    check_hooks(config.model)
    check_copies(config.model)
    if {*named(config.device)} != {"cpu"}:
        raise ConfigError(
            "a script holds a split model where its stages look for it, which is on the CPU: pass "
            "the model to ob.train with layout and device, or leave one of them out"
        )
    return make_job(replace(config, model=copy.deepcopy(config.model)))


class Participant(Protocol):
    """One participant as its script sees it: samples come, steps go."""

    rank: int

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    def stages(self) -> Stages:
        """What computes the script's model, where that is split."""

    @property
    def version(self) -> int:
        """The version that its model holds."""

    @property
    def epochs(self) -> int:
        """Epochs that were done by then."""

    @property
    def progress(self) -> int:
        """And batches that all were through with, as a plain loop counts them."""

    def next(self) -> Lease | None:
        """The first samples; None when there are none for it."""

    def batch(self, lease: Lease) -> Any:
        """The batch of `lease`, which is about to be computed."""

    def done(self, lease: Lease, step: ScriptStep, last: bool) -> Lease | None:
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


class ScriptHost(Protocol):
    """Who runs the script; without one it trains alone."""

    @property
    def rank(self) -> int:
        """This worker's number, or 0 where that is not known yet."""

    @property
    def workers(self) -> int:
        """How many take part."""

    def settle(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """All that the script has said by its first batch, with what the host insists on."""

    def participant(self, config: RunConfig) -> Participant:
        """Everything is known: enter the run."""


host: ContextVar[ScriptHost | None] = ContextVar("host", default=None)


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
    job: Job, store: Store, number: int, incarnation: int, place: WorkerMemory
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
    if isinstance(replica, ScriptReplica):
        shown = dict(replica.model.named_buffers())
        for name, buffer in (dict(statistics or {}) | dict(replica.named_buffers())).items():
            shown[name].copy_(buffer)


class LoopParticipant:
    """A participant in real time, over a link.

    `enter` joins and makes the loop, and is called again when the store has given this worker up;
    `finish` puts the final parameters into the model when the run is over, and says their version.
    """

    def __init__(self, rank: int, enter: Callable[[], Loop], finish: Callable[[RunOver], int]):
        self.rank, self.enter, self.finish = rank, enter, finish
        self.loop = enter()

    @property
    def worker(self) -> NumberWorker:
        worker = self.loop.worker
        assert isinstance(worker, NumberWorker)
        return worker

    @property
    def device(self) -> torch.device:
        return self.worker.sender.replica.device.place

    @property
    def version(self) -> int:
        return self.worker.base

    @property
    def epochs(self) -> int:
        return self.worker.epochs

    @property
    def progress(self) -> int:
        return self.worker.progress

    @property
    def stages(self) -> Stages:
        return stages_of(self.worker)

    def next(self) -> Lease | None:
        while True:
            try:
                lease = self.loop.next()
            except GivenUp:
                self.loop = self.enter()
            except RunOver as over:
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
        return self.worker.sender.replica.read(lease)

    def done(self, lease: Lease, step: ScriptStep, last: bool) -> Lease | None:
        try:
            self.worker.finish(lease, step)
            self.loop.computed()
        except GivenUp:
            self.loop = self.enter()
        except RunOver as over:
            self.worker.base = self.finish(over)
            return None
        if last:
            self.stop()
        return None if last else self.next()

    def stop(self) -> None:
        raise NotImplementedError
