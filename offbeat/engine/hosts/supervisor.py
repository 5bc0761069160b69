"""The workers of one host: a process each, and those that are killed are started again."""

import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from offbeat.engine.local.process import be_child
from offbeat.engine.spawn import RESTARTS
from offbeat.errors import RunError

PIPE = 4096  # bytes that are read at once
_PLACE = struct.Struct("!i")


@dataclass(frozen=True)
class Place:
    """Which worker a process is to be: any, or the one whose process was killed."""

    number: int = -1
    # Which it is, once it knows, and again after its first step.
    tell: Callable[[int], None] = lambda number: None

    @property
    def instead(self) -> bool:
        return self.number >= 0


class WorkerChild:
    """A forked process, and which worker it has become."""

    def __init__(self, play: Callable[[Place], int], number: int):
        read, write = os.pipe()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.number, self.worked = number, False
        self.pid = os.fork()
        if self.pid:
            os.close(write)
            self.told = read
            return
        os.close(read)
        _become(parent)
        place = Place(number, lambda mine: _tell(write, mine))
        status = 1
        try:
            status = play(place)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        finally:
            _leave(status)

    def ended(self, status: int) -> int:
        """Which worker it was, and how it ended, as `os.waitstatus_to_exitcode` has it."""
        # All that it said lies there; what it has forked may still hold the other end.
        os.set_blocking(self.told, False)
        try:
            said = os.read(self.told, PIPE)
        except BlockingIOError:
            said = b""
        finally:
            os.close(self.told)
        if len(said) >= _PLACE.size:
            (self.number,) = _PLACE.unpack(said[-_PLACE.size :])
        self.worked = len(said) > _PLACE.size
        return os.waitstatus_to_exitcode(status)


def supervise(count: int, play: Callable[[Place], int]) -> int:
    """Run `play` in so many processes; returns the first exit code that is not 0.

    Whoever is killed by a signal is started again in its place: after work always, else a few
    times in a row.
    """
    children: dict[int, WorkerChild] = {}
    codes: list[int] = []
    failures = 0

    def start(number: int = -1) -> None:
        child = WorkerChild(play, number)
        children[child.pid] = child
        if asked:  # it came while this one was started
            os.kill(child.pid, asked[-1])

    asked: list[int] = []
    with _passed_on(children, asked):
        for _ in range(count):
            start()
        while children:
            pid, status = os.wait()
            child = children.pop(pid, None)
            if child is None:
                continue
            code = child.ended(status)
            failures = 0 if child.worked else failures
            if code < 0 and not asked and failures < RESTARTS * count:
                failures += 1
                name = signal.Signals(-code).name
                print(f"a worker was killed by {name}: starting it again", file=sys.stderr)
                start(child.number)
                continue
            if code < 0 and not asked:
                raise RunError(
                    f"workers of this host were killed {failures + 1} times in a row without any "
                    "work: if the machine ran out of memory, use smaller batches or fewer workers "
                    "here"
                )
            codes.append(128 - code if code < 0 else code)
    return next((code for code in codes if code), 0)


@contextmanager
def _passed_on(children: dict[int, WorkerChild], asked: list[int]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to the workers, once each; what has come is put to what was `asked`."""

    def pass_on(number: int, frame: Any) -> None:
        asked.append(number)
        for pid in list(children):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _become(parent: int) -> None:
    """In the child: it dies with its parent, and hears of Ctrl-C from it alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _leave_well)
    with suppress(OSError):
        os.setpgid(0, 0)
    be_child(parent, "offbeat work")


def _leave_well(number: int, frame: Any) -> NoReturn:
    """The store hears of it at once, and need not wait whether the process comes again."""
    raise SystemExit(128 + number)


def _tell(pipe: int, number: int) -> None:
    os.write(pipe, _PLACE.pack(number))


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
