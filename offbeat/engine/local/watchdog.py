"""Who of the launcher's processes has stopped getting on, by their own signs and by the system's.

A process that computes, or that a disk keeps waiting, is never taken for a silent one, however
long that lasts: the system knows which threads run and how much they have computed. One that does
neither, does not come round, and still has something to do, hangs or has been stopped.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from offbeat.store.board import Cells

FIELDS = 2
_TURNS, _ABOUT = range(FIELDS)
IDLE, WORKING, FILES = range(3)  # nothing is asked of it; it is at work; it waits for files
LOOKS = 4  # in the time of patience


class Heartbeat:
    """Signs of life of one process in shared memory: it writes them, and the watchdog reads."""

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

    @contextmanager
    def at(self, what: int) -> Iterator[None]:
        """For a while it is about something else."""
        before, self.about = self.about, what
        try:
            yield
        finally:
            self.about = before


@dataclass
class Vitals:
    """What the system says of a process and of those that it has started."""

    stopped: bool = False  # one of them, by a signal or a debugger
    running: bool = False  # a thread of theirs, or it waits for a disk
    spent: int = 0  # time on a core, in ticks


class Watched:
    """One process, and what it was found at when it was last looked at."""

    def __init__(self, pid: int, sign: Heartbeat):
        self.pid, self.sign = pid, sign
        self.turns, self.spent = -1, -1
        self.missed = 0  # looks in a row without a sign of life

    def gets_on(self) -> bool:
        before, self.turns = self.turns, self.sign.turns
        about = self.sign.about
        if self.turns != before or about == IDLE:
            return True
        found = vitals(self.pid)
        if found.stopped:
            return False
        spent, self.spent = self.spent, found.spent
        return about == FILES or found.running or found.spent != spent


class Watchdog:
    """Looks at processes a few times in the course of `patience`.

    Looks are counted, and not seconds: if the launcher itself has been stopped, together with all
    the others or alone, nobody has been silent meanwhile.
    """

    def __init__(self, patience: float, signs: Mapping[int, Heartbeat]):
        """`signs` are those of the processes that are to be watched, by their numbers."""
        self.every, self.signs = patience / LOOKS, signs
        self.watched: dict[int, Watched] = {}
        self.due = 0.0  # when to look again

    def watch(self, number: int, pid: int) -> None:
        if number in self.signs:
            self.watched[number] = Watched(pid, self.signs[number])

    def forget(self, number: int) -> None:
        self.watched.pop(number, None)

    def left(self, now: float) -> float:
        """Seconds until the next look."""
        return max(0.0, self.due - now)

    def silent(self, now: float) -> list[int]:
        """Look, if it is time to: who has given no sign of life for longer than patience."""
        if now < self.due:
            return []
        self.due = now + self.every
        return [number for number, one in self.watched.items() if self._look(one)]

    def _look(self, one: Watched) -> bool:
        one.missed = 0 if one.gets_on() else one.missed + 1
        return one.missed > LOOKS


# ---------------------------------------------------------------- what the system says


def vitals(pid: int) -> Vitals:
    """Of a process and its descendants: the server waits while its shard processes compute."""
    parents = dict(_parents())
    family, found = {pid}, Vitals()
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    for member in family:
        words = _stat(f"/proc/{member}/stat")
        if words:
            found.stopped |= words[0] in "Tt"
            found.spent += int(words[11]) + int(words[12])
        found.running |= any(state in "RD" for state in _threads(member))
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit() and (words := _stat(f"/proc/{name}/stat")):
            yield int(name), int(words[1])


def _threads(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return  # it has just ended
    for name in names:
        if words := _stat(f"/proc/{pid}/task/{name}/stat"):
            yield words[0]


def _stat(path: str) -> list[str]:
    """The words after a process's name, which may itself have brackets and blanks."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(") ")[2].split()
    except OSError:
        return []  # it has just ended
