"""The processes of a run as values, what starts them, and how it is told that one has failed."""

import os
import signal
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from offbeat.errors import RunError

TESTER = -1  # the number of the process that tests
BACKUP = -2  # that of the one that follows the server
SERVER = -3  # that of the server, with its shard processes behind it: -4, -5, ...
RESTARTS = 3  # deaths in a row, without any work between them, that a process is forgiven


@dataclass(frozen=True)
class Role:
    """One process of a run: a worker by its number, or one of those with a number below zero."""

    number: int
    threads: int = 1  # with which it computes

    @classmethod
    def shard(cls, shard: int, threads: int) -> "Role":
        """The process that holds the second, third, ... part of the store, counted from 1."""
        return cls(SERVER - shard, threads)

    @property
    def name(self) -> str:
        """What `ps` and `top` show."""
        if self.number < SERVER:
            return f"offbeat shard {SERVER - self.number}"
        special = {SERVER: "offbeat server", TESTER: "offbeat tester", BACKUP: "offbeat backup"}
        return special.get(self.number, f"offbeat {self.number}")

    @property
    def title(self) -> str:
        """What errors call it."""
        if self.number < SERVER:
            return f"shard process {SERVER - self.number}"
        special = {SERVER: "the server", TESTER: "the test process", BACKUP: "the backup"}
        return special.get(self.number, f"worker {self.number}")


class LastWords(msgspec.Struct):
    """Why a process ended itself; `ours` marks an error that offbeat raised on purpose.

    `late` marks one of a script after its loop, which no other worker can make good.
    """

    message: str
    trace: str = ""
    ours: bool = False
    late: bool = False


class Handle(Protocol):
    """A process that was started."""

    pid: int
    handle: int  # of a file that can be read when the process is gone
    status: int | None  # as `os.waitstatus_to_exitcode` has it, once it is gone
    well: bool  # whether it came to its end and said so

    def kill(self) -> None:
        """End it at once, if it has not ended."""

    def forget(self) -> None:
        """Close what belongs to it here; the process is another's to watch."""

    def reap(self) -> LastWords | None:
        """Wait for its end and read what it left; None if it was killed or ended well."""


class Spawner(Protocol):
    """Starts processes somewhere."""

    def start(self, role: Role, main: Callable[[], None]) -> Handle:
        """Start one that does `main`; raises RunError if that cannot be done."""


# ---------------------------------------------------------------- what has failed, in words


class ProcessFailed(RunError):
    """What a process of the run has failed of, with the line if that is the user's."""


def failed(
    role: Role, words: LastWords | None, status: int | None = None, patience: float | None = None
) -> RunError:
    """In words: who failed, of what, and what to do; `patience` with one that was silent."""
    if words is not None and words.ours:  # it says itself whom it is about
        return ProcessFailed(f"{where(words.trace, '{}: ')}{words.message}")
    if words is not None:
        return ProcessFailed(f"{role.title} failed: {words.message}{where(words.trace)}")
    how = f"was killed by {signal.Signals(-status).name}" if status and status < 0 else "ended"
    remedy = "if the machine ran out of memory, use fewer workers or smaller batches"
    if patience is not None:
        how = f"was silent for longer than patience ({patience:g} s)"
        remedy = "look for what holds it up; if it waits for something slow, pass a larger patience"
    elif status == 0:
        how = "ended with exit status 0"
        remedy = "look in your code, and in what it calls, for os._exit(0)"
    times = f"{RESTARTS + 1} times in a row without any work"
    return ProcessFailed(f"{role.title} {how} {times}; {remedy}")


def where(trace: str, form: str = " ({})") -> str:
    """The last line of a traceback that is the user's own, put into `form`."""
    here = str(Path(__file__).parents[1]) + os.sep
    others = (here, "site-packages", sysconfig.get_path("stdlib") + os.sep)
    found = ""
    for line in trace.splitlines():
        line = line.strip()
        if line.startswith('File "') and not any(other in line for other in others):
            found = line
    if not found:
        return ""
    file, _, rest = found.removeprefix('File "').partition('", line ')
    return form.format(f"{file} line {rest.partition(',')[0]}")
