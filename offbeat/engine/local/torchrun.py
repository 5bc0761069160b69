"""A script under torchrun: its processes are there already, and rank 0 starts the server."""

import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from offbeat.config.describe import first_difference, sketch
from offbeat.config.job import Job
from offbeat.config.run_config import Local, RunConfig
from offbeat.engine.bring_up import ReadyRun, bring_up
from offbeat.engine.intervals import Intervals
from offbeat.engine.local.launcher import Launcher
from offbeat.engine.local.outcome import write_run
from offbeat.engine.local.process import Child, fork
from offbeat.engine.local.rendezvous import RankCandidate, Rendezvous, RendezvousClient, gone
from offbeat.engine.local.roles import Roles
from offbeat.engine.local.scripts import ProcessParticipant, make_script_worker
from offbeat.engine.local.shared_memory import Counts
from offbeat.engine.local.worker_process import WorkerProcess
from offbeat.engine.script import script_job
from offbeat.engine.signals import heard, keep_children
from offbeat.errors import RunError
from offbeat.transport.link import RunOver

WAIT = 300.0  # seconds that ranks wait for rank 0 to come to its loop


@dataclass(frozen=True)
class Rank:
    """Who this process is, and which run of torchrun it belongs to."""

    number: int
    workers: int
    run: str
    port: int

    @property
    def rendezvous(self) -> str:
        """The same for all ranks, and another one each time that torchrun starts them again."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return hashlib.sha256(f"{self.run} {self.port} {again}".encode()).hexdigest()[:32]


class RankParticipant(ProcessParticipant):
    """One of torchrun's processes."""

    def __init__(
        self, number: int, worker_process: WorkerProcess, roles: Roles, host: Child | None
    ):
        self.host = host  # the launcher, in rank 0
        self.over = False
        super().__init__(number, worker_process, roles)
        self.open = ExitStack()
        # A terminal or a scheduler signals every process, and torchrun sends on what it has got.
        self.open.enter_context(heard(self._ask, once=False))

    def _ask(self, number: int) -> None:
        """The server sees it with the next packet, saves, and stops all ranks."""
        self.roles.shared.counts[Counts.STOPPING] = number

    def _finish(self, over: RunOver) -> int:
        self.over = True
        return super()._finish(over)

    def _abandoned(self) -> NoReturn:
        raise RunError(
            "the server is gone: start the script again, with ob.join(out=..., resume=True) to go "
            "on from its last checkpoint"
        )

    def left(self, error: BaseException | None) -> None:
        """Rank 0 stays until the launcher has written what the run came to."""
        super().left(error)
        self.open.close()
        stopped = self.over and isinstance(error, KeyboardInterrupt)
        if self.host is not None and (error is None or stopped):
            words = self.host.reap()
            if words is not None:
                raise RunError(words.message)
            if not self.host.well:
                raise RunError(
                    "the launcher was killed before it had written what the run came to: start "
                    "the script again, with ob.join(out=..., resume=True)"
                )


def enter(config: RunConfig, rank: Rank) -> RankParticipant:
    """Rank 0 opens the rendezvous, and everybody, rank 0 too, comes there."""
    assert isinstance(config.engine, Local)
    job = script_job(config)
    host = _open(config, job, rank) if rank.number == 0 else None
    client = RendezvousClient(rank.rendezvous, rank.number, sketch(config), first_difference)
    memory, wire = client.enter(WAIT, partial(_still_there, host))
    roles = Roles(job, config.engine, None, None, Intervals(), memory=memory)
    make = partial(make_script_worker, config, job)
    return RankParticipant(rank.number, roles.worker_process(rank.number, wire, make), roles, host)


def _still_there(host: Child | None) -> None:
    """In rank 0: a launcher that has ended lets nobody in."""
    if host is not None and gone(host.handle):
        words = host.reap()
        raise RunError("the launcher was killed" if words is None else words.message)


def _open(config: RunConfig, job: Job, rank: Rank) -> Child:
    """In rank 0: fork the launcher, which forks the server and lets the others in."""
    keep_children()  # for good: rank 0 waits for the launcher when its script is through
    # Listeners are objects of the ranks' scripts, and the launcher is neither of them.
    run = bring_up(replace(config, listeners=()), job)
    roles = run.roles()
    rendezvous = Rendezvous(rank.rendezvous, sketch(config), roles.local.patience)
    try:
        with run.kept.passed_on():
            child = fork("offbeat host", TorchrunLauncher(roles, run, rendezvous).serve)
    except BaseException:
        rendezvous.close()
        raise
    rendezvous.forget()
    roles.close()
    return child


class TorchrunLauncher(Launcher):
    """A launcher whose workers come by themselves, and are torchrun's to watch and restart."""

    def __init__(self, roles: Roles, run: ReadyRun, rendezvous: Rendezvous):
        super().__init__(roles, run.tally, ())
        self.kept_run, self.rendezvous = run.kept, rendezvous
        self.came: set[int] = set()

    def serve(self) -> None:
        with self.kept_run:
            try:
                done = self.run(self.kept_run.saved)
            finally:
                self.rendezvous.close()
            write_run(self.roles, self.kept_run, self.tally, done)

    def _fork(self, number: int, main: Callable[[], None]) -> None:
        def behind_the_door() -> None:
            self.rendezvous.forget()
            main()

        super()._fork(number, behind_the_door)

    def _start_one(self, number: int) -> None:
        """Let one in, whichever comes first, and close the rendezvous behind the last."""
        while not self._let_in(self.rendezvous.admit()):
            continue
        if len(self.came) == self.roles.workers:
            self.rendezvous.close()

    def _let_in(self, candidate: RankCandidate) -> bool:
        """Whether this one takes part from now on."""
        rank, request = candidate.rank, candidate.request
        with candidate.wire:
            if request.difference or request.sketch != self.rendezvous.sketch:
                different = request.difference or "they describe it differently"
                reason = f"rank {rank} runs another script than rank 0: {different}"
                self.rendezvous.turn_away(candidate, reason)
                raise RunError(reason)
            if rank in self.came or not 0 <= rank < self.roles.workers:
                has = "has come in already" if rank in self.came else "is not of this run"
                self.rendezvous.turn_away(candidate, f"rank {rank} {has}")
                return False
            theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, mine:
                if not self.rendezvous.let_in(
                    candidate, [self.roles.shared.arena.file, mine.fileno()]
                ):
                    return False
                self._hand_over(rank, theirs)
        self.came.add(rank)
        return True

    def _start_backup(self) -> None:
        """Nobody follows a server that is not started again."""

    def _restart_all(self) -> NoReturn:
        raise RunError("the server was killed")  # the ranks end, and torchrun starts them again

    def _left_alone(self) -> bool:
        return False  # nobody here is its child
