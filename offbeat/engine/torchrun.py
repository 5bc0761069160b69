"""A script under torchrun: its processes are there already, and rank 0 starts the server."""

import json
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from offbeat.engine.crew import Crew
from offbeat.engine.local import Launcher
from offbeat.engine.local_plan import Local
from offbeat.engine.local_script import ProcessSeat, make_script_worker, options, prepared
from offbeat.engine.outcome import write_run
from offbeat.engine.process import Child, fork
from offbeat.engine.station import Station
from offbeat.engine.steward import Rhythm
from offbeat.errors import ConfigError, RunError
from offbeat.job import Job
from offbeat.kept import Kept
from offbeat.report.summary import Tally
from offbeat.script import Wanted
from offbeat.setup import first_difference

LARGEST = 1 << 20


@dataclass(frozen=True)
class Rank:
    """Who this process is, and where torchrun's own store of keys listens."""

    number: int
    workers: int
    run: str
    port: int

    @property
    def door(self) -> str:
        """The address of rank 0, in the kernel's own name space: no file is left behind."""
        return f"\0offbeat {self.run} {self.port}"

    def keys(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        return TCPStore(host, self.port, is_master=False, timeout=timedelta(minutes=5))


class RankSeat(ProcessSeat):
    """The seat of one of torchrun's processes."""

    def __init__(self, number: int, station: Station, crew: Crew, host: Child | None):
        self.host = host  # the launcher, in rank 0
        super().__init__(number, station, crew)

    def _abandoned(self) -> NoReturn:
        raise RunError(
            "the server is gone: start the script again, with ob.join(out=..., resume=True) to go "
            "on from its last checkpoint"
        )

    def left(self, error: BaseException | None) -> None:
        """Rank 0 stays until the launcher has written what the run came to."""
        if self.host is not None and error is None:
            words = self.host.reap()
            if words is not None:
                raise RunError(words.message)


def enter(wanted: Wanted, rank: Rank) -> RankSeat:
    """Rank 0 opens the door, and everybody, rank 0 too, goes through it."""
    local = Local(threads=torch.get_num_threads(), **options(wanted))
    host = None
    if rank.number == 0:
        job, host = _open(wanted, rank, local)
    else:
        job = wanted.job()
        rank.keys().wait([f"offbeat {rank.run}"])
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.connect(rank.door)
    door.send(json.dumps([rank.number, wanted.sketch()]).encode())
    answer, handles, _, _ = socket.recv_fds(door, LARGEST, 2)
    if not handles:
        raise ConfigError(answer.decode() or "rank 0 has closed the door")
    memory, wire = handles[0], socket.socket(fileno=handles[1])
    crew = Crew(job, local, None, None, Rhythm(), memory)
    make = partial(make_script_worker, wanted, job)
    return RankSeat(rank.number, crew.station(rank.number, wire, make), crew, host)


def _open(wanted: Wanted, rank: Rank, local: Local) -> tuple[Job, Child]:
    """In rank 0: fork the launcher, which forks the server and lets the others in."""
    job, kept = prepared(wanted, local)
    crew = Crew(job, local, kept.folder, None, Rhythm(None, wanted.settings.checkpoint_every))
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(rank.door)
    door.listen(rank.workers)
    host = Host(crew, kept, door, json.loads(json.dumps(wanted.sketch())))
    child = fork("offbeat host", host.serve)
    door.close()
    crew.close()
    rank.keys().set(f"offbeat {rank.run}", "open")
    return job, child


class Host(Launcher):
    """A launcher whose workers come by themselves, and are torchrun's to watch and restart."""

    def __init__(self, crew: Crew, kept: Kept, door: socket.socket, sketch: dict[str, object]):
        tally = Tally(crew.workers)
        kept.recount(tally)
        super().__init__(crew, tally, ())
        self.kept_run, self.door, self.sketch = kept, door, sketch

    def serve(self) -> None:
        done = self.run(self.kept_run.saved)
        write_run(self.crew, self.kept_run, self.tally, done)

    def _start_one(self, number: int) -> None:
        """Let one in, whichever comes first."""
        with self.door.accept()[0] as guest:
            theirs, mine = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs, mine:
                who, sketch = json.loads(guest.recv(LARGEST))
                different = first_difference(self.sketch, sketch)
                if different is not None:
                    guest.send(f"rank {who} runs another script than rank 0: {different}".encode())
                    raise RunError(f"rank {who} and rank 0 differ: {different}")
                socket.send_fds(guest, [b"come in"], [self.crew.shared.arena.file, mine.fileno()])
                self._hand_over(who, theirs)

    def _left_alone(self) -> bool:
        return False  # nobody here is its child
