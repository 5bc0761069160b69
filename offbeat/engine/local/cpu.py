"""Where the processes of a run are computed, and how they wait: one policy for a machine.

The system wakes a thread where it last ran, even where others are at work by now and another core
stands idle. For steps of less than a millisecond it takes too long to find out. `CpuPolicy` asks
nothing of the system; `PlacedCpu` keeps workers, and the threads that listen to them, out of each
other's way.
"""

import ctypes
import os
from collections.abc import Iterable

from offbeat.store.board import Cells
from offbeat.transport.memory_link import Waiting

NOWHERE = -1
MOST = 1024  # cores that the system's calls know of
LOOK = 16  # steps after which a worker looks again who else is on its core
ATTENTION = 1e-3  # seconds: several times what an idle core takes to wake, and what an answer takes
# A call of PyDLL keeps the interpreter, one of CDLL lets other threads have it meanwhile.
here = ctypes.PyDLL(None).sched_getcpu
_allow = ctypes.CDLL(None).sched_setaffinity


class CpuPolicy:
    """Leaves everything to the system."""

    def worker(self, number: int) -> Waiting:
        """How a worker waits for answers, and what it does before a step."""
        return Waiting()

    def received(self, number: int) -> None:
        """As the thread that listens to a worker: something of it has been dealt with."""


class PlacedCpu(CpuPolicy):
    """Each worker on a core of its own, as far as there are enough, and its receiver beside it.

    `cells` has the core that each worker last ran on, in memory that all of them share.
    """

    def __init__(self, cells: Cells):
        self.cells = cells

    def worker(self, number: int) -> Waiting:
        return PlacedWorker(self.cells, number)

    def received(self, number: int) -> None:
        """Leave the core of another worker for this one's."""
        core = here()
        if core == self.cells.item(number):
            return
        taken = self.cells.tolist()
        # With more workers than cores somebody is always in the way, wherever this thread goes.
        if core in taken and len({*taken, NOWHERE}) > len(taken):
            move(taken[number])


class PlacedWorker(Waiting):
    """A worker that keeps its core awake while it waits, and leaves one that another needs."""

    attention = ATTENTION

    def __init__(self, cells: Cells, number: int):
        self.cells, self.number = cells, number
        self.last, self.left = NOWHERE, 0  # its core, and steps until it looks around again

    def step_begins(self) -> None:
        core = here()
        self.left -= 1
        if core == self.last and self.left > 0:
            return
        moved, self.last, self.left = core != self.last, core, LOOK
        taken = self.cells.tolist()
        self.cells[self.number] = taken[self.number] = core
        # One that was put beside another leaves at once; of two that have long been there, one.
        if taken.count(core) > 1 and (moved or core in taken[: self.number]):
            free = sorted(os.sched_getaffinity(0).difference(taken))
            if free:
                self.cells[self.number] = self.last = free[self.number % len(free)]
                move(self.last)


def move(core: int) -> None:
    """Go on running on `core`; where this thread is woken next time is the system's choice."""
    allowed = os.sched_getaffinity(0)
    if core in allowed:
        bind(0, {core})
        bind(0, allowed)


def bind(thread: int, cores: Iterable[int]) -> None:
    """Let a thread run on these cores alone.

    Not by way of `os`, which would keep the interpreter until the thread runs on one of them.
    """
    mask = _mask(cores)
    _allow(thread, len(mask), mask)


def _mask(cores: Iterable[int]) -> bytes:
    """As the system's calls have it: a bit for each core."""
    return sum(1 << core for core in cores if core < MOST).to_bytes(MOST // 8, "little")
