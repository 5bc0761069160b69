"""How the local engine runs a job: its settings, what it refuses, and its plan of the memory."""

import os
import resource
from dataclasses import dataclass
from typing import Any

import torch

from offbeat import prefetch
from offbeat.choices import Gradient, InPlace, at_least, one_of
from offbeat.engine.via import ALLREDUCE, STORE, VIA, check_allreduce, rule_table, updater_table
from offbeat.errors import ConfigError
from offbeat.job import Job, Numbers
from offbeat.link.memory import Plan
from offbeat.store.table import Table, buffer_entries, count, parameter_entries, place, total_bytes

LONGEST = 1_000_000  # seconds of patience; the system cannot wait for much longer at once
SMALL = 1 << 20  # bytes of a model whose tensors are not worth sharing among threads


@dataclass(frozen=True)
class Local:
    """How the local engine runs a job.

    `patience` is the seconds after which a silent worker counts as lost; `threads` is for each
    worker, by default its share of the cores; `emulate` are the least seconds of each worker's
    step; `overlap` lets workers compute on while their last contribution is under way.
    """

    patience: float = 30.0
    threads: int | None = None
    emulate: tuple[float, ...] | None = None
    overlap: bool = False
    prefetch: bool | None = None  # read ahead in a thread; True: the dataset never draws
    via: str = STORE  # how contributions meet: in a store, or "allreduce", among the workers

    def __post_init__(self) -> None:
        patience: Any = self.patience
        number = isinstance(patience, int | float) and not isinstance(patience, bool)
        if not number or not 0 < patience <= LONGEST:
            raise ConfigError(
                f"patience must be seconds, above 0 and at most {LONGEST:,}, not {patience!r}: "
                "write patience=30"
            )
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        one_of("via", self.via, VIA)

    def described(self, job: Job) -> dict[str, Any]:
        """What a run folder says of this engine: all that replay and resuming depend on."""
        return {
            "engine": "local",
            "threads": self.threads_for(job),
            "overlap": self.overlap,
            "via": self.via,
            "emulate": None if self.emulate is None else list(self.emulate),
        }

    def threads_for(self, job: Job) -> int:
        """Its share of the cores for each worker; a small model is faster with one thread."""
        assert isinstance(job.content, Numbers)
        if self.threads is not None:
            return self.threads
        if total_bytes(job.content.model.parameters()) < SMALL:
            return 1
        return max(1, len(os.sched_getaffinity(0)) // processes_of(job))


def processes_of(job: Job) -> int:
    """The processes of all workers; a split replica has several."""
    assert isinstance(job.content, Numbers)
    cut = job.content.cut
    return job.workers * (1 if cut is None else cut.layout.pp * cut.layout.tp)


def check(job: Job, local: Local) -> None:
    """Refuse what cannot work, before anything is started."""
    if local.emulate is not None and len(local.emulate) != job.workers:
        raise ConfigError(
            f"{len(local.emulate)} emulated speeds for {job.workers} workers: give one for each"
        )
    if local.overlap and not isinstance(job.discipline.send, Gradient):
        raise ConfigError(
            f"overlap computes on while a gradient is under way, and {job.discipline} does not "
            "send one after every step: use bsp, ssp, asp or soft, or leave overlap out"
        )
    if local.overlap and job.discipline.drops:
        raise ConfigError(
            "overlap makes every gradient one step late, and backup workers drop what is late: "
            "leave one of them out"
        )
    if local.overlap and under_way(job) > 1:
        raise ConfigError("an asynchronous pipeline overlaps by itself: leave overlap out")
    if local.via == ALLREDUCE:
        check_allreduce(job, local.overlap)
    if local.prefetch:
        assert isinstance(job.content, Numbers)
        prefetch.check(job.content.reader, job.batch_size)
    _check_files(job)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "CUDA is in use already, and a process that uses it cannot be forked: build the "
            "model on the CPU before training"
        )


def _check_files(job: Job) -> None:
    """The server holds what the launcher holds, and a wire to each worker and each hand."""
    assert isinstance(job.content, Numbers)
    workers, shards = job.workers, count(job.content.placement)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    some = 32  # for the dataset
    needed = len(os.listdir("/proc/self/fd")) + 4 * workers + 6 * (shards - 1) + some
    if needed > allowed:
        raise ConfigError(
            f"{workers} workers need {needed} open files and this process may have {allowed}: "
            f"run 'ulimit -n {needed}' before, or use fewer workers"
        )


def memory_plan(job: Job, local: Local) -> Plan:
    """What lies in shared memory; only workers that write in place share the store's parameters."""
    assert isinstance(job.content, Numbers)
    numbers = job.content
    tables = place(parameter_entries(numbers.model), numbers.placement)
    buffers = buffer_entries(numbers.model, numbers.policies)
    averaged = [entry for entry in buffers if entry.policy == "averaged"]
    incoming = outgoing = 2 if local.overlap else 1
    if under_way(job) > 1:
        incoming = outgoing = under_way(job)
    if isinstance(job.discipline.send, InPlace):
        incoming = outgoing = 0
    rule = Table.of([])
    if local.via == ALLREDUCE:
        incoming, rule = 1, rule_table(job)
    table = Table.of(averaged)
    each = processes_of(job) // job.workers
    return Plan(tables, table, updater_table(job), job.workers, incoming, outgoing, each, rule)


def under_way(job: Job) -> int:
    """Leases that one worker computes at once."""
    assert isinstance(job.content, Numbers)
    return 1 if job.content.cut is None else job.content.cut.layout.under_way
