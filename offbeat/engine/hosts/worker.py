"""A worker whose store is on another host: it dials out, computes here, and mends its link."""

import dataclasses
import platform
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

from offbeat.config.job import Job, WorkerMemory
from offbeat.config.run_config import Hosts, RunConfig
from offbeat.data.lease import Lease
from offbeat.engine.hosts.admission import hash_of, plain
from offbeat.engine.hosts.members import Members
from offbeat.engine.hosts.sketch import difference, sketch_of
from offbeat.engine.local.allreduce import ALLREDUCE, listening
from offbeat.engine.local.plan import memory_plan
from offbeat.engine.local.reader_process import prefetcher
from offbeat.engine.local.scripts import make_script_worker
from offbeat.engine.local.shared_memory import SharedMemory
from offbeat.engine.local.worker_process import WorkerProcess, WorkerSettings
from offbeat.engine.script import LoopParticipant, script_job, show_version
from offbeat.engine.signals import stopped_by
from offbeat.errors import ConfigError, RunError
from offbeat.log.log import Log
from offbeat.store.parameters import named_tensors
from offbeat.transport.allreduce_client import DistantAllreduceClient
from offbeat.transport.cargo import MeetingPacking, Packing
from offbeat.transport.dial import Dialer
from offbeat.transport.handshake import AskTerms, Enter, Terms, ask
from offbeat.transport.link import RunOver, RunStopped, StoreGone
from offbeat.transport.tcp_link import DialedStore, MeetingLink, TcpLink
from offbeat.worker.client import StoreClient, ignore
from offbeat.worker.worker import ScriptStep, Worker

TELL = 2000  # letters of a difference


def ask_terms(dialer: Dialer) -> Terms:
    """What the store says of its run; a clear error if there is none, or not this one."""
    try:
        wire, _ = dialer.connect()
        with wire:
            found = ask(wire, AskTerms())
    except OSError as error:
        raise ConfigError(
            f"no store answers at {dialer.address} ({error.strerror or error}): has it been "
            "started with offbeat store --listen, is the address right, and may it be reached? "
            f"offbeat doctor --at {dialer.address} tells more"
        ) from error
    if not isinstance(found, Terms):
        raise ConfigError(f"what answers at {dialer.address} is no store of this version")
    return found


def packing_of(job: Job, meets: bool) -> Packing:
    """What travels between a worker and its store, and how."""
    if meets:
        return MeetingPacking()
    return Packing(job.codec, job.pull_codec, job.sparse)


@dataclass(frozen=True)
class Entering:
    """How a worker comes to its store.

    It would like to have this `number`, and nothing else if it `insists`; `instead` says that the
    process that had it is gone. `sketch` is what the store says that its script is about.
    """

    dialer: Dialer
    sketch: Mapping[str, object]
    number: int = -1
    instead: bool = False
    insists: bool = False

    def request(self, words: str = "") -> Enter:
        """What is said on entering; `words` tell of a difference."""
        sketch, host = hash_of(self.sketch), platform.node()
        return Enter(b"", 0, self.number, self.insists, self.instead, sketch, words, host, 0.0)


class AfterTheEnd(RunError):
    """The run was over before this worker was in."""


class HostWorker:
    """One worker of a run, with a link to its store and memory of its own."""

    def __init__(self, job: Job, engine: Hosts, maker: DialedStore, config: RunConfig | None):
        """With a `config` its script computes, on the model that it holds."""
        self.job, self.maker, self.config = job, maker, config
        plan = dataclasses.replace(memory_plan(job, engine), workers=1, store=False)
        self.memory = SharedMemory(plan)
        self.slot = self.memory.slots[0]
        meets = engine.via == ALLREDUCE
        packing, make = packing_of(job, meets), self._make
        self.link: TcpLink
        try:  # from here on it is known which worker this is
            if isinstance(packing, MeetingPacking):
                self.link = MeetingLink(maker, self.slot, packing)
            else:
                self.link = TcpLink(maker, self.slot, packing, engine.overlap)
        except BaseException:
            self.memory.arena.close()
            raise
        self.store = job.make_store(Log())  # workers are made of it
        reader = prefetcher(job, engine)
        announce = ignore if reader is None else reader.announce
        number = max(0, maker.number)
        settings = WorkerSettings(
            self.store.discipline,
            job.seed,
            job.least_time(engine.emulate[number] if engine.emulate else 0.0),
            engine.overlap,
            meets,
            job.content.devices.begun(number),
        )
        client: StoreClient
        if isinstance(self.link, MeetingLink):
            members = Members(maker.dialer.token, maker.dialer.encrypts, engine.patience)
            client = meeting = DistantAllreduceClient(
                self.link, lambda: maker.number, job.make_parameters, members, announce
            )
            make = partial(self._met, meeting)
        else:
            client = StoreClient(self.link, settings.centre, engine.overlap, announce=announce)
        self.process = WorkerProcess(client, self.slot, settings, make, reader)

    def _met(self, client: DistantAllreduceClient, incarnation: int, place: WorkerMemory) -> Worker:
        """A worker whose gradients go to the others while they are made."""
        whole = self.job.content.accumulate == 1
        return listening(self._make(incarnation, place), client, whole)

    def _make(self, incarnation: int, place: WorkerMemory) -> Worker:
        # It may come again under another number, when it has been given up meanwhile.
        number = self.maker.number
        if self.config is None:
            return self.job.make_worker(self.store, number, incarnation, place)
        return make_script_worker(self.config, self.job, self.store, number, incarnation, place)

    @torch.no_grad()
    def last_into(self, model: nn.Module) -> int:
        """Put the parameters into `model` that came with the end of the run; their version."""
        own = named_tensors(model)
        for flat in (*self.slot.incoming[0], self.slot.statistics):
            for name, view in flat.views.items():
                own[name].copy_(view)
        return self.link.last_version

    def run(self) -> None:
        """Train until the run is over."""
        try:
            self.process.run()
        finally:
            self.close()

    def close(self) -> None:
        self.process.client.close()
        self.memory.arena.close()


class HostParticipant(LoopParticipant):
    """One worker's script, with the store on another host.

    `tell` is told which worker it is after its first step.
    """

    def __init__(
        self,
        config: RunConfig,
        entering: Entering,
        script: Path | None,
        tell: Callable[[int], None] = lambda number: None,
    ):
        engine = config.engine
        assert isinstance(engine, Hosts)
        mine = plain(sketch_of(config, script))
        words = difference(entering.sketch, mine)[:TELL]
        self.entering, self.tell, self.stepped = entering, tell, False
        maker = DialedStore(entering.dialer, entering.request(words), engine.patience)
        self.host_worker = HostWorker(script_job(config), engine, maker, config)
        self.client = self.host_worker.process.client
        self.away = self.said = False
        try:
            super().__init__(maker.number, self.host_worker.process.enter, self._finish)
        except RunOver as over:
            self._too_late(over)

    def done(self, lease: Lease, step: ScriptStep, last: bool) -> Lease | None:
        found = super().done(lease, step, last)
        if not self.stepped:
            self.stepped = True
            self.tell(self.rank)
        return found

    def _too_late(self, over: RunOver) -> NoReturn:
        """The run has ended before this worker had joined it."""
        self.host_worker.process.bye()
        self.host_worker.close()
        if isinstance(over, StoreGone):
            self._gone()
        raise AfterTheEnd("the run is over: it has ended before this worker was in") from over

    def _finish(self, over: RunOver) -> int:
        """The model gets the final parameters, which have come with the last message."""
        if isinstance(over, StoreGone):
            self._gone()
        self._bye()
        if isinstance(over, RunStopped):
            raise stopped_by(signal.SIGINT)
        replica = self.worker.sender.replica
        replica.move_out()
        return self.host_worker.last_into(replica.model)

    def _gone(self) -> NoReturn:
        raise RunError(
            f"the store at {self.entering.dialer.address} has not answered for a long time: if it "
            "was stopped, start it again with --resume, and then its workers"
        )

    def _bye(self) -> None:
        if not self.said:
            self.said = True
            self.host_worker.process.bye()

    def stop(self) -> None:
        try:
            self.client.end()
        except RunOver as over:
            self.worker.base = self.finish(over)

    def leave(self) -> None:
        show_version(self.worker)
        self.worker.sender.replica.move_out()
        self.client.leave()
        self.away = True

    def left(self, error: BaseException | None) -> None:
        """Not before: a break may have been an error, after which this worker comes back."""
        if self.away and error is None:
            self._bye()
        self.host_worker.close()
