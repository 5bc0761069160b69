"""How the local engine runs a job: what it refuses, and its plan of the memory."""

import os
import resource
import warnings

from offbeat.config.devices import check_forkable
from offbeat.config.job import Job
from offbeat.config.run_config import Hosts, Local, processes_of
from offbeat.data import prefetch
from offbeat.engine.local.allreduce import ALLREDUCE, check_allreduce, rule_table, updater_table
from offbeat.engine.local.reader_process import processes
from offbeat.engine.local.shared_memory import MemoryPlan
from offbeat.errors import ConfigError
from offbeat.folder.checkpoint import check_storable, model_tensors
from offbeat.model.table import Table, buffer_entries, count, parameter_entries, place


def check(job: Job, local: Local) -> None:
    """Refuse what cannot work, before anything is started."""
    if local.emulate is not None and len(local.emulate) != job.workers:
        raise ConfigError(
            f"{len(local.emulate)} emulated speeds for {job.workers} workers: give one for each"
        )
    if local.overlap and not job.discipline.send.each_gradient:
        raise ConfigError(
            f"overlap computes on while a gradient is under way, and {job.discipline} does not "
            "send one after every step: use bsp, ssp, asp or soft, or leave overlap out"
        )
    if local.overlap and job.course.drops:
        raise ConfigError(
            f"overlap makes every gradient one step late, and {job.course} drops what is "
            "late: leave overlap out"
        )
    if local.overlap and under_way(job) > 1:
        raise ConfigError("an asynchronous pipeline overlaps by itself: leave overlap out")
    if local.via == ALLREDUCE:
        check_allreduce(job, local.overlap)
    _say_if_unread(job, local)
    if local.prefetch and not processes(job, local):
        prefetch.check(job.content.reader, job.batch_size)
    _check_files(job)
    if isinstance(local, Hosts):
        _check_hosts(job)
    check_storable(model_tensors(job.content.model))  # a checkpoint in memory is such files too
    check_forkable(job.content.devices)


def _say_if_unread(job: Job, local: Local) -> None:
    wanted = job.content.reader.reading.processes
    if wanted and not processes(job, local):
        why = "as prefetch=False has it"
        if job.content.cut is not None:
            why = "because each process of a split replica reads for itself"
        elif job.content.accumulate > 1:
            why = "because with accumulate a step reads its batch in parts"
        warnings.warn(
            f"num_workers={wanted} of the DataLoader is not used, {why}: workers read themselves",
            stacklevel=2,
        )


def _check_hosts(job: Job) -> None:
    if job.discipline.send.in_place:
        raise ConfigError(
            f"{job.discipline} does not go over a network: its workers write the store's own "
            "memory, which is on another machine: use asp"
        )
    if job.content.cut is not None:
        raise ConfigError(
            f"the layout {job.content.cut.layout} does not go over a network: a replica is split "
            "over processes of one machine: leave the layout out, or use offbeat run"
        )


def _check_files(job: Job) -> None:
    """The server holds what the launcher holds, and a wire to each worker and shard process."""
    workers, shards = job.workers, count(job.content.placement)
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    some = 32  # for the dataset
    needed = len(os.listdir("/proc/self/fd")) + 4 * workers + 6 * (shards - 1) + some
    if needed > allowed:
        raise ConfigError(
            f"{workers} workers need {needed} open files and this process may have {allowed}: "
            f"run 'ulimit -n {needed}' before, or use fewer workers"
        )


def memory_plan(job: Job, local: Local) -> MemoryPlan:
    """What lies in shared memory; only workers that write in place share the store's parameters."""
    numbers = job.content
    tables = place(parameter_entries(numbers.model), numbers.placement)
    buffers = buffer_entries(numbers.model, numbers.policies)
    averaged = [entry for entry in buffers if entry.policy == "averaged"]
    incoming = outgoing = 2 if local.overlap else 1
    if under_way(job) > 1:
        incoming = outgoing = under_way(job)
    if job.discipline.send.in_place:
        incoming = outgoing = 0
    rule = Table.of([])
    if local.via == ALLREDUCE:
        incoming, rule = 1, rule_table(job)
    table = Table.of(averaged)
    each = processes_of(job) // job.workers
    return MemoryPlan(
        tables, table, updater_table(job), job.workers, incoming, outgoing, each, rule
    )


def under_way(job: Job) -> int:
    """Leases that one worker computes at once."""
    return 1 if job.content.cut is None else job.content.cut.layout.under_way
