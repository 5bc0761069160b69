"""A script under torchrun: its processes are there already, and rank 0 starts the server."""

import hashlib
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import torch

from offbeat.engine.crew import Crew
from offbeat.engine.door import Door, Guest, Visitor, gone
from offbeat.engine.local import Launcher
from offbeat.engine.local_plan import Local
from offbeat.engine.local_script import ProcessSeat, make_script_worker, options, prepared
from offbeat.engine.outcome import write_run
from offbeat.engine.process import Child, fork
from offbeat.engine.station import Station
from offbeat.engine.steward import Rhythm
from offbeat.errors import RunError
from offbeat.job import Job
from offbeat.kept import Kept
from offbeat.link.base import Over
from offbeat.link.memory import Counts
from offbeat.report.summary import Tally
from offbeat.script import Wanted
from offbeat.setup import first_difference
from offbeat.signals import heard, keep_children

WAIT = 300.0  # seconds that ranks wait for rank 0 to come to its loop


@dataclass(frozen=True)
class Rank:
    """Who this process is, and which run of torchrun it belongs to."""

    number: int
    workers: int
    run: str
    port: int

    @property
    def door(self) -> str:
        """The same for all ranks, and another one each time that torchrun starts them again."""
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return hashlib.sha256(f"{self.run} {self.port} {again}".encode()).hexdigest()[:32]


class RankSeat(ProcessSeat):
    """The seat of one of torchrun's processes."""

    def __init__(self, number: int, station: Station, crew: Crew, host: Child | None):
        self.host = host  # the launcher, in rank 0
        self.over = False
        super().__init__(number, station, crew)
        self.open = ExitStack()
        # A terminal or a scheduler signals every process, and torchrun sends on what it has got.
        self.open.enter_context(heard(self._ask, once=False))

    def _ask(self, number: int) -> None:
        """The server sees it with the next packet, saves, and stops all ranks."""
        self.crew.shared.counts[Counts.STOPPING] = number

    def _finish(self, over: Over) -> int:
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


def enter(wanted: Wanted, rank: Rank) -> RankSeat:
    """Rank 0 opens the door, and everybody, rank 0 too, goes through it."""
    local = Local(threads=torch.get_num_threads(), **options(wanted))
    host = None
    if rank.number == 0:
        job, host = _open(wanted, rank, local)
    else:
        job = wanted.job()
    visitor = Visitor(rank.door, rank.number, wanted.sketch(), first_difference)
    memory, wire = visitor.enter(WAIT, partial(_still_there, host))
    crew = Crew(job, local, None, None, Rhythm(), memory)
    make = partial(make_script_worker, wanted, job)
    return RankSeat(rank.number, crew.station(rank.number, wire, make), crew, host)


def _still_there(host: Child | None) -> None:
    """In rank 0: a launcher that has ended lets nobody in."""
    if host is not None and gone(host.handle):
        words = host.reap()
        raise RunError("the launcher was killed" if words is None else words.message)


def _open(wanted: Wanted, rank: Rank, local: Local) -> tuple[Job, Child]:
    """In rank 0: fork the launcher, which forks the server and lets the others in."""
    keep_children()  # for good: rank 0 waits for the launcher when its script is through
    job, kept = prepared(wanted, local)
    crew = Crew(job, local, kept.folder, None, Rhythm(None, wanted.settings.checkpoint_every))
    door = Door(rank.door, wanted.sketch(), local.patience)
    try:
        with kept.passed_on():
            child = fork("offbeat host", Host(crew, kept, door).serve)
    except BaseException:
        door.close()
        raise
    door.forget()
    crew.close()
    return job, child


class Host(Launcher):
    """A launcher whose workers come by themselves, and are torchrun's to watch and restart."""

    def __init__(self, crew: Crew, kept: Kept, door: Door):
        tally = Tally(crew.workers)
        kept.recount(tally)
        super().__init__(crew, tally, ())
        self.kept_run, self.door = kept, door
        self.came: set[int] = set()

    def serve(self) -> None:
        with self.kept_run:
            try:
                done = self.run(self.kept_run.saved)
            finally:
                self.door.close()
            write_run(self.crew, self.kept_run, self.tally, done)

    def _fork(self, number: int, main: Callable[[], None]) -> None:
        def behind_the_door() -> None:
            self.door.forget()
            main()

        super()._fork(number, behind_the_door)

    def _start_one(self, number: int) -> None:
        """Let one in, whichever comes first, and close the door behind the last."""
        while not self._let_in(self.door.admit()):
            continue
        if len(self.came) == self.crew.workers:
            self.door.close()

    def _let_in(self, guest: Guest) -> bool:
        """Whether this one takes part from now on."""
        rank, request = guest.rank, guest.request
        with guest.wire:
            if request.difference or request.sketch != self.door.sketch:
                different = request.difference or "they describe it differently"
                reason = f"rank {rank} runs another script than rank 0: {different}"
                self.door.turn_away(guest, reason)
                raise RunError(reason)
            if rank in self.came or not 0 <= rank < self.crew.workers:
                has = "has come in already" if rank in self.came else "is not of this run"
                self.door.turn_away(guest, f"rank {rank} {has}")
                return False
            theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, mine:
                if not self.door.let_in(guest, [self.crew.shared.arena.file, mine.fileno()]):
                    return False
                self._hand_over(rank, theirs)
        self.came.add(rank)
        return True

    def _restart_all(self) -> NoReturn:
        raise RunError("the server was killed")  # the ranks end, and torchrun starts them again

    def _left_alone(self) -> bool:
        return False  # nobody here is its child
