"""Threads that hear the workers: one for each, or one for all while steps are short.

The system wakes a thread where it last ran. One that hears one worker alone last ran where that
worker now waits, on a core that has nothing else to do; one that hears all would push a worker
aside there while the core of another stands idle. But what the store remembers then moves from core
to core with every packet, and that takes longer than a short step can bear. So while all steps are
short, one thread hears everybody. It stays on one core, where it finds everything at hand, and
waits until a worker there has come to the end of its step.
"""

import os
import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from offbeat import board
from offbeat.link.cores import NOWHERE, Cores, bind

SHORT = 1000  # microseconds of a step that is short
LOOK = 128  # packets after which to find out whether steps are
# Of a worker's number and wire, and of how often ears had changed before something was found there.
Hear = Callable[[int, socket.socket, int], None]


class Ear:
    """A thread that waits for what some workers say."""

    def __init__(self, ears: "Ears", name: str):
        self.ears = ears
        self.epoll = select.epoll()
        self.epoll.register(ears.bell, select.EPOLLIN)
        self.wires: dict[int, tuple[int, socket.socket]] = {}  # by file number
        self.thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self.thread.start()

    def add(self, number: int, wire: socket.socket) -> None:
        self.wires[wire.fileno()] = (number, wire)
        self.epoll.register(wire, select.EPOLLIN)

    def drop(self, wire: socket.socket) -> None:
        del self.wires[wire.fileno()]
        self.epoll.unregister(wire)

    def _listen(self) -> None:
        ears, wires, poll = self.ears, self.wires, self.epoll.poll
        while ears.open:
            changes = ears.changes
            for file, _ in poll():
                found = wires.get(file)
                if found is not None:
                    ears.hear(*found, changes)

    def stay(self, home: int | None) -> None:
        """Stay on the core `home` and push nobody aside there; None ends that."""
        thread = self.thread.native_id
        assert thread is not None
        bind(thread, os.sched_getaffinity(os.getpid()) if home is None else {home})
        policy = os.SCHED_OTHER if home is None else os.SCHED_BATCH
        with suppress(OSError):  # where it is not allowed, all goes on, if more slowly
            os.sched_setscheduler(thread, policy, os.sched_param(0))


class Ears:
    """Who hears whom; all but listening itself is done by the one who has the floor."""

    def __init__(self, cells: board.Cells, cores: Cores, hear: Hear):
        self.cells, self.cores, self.hear = cells, cores, hear
        self.ears: dict[int, Ear] = {}
        self.wires: dict[int, socket.socket] = {}
        self.open = True
        self.bell = os.eventfd(0)  # rung once, when it is over
        self.together = False
        cores.home[0] = NOWHERE  # an earlier server may have left its own there
        self.changes = 0  # what was found in a wire before a change may be gone by now
        self.left = LOOK  # packets until the next look

    def add(self, number: int, wire: socket.socket) -> None:
        """Listen to a worker; a new wire takes the place of one that is dead."""
        if number in self.wires:
            self.drop(number)
        if number not in self.ears:
            self.ears[number] = Ear(self, f"hears {number}")
        self.changes += 1
        self.wires[number] = wire
        self._of(number).add(number, wire)

    def drop(self, number: int) -> None:
        """Hear no more of a worker."""
        self.changes += 1
        wire = self.wires.pop(number)
        self._of(number).drop(wire)
        wire.close()

    def close(self) -> None:
        """Hear nobody any more."""
        self.open = False
        os.eventfd_write(self.bell, 1)

    def look(self) -> None:
        """After every packet: once in a while, find out whether steps are short."""
        self.left -= 1
        if self.left > 0:
            return
        self.left = LOOK
        short = 0 < board.longest_step(self.cells) < SHORT
        if short != self.together:
            self._change(short)

    def _change(self, together: bool) -> None:
        self.changes += 1
        for number, wire in self.wires.items():
            self._of(number).drop(wire)
        self.together = together
        for number, wire in self.wires.items():
            self._of(number).add(number, wire)
        home = self.cores.spare() if together else None
        self.cores.home[0] = NOWHERE if home is None else home
        self._first.stay(home)

    def _of(self, number: int) -> Ear:
        return self._first if self.together else self.ears[number]

    @property
    def _first(self) -> Ear:
        return next(iter(self.ears.values()))
