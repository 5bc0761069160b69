"""Where the workers of a run and those who hear them run, so that none pushes another aside.

The system wakes a thread where it last ran, even where others are at work by now and another core
stands idle. For steps of less than a millisecond it takes too long to find out.
"""

import ctypes
import os
from collections.abc import Iterable

import numpy as np

from offbeat.board import Cells

NOWHERE = -1
MOST = 1024  # cores that the system's calls know of
LOOK = 16  # steps after which a worker looks again who else is on its core
# A call of PyDLL keeps the interpreter, one of CDLL lets other threads have it meanwhile.
here = ctypes.PyDLL(None).sched_getcpu
give_way = ctypes.CDLL(None).sched_yield  # to whoever else is to run on this core
_allow = ctypes.CDLL(None).sched_setaffinity


class Cores:
    """The core that each worker last ran on, in memory that all of them share.

    `home` is one cell: the core on which one thread hears all of them, while steps are short.
    """

    def __init__(self, cells: Cells, home: Cells | None = None):
        self.cells = cells
        self.home = np.full(1, NOWHERE) if home is None else home
        self.last, self.left = NOWHERE, 0  # a worker's core, and steps until it looks around again

    def settle(self, worker: int) -> None:
        """As a worker: leave a core that another one needs, if there is one that nobody needs."""
        core = here()
        self.left -= 1
        if core == self.last and self.left > 0:
            return
        moved, self.last, self.left = core != self.last, core, LOOK
        taken = self.cells.tolist()
        self.cells[worker] = taken[worker] = core
        # One that was put beside another leaves at once; of two that have long been there, one.
        if taken.count(core) > 1 and (moved or core in taken[:worker]):
            free = sorted(os.sched_getaffinity(0).difference(taken))
            if free:
                self.cells[worker] = self.last = free[worker % len(free)]
                move(self.last)

    def spare(self) -> int:
        """A core that no worker is on; if there is none, the one that this thread is on."""
        free = sorted(os.sched_getaffinity(0).difference(self.cells.tolist()))
        return free[-1] if free else here()

    def stand_aside(self) -> None:
        """As one who has time: leave the core where all are heard, where everybody would wait."""
        core = here()
        if core == self.home.item(0):
            others = sorted(os.sched_getaffinity(0).difference([core]))
            if others:
                move(others[0])

    def follow(self, worker: int) -> None:
        """As one who hears `worker`: leave the core of another one for that worker's."""
        core = here()
        if core == self.cells.item(worker):
            return
        taken = self.cells.tolist()
        # With more workers than cores somebody is always in the way, wherever this thread goes.
        if core in taken and len({*taken, NOWHERE}) > len(taken):
            move(taken[worker])


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
