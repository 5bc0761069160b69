"""Where the workers of a run and those who hear them run, so that none pushes another aside.

The system wakes a thread where it last ran, even where others are at work by now and another core
stands idle. For steps of less than a millisecond it takes too long to find out.
"""

import ctypes
import os

from offbeat.board import Cells

NOWHERE = -1
# Not CDLL, which would let another thread of this process have the interpreter meanwhile.
here = ctypes.PyDLL(None).sched_getcpu


class Cores:
    """The core that each worker last ran on, in memory that all of them share."""

    def __init__(self, cells: Cells):
        self.cells = cells

    def settle(self, worker: int) -> None:
        """As a worker: leave a core that another one needs, if there is one that nobody needs."""
        core = here()
        self.cells[worker] = core
        taken = self.cells.tolist()
        if core in taken[:worker]:
            free = sorted(os.sched_getaffinity(0).difference(taken))
            if free:
                move(free[worker % len(free)])

    def follow(self, worker: int) -> None:
        """As one who hears `worker`: leave the core of another one for that worker's."""
        core, taken = here(), self.cells.tolist()
        if core != taken[worker] != NOWHERE and core in taken:
            move(taken[worker])


def move(core: int) -> None:
    """Go on running on `core`; where this thread is woken next time is the system's choice."""
    allowed = os.sched_getaffinity(0)
    if core in allowed:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, allowed)
