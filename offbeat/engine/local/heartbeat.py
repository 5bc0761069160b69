"""Signs of life in shared memory: how often a process has come round, and what it is about."""

from offbeat.store.board import Cells

FIELDS = 2
_TURNS, _ABOUT = range(FIELDS)
IDLE, WORKING, FILES = range(3)  # nothing is asked of it; it is at work; it waits for files


class Heartbeat:
    """Of one process; it writes here, and whoever watches it reads."""

    def __init__(self, cells: Cells):
        self.cells = cells

    def turn(self) -> None:
        """It has got on."""
        self.cells[_TURNS] += 1

    @property
    def turns(self) -> int:
        return int(self.cells[_TURNS])

    @property
    def about(self) -> int:
        return int(self.cells[_ABOUT])

    @about.setter
    def about(self, what: int) -> None:
        self.cells[_ABOUT] = what
