"""What each process of a local run does: serve, work, or test."""

import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from offbeat.config.job import Job, WorkerMemory
from offbeat.config.run_config import Local, processes_of
from offbeat.config.units import LeastTime
from offbeat.engine.hosts.members import Members
from offbeat.engine.intervals import Intervals
from offbeat.engine.local.allreduce import ALLREDUCE, listening
from offbeat.engine.local.backup_process import (
    BackupFiles,
    BackupProcess,
    BackupWire,
    HandedOver,
)
from offbeat.engine.local.crash_image import CrashImages
from offbeat.engine.local.dispatch import nothing
from offbeat.engine.local.launcher_messages import ReportOutbox, TestResult, encode
from offbeat.engine.local.memory_checkpoint import MemoryCheckpoint
from offbeat.engine.local.plan import check, memory_plan, under_way
from offbeat.engine.local.process import compute_steadily, send_helpers_home
from offbeat.engine.local.reader_process import leases_ahead, prefetcher
from offbeat.engine.local.script_group import ScriptSplitWorker
from offbeat.engine.local.server_process import LogRelay, ServerParts, ServerProcess
from offbeat.engine.local.shard_process import ShardProcess
from offbeat.engine.local.sharded_parameters import (
    FollowedShards,
    ShardedParameters,
    shards_of_processes,
    start_shards,
)
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.local.split_worker import SplitWorker, prepare
from offbeat.engine.local.watchdog import IDLE
from offbeat.engine.local.worker_process import Make, WorkerProcess, WorkerSettings
from offbeat.engine.spawn import SERVER, TESTER
from offbeat.errors import RunError
from offbeat.folder.checkpoint import RunFolder, nobody
from offbeat.log.log import Log, tail
from offbeat.log.records import Begun, Relaid, Updated
from offbeat.model.evaluation import Evaluator
from offbeat.model.table import Flat, dealt, under
from offbeat.protocol.allreduce import AllreduceProtocol, ParametersLost
from offbeat.protocol.round import Copies
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.followed import FollowedGossip, FollowedParameters
from offbeat.store.parameters import Parameters, named_tensors
from offbeat.store.recovery import CrashState, beside, last_version
from offbeat.store.store import Store, Witness
from offbeat.store.worker_held import WorkerCopies, WorkerCopy, WorkerHeldParameters
from offbeat.transport.allreduce_client import AllreduceClient
from offbeat.transport.handshake import NUMBER
from offbeat.transport.memory_link import MemoryLink, MemoryPort, Waiting
from offbeat.worker.client import StoreClient, ignore
from offbeat.worker.worker import Worker


@dataclass(frozen=True)
class Beginning:
    """How a run begins: with an earlier one, or split in another way than before a stop."""

    earlier: Callable[[Parameters], Begun] | None = None
    relaid: Relaid | None = None  # to be recorded when the run goes on


class Roles:
    """The parts of one run, made before anybody is forked, and what each process does with them."""

    held_by_workers: type[WorkerHeldParameters] = WorkerHeldParameters

    def __init__(
        self,
        job: Job,
        local: Local,
        folder: RunFolder | None,
        evaluator: Evaluator | None,
        intervals: Intervals,
        beginning: Beginning = Beginning(),  # noqa: B008
        memory: int | None = None,
    ):
        """`memory` is what another process of this run has made; this one then only works."""
        check(job, local)
        self.job, self.local, self.folder, self.evaluator = job, local, folder, evaluator
        self.content, self.intervals, self.workers = job.content, intervals, job.workers
        self.beginning = beginning
        cut = job.content.cut
        self.split = cut is not None and (
            cut.layout.asynchronous or processes_of(job) > job.workers
        )
        if cut is not None and self.split:
            prepare(cut)
        self.shared = SharedMemory(memory_plan(job, local), memory)
        self.flats = None if memory is not None else self.shared.parameters
        self.meets = local.via == ALLREDUCE
        self.held = shards_of_processes(self.shared.plan.tables, job)
        if self.meets:
            self.held = dealt(self.shared.plan.tables, 1)
        # Workers are made of it, and the server's own store has the same numbers and board.
        kind: type[Parameters] = self.held_by_workers if self.meets else FollowedParameters
        kind = FollowedGossip if job.discipline.pairs else kind
        self.store = self._store(self._parameters(self.flats, None, kind), Log(), None)
        self.keep = MemoryCheckpoint(self.shared, len(self.held))
        self.images: CrashImages | None = None
        self.backup: BackupFiles | None = None
        if memory is None and not self.meets and not job.discipline.send.in_place:
            self._make_safe()
        self.buffers = {n: b.clone() for n, b in job.content.model.named_buffers()}
        if memory is None:
            for name, view in self.shared.averages.views.items():
                view.copy_(self.buffers[name])

    def _make_safe(self) -> None:
        """What the store learns is to survive it: in images of a small one, else in a backup.

        Several processes have no moment at which all is one image.
        """
        job = self.job
        if len(self.held) == 1 and not job.discipline.pairs:
            self.images = CrashImages.of(job, self.store.parameters, self.shared.plan.updater)
        if self.images is None and self.local.backup:
            self.backup = BackupFiles(len(self.held))

    @property
    def safe(self) -> bool:
        """Whether a server that is killed loses nothing of which anybody has been told."""
        return self.images is not None or self.backup is not None

    def _parameters(
        self, flats: list[Flat] | None, held: list[int] | None, kind: type[Parameters]
    ) -> Parameters:
        found = self.job.make_parameters(flats, held, kind)
        if self.local.overlap:  # a worker pulls again before what it computed has been sent
            found.reads.allow(2)
        return found

    def _store(self, parameters: Parameters, log: Log, witness: Witness | None) -> Store:
        job, cells = self.job, self.shared.cells
        return Store(
            job.course,
            job.workers,
            job.leases(),
            log,
            parameters,
            job.hash_every,
            cells,
            witness,
        )

    @property
    def tests(self) -> bool:
        return self.evaluator is not None

    def threads(self, number: int) -> int:
        """A worker waits while the server works for it, so both may use the same share."""
        return 1 if number == TESTER else self.local.threads_for(self.job)

    def last_checkpoint(self) -> Any:
        if self.folder is None:
            return self.keep.load()
        # Only the newest will do: the figures of the run are as of that one.
        found = self.folder.newest(back=False)
        return None if found is None else (found.tensors, found.meta)

    def close(self) -> None:
        if self.images is not None:
            self.images.close()
        if self.backup is not None:
            self.backup.close()
        self.keep.close()
        self.shared.arena.close()

    # ------------------------------------------------------------ the server

    def serve(
        self,
        orders: socket.socket,
        reports: socket.socket,
        saved: Any,
        crash: CrashState | None,
    ) -> None:
        relay = LogRelay(ReportOutbox(reports))
        sharded = self._sharded(orders, saved, crash) if len(self.held) > 1 else None
        parameters = sharded or self.store.parameters
        wire = self._backup_wire(parameters)
        log = self._log(saved, crash, relay)
        store = self._store(parameters, log, self.images or wire)
        process = ServerProcess(self._server_parts(store, sharded, wire, relay))
        if self.images is not None:
            found = None if crash is None else crash.tensors
            self.images.begin(0 if crash is None else crash.version, found)
        if saved is not None:
            process.restore(*saved)
        else:
            self._begin(store, crash)
        if sharded is not None:
            sharded.ready()
            sharded.watch(process.dispatcher.selector)
        process.go_on(crash)
        if saved is not None and crash is None and self.beginning.relaid is not None:
            store.log.write(self.beginning.relaid)
        if self.images is not None:
            self.images.write(store.version)
        process.obey(orders)
        send_helpers_home()  # from here on the threads that hear the workers compute
        try:
            process.run()
        except ParametersLost:
            return  # without a result: the launcher starts everybody anew
        except OSError as error:
            raise RunError(
                f"the run could not be written down ({error.strerror}); its last checkpoint is "
                "intact: make room and resume"
            ) from error
        if sharded is not None:
            sharded.close()

    def _begin(self, store: Store, crash: CrashState | None) -> None:
        store.begin_again()
        store.parameters.begin(self.content.model)
        if self.beginning.earlier is not None:
            begun = self.beginning.earlier(store.parameters)
            if crash is None:
                store.log.write(begun)

    def _backup_wire(self, parameters: Parameters) -> BackupWire | None:
        if self.backup is None:
            return None
        assert isinstance(parameters, FollowedParameters)
        wire = BackupWire(self.backup.store, self.shared)
        parameters.followed_through(wire, [entry.name for entry in self.shared.plan.updater])
        return wire

    def _server_parts(
        self,
        store: Store,
        sharded: ShardedParameters | None,
        wire: BackupWire | None,
        relay: LogRelay,
    ) -> ServerParts:
        intervals = self.intervals
        if self.folder is None and self.images is not None:
            # All is in memory that nobody can kill, and only the log grows.
            intervals = replace(intervals, save=sys.maxsize)
        return ServerParts(
            store,
            self.shared,
            self._protocol(store, self._settings()),
            MemoryPort(self.shared.slots, store.parameters),
            self.folder or self.keep,
            intervals,
            relay,
            nobody if sharded is None else sharded.write,
            self._new_log if self.folder is None and self.safe else None,
            nothing if self.images is None else self.images.keep,
            self.shared.cpu,
            backup=wire,
        )

    def _settings(self) -> ServerSettings:
        # Each process of a split replica reads for itself.
        ahead = 0 if self.split else leases_ahead(self.job, self.local)
        ahead += 1 if self.local.overlap else 0
        return ServerSettings(self.local.patience, ahead + under_way(self.job) - 1)

    def _new_log(self) -> Any:
        return self.keep.log

    def _protocol(self, store: Store, settings: ServerSettings) -> ServerProtocol:
        def why(worker: int) -> str:
            return self.shared.wait_notes[worker].told()

        if not self.meets:
            return ServerProtocol(store, self.workers, settings, why)
        copies = [WorkerCopy(s.incoming[0], s.rule_state, s.updater) for s in self.shared.slots]
        found = self._copies(store.parameters, copies)
        new_secret = partial(secrets.token_bytes, NUMBER)
        return AllreduceProtocol(store, self.workers, settings, why, found, new_secret)

    def _copies(self, parameters: Parameters, copies: list[WorkerCopy]) -> Copies:
        """What the workers hold, as the server sees it."""
        assert isinstance(parameters, WorkerHeldParameters)
        return WorkerCopies(parameters, copies, self.shared.plan.updater)

    def _sharded(
        self, orders: socket.socket, saved: Any, crash: CrashState | None
    ) -> ShardedParameters:
        """Fork the other processes of the store; they load their numbers meanwhile."""

        def hold(number: int, wire: socket.socket) -> None:
            # The end for reports stays open here, so that the launcher hears of the last one's end.
            orders.close()
            parameters = self.job.make_parameters(self.shared.parameters, self.held[number])
            if saved is not None:
                tensors, meta = saved
                parameters.load(under("store/", tensors), meta["parameters"])
            elif self.beginning.earlier is not None:
                self.beginning.earlier(parameters)
            if crash is not None:
                parameters.load(crash.tensors, crash.meta or parameters.meta())
            ShardProcess(parameters, self.shared, wire).run()

        others = self.held[1:]
        processes = start_shards(len(others), hold, self.threads(SERVER))
        mine = self._parameters(self.shared.parameters, self.held[0], FollowedShards)
        assert isinstance(mine, ShardedParameters)
        return mine.over(self.shared, processes, others)

    def _log(self, saved: Any, crash: CrashState | None, relay: LogRelay) -> Log:
        if self.folder is not None:
            keep = None if saved is None else saved[1]["session"]["log"]
            keep = keep if crash is None else crash.length
            return Log(self.folder.log_file, keep, self.folder.run, relay.add)
        if not self.safe:
            return Log(relay=relay.add)
        return Log(self.keep.log, None if crash is None else crash.length, relay=relay.add)

    def crash_state(
        self, saved: Any, handed: HandedOver | None, earlier: CrashState | None
    ) -> CrashState | None:
        """What a server that was killed has left in memory and log; None if that is not enough.

        `handed` is what its backup says; `earlier` is what one before has left, if this one was
        killed before it could show that to a backup.
        """
        if not self.safe:
            return None
        start = 0
        path = self.keep.log if self.folder is None else self.folder.log_file
        if self.folder is not None and saved is not None:
            start = saved[1]["session"]["log"]
        records, length = tail(path, start)
        before = 0 if saved is None else saved[1]["store"]["version"]
        version = last_version(records, before)
        if self.images is not None:
            tensors = self.images.read(version)
            return None if tensors is None else CrashState(version, records, length, tensors)
        assert self.backup is not None
        found = earlier
        if handed is not None and handed.version is not None:
            update = Updated(0.0, handed.version, handed.parts, handed.rate)
            tensors, meta = self.backup.backup.load()
            found = CrashState(handed.version, records, length, tensors, meta, update)
        return None if found is None else beside(found, records, length, version)

    # ------------------------------------------------------------ a backup

    def back_up(self, wire: socket.socket, launcher: socket.socket) -> None:
        assert self.backup is not None
        parameters = self._parameters(None, None, Parameters)
        BackupProcess(parameters, self.shared, self.backup, wire, launcher).run()

    # ------------------------------------------------------------ a worker

    def worker_process(
        self,
        number: int,
        wire: socket.socket,
        make: Make | None = None,
        script: nn.Module | None = None,
    ) -> WorkerProcess:
        """A worker's process; `make` makes another kind of worker, over the model of a `script`."""
        local, slot = self.local, self.shared.slots[number]
        least = self.job.least_time(local.emulate[number] if local.emulate else 0.0)
        if not least.seconds:
            compute_steadily()
        # One that sleeps for most of the time is to run when that is over, anywhere.
        waiting = Waiting() if least.seconds else self.shared.cpu.worker(number)
        if self.split:
            return self._split_process(number, MemoryLink(wire, slot, waiting), least, script)
        reader = prefetcher(self.job, self.local)
        announce = ignore if reader is None else reader.announce
        build: Make = partial(make or self.job.make_worker, self.store, number)
        settings = WorkerSettings(
            self.store.discipline,
            self.job.seed,
            least,
            local.overlap,
            self.meets,
            self.content.devices.of(number),
        )
        if not self.meets:
            link = MemoryLink(wire, slot, waiting)
            client = StoreClient(link, settings.centre, local.overlap, announce=announce)
            return WorkerProcess(client, slot, settings, build, reader)
        # Others read what was averaged last while the next is under way.
        link = MemoryLink(wire, slot, Waiting(), Flat(slot.updater.table))
        members = Members(bytes(self.shared.token), False, local.patience)
        make_parameters = self.job.make_parameters
        meeting = AllreduceClient(link, lambda: number, make_parameters, members, announce)
        return WorkerProcess(meeting, slot, settings, partial(self._met, meeting, build), reader)

    def _split_process(
        self, number: int, link: MemoryLink, least: LeastTime, script: nn.Module | None
    ) -> WorkerProcess:
        """The process that leads the others of a replica."""
        cut, slot, overlap = self.content.cut, link.slot, self.local.overlap
        assert cut is not None
        buffers = self.buffers | slot.statistics.views  # where the server leaves the mean
        what = (self.job, cut, slot, self.shared.wait_notes[number], buffers, least)
        split = SplitWorker(*what) if script is None else ScriptSplitWorker(*what, script)
        group = split.group(number, link.wire, self.threads(number))
        # A stage waits until its step is long enough, so the whole need not.
        settings = WorkerSettings(self.store.discipline, self.job.seed, overlap=overlap)
        client = StoreClient(link, settings.centre, overlap, cut.layout.asynchronous)
        build = partial(split.make, group, self.store, number)
        return WorkerProcess(client, slot, settings, build, None, group.leave)

    def _met(
        self, client: AllreduceClient, build: Make, incarnation: int, place: WorkerMemory
    ) -> Worker:
        """A worker whose gradients go to the others while they are made."""
        return listening(build(incarnation, place), client, self.content.accumulate == 1)

    def work(self, number: int, wire: socket.socket) -> None:
        self.worker_process(number, wire).run()

    # ------------------------------------------------------------ the tester

    def test(self, wire: socket.socket) -> None:
        assert self.evaluator is not None
        model, device = self.content.model, self.evaluator.device
        device.enter()
        device.move(model)
        while wire.recv(16):
            found = self.evaluator(self.tested_into(model), self.shared.tester.turn)
            # Before it says so: the server may have no time to hear it, or ask for the next one.
            self.shared.tester.about = IDLE
            wire.send(encode(TestResult(*found)))

    @torch.no_grad()
    def tested_into(self, model: nn.Module) -> nn.Module:
        """Put what the server last exported into `model`."""
        own = named_tensors(model)
        for flat in (*self.shared.tested, self.shared.averages):
            for name, view in flat.views.items():
                own[name].copy_(view)
        return model
