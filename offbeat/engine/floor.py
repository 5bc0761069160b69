"""One at a time touches the store: a thread listens to each worker, and who hears has the floor.

The system wakes a thread where it last ran. One that listens to one worker alone last ran where
that worker now waits, on a core that has nothing else to do. One that listened to all would mostly
be woken elsewhere, and push a worker aside while the core of the other stood idle.
"""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from offbeat.engine.server import Server


class Floor:
    """Threads that hear the workers, and a wait for everything else that a server has to hear."""

    def __init__(self, server: Server):
        self.server = server
        self.selector = selectors.DefaultSelector()  # of callables
        self.taken = threading.Lock()
        self.heard: Callable[[], bool] = lambda: False  # told of every packet; True wakes `wait`
        self.spare: Callable[[], None] = lambda: None  # what can be done once all are answered
        self.failure: BaseException | None = None  # what went wrong in one of the threads
        self.bell = os.eventfd(0)
        self.selector.register(self.bell, selectors.EVENT_READ, partial(os.eventfd_read, self.bell))

    def take(self) -> None:
        """Have the floor from now on, except while waiting."""
        self.taken.acquire()

    def connect(self, number: int, wire: socket.socket) -> None:
        """Listen to a worker; a new wire takes the place of one that is dead."""
        self.server.connect(number, wire)
        threading.Thread(
            target=self._listen, args=(number, wire), name=f"hears {number}", daemon=True
        ).start()

    def _listen(self, number: int, wire: socket.socket) -> None:
        while self._hear(number, wire):
            self.server.shared.cores.follow(number)
        wire.close()

    def _hear(self, number: int, wire: socket.socket) -> bool:
        """Wait for a packet and deal with it; False if nothing more is to be heard here."""
        with suppress(ConnectionError):
            # It stays in the wire until its turn has come, so that nobody takes a worker that has
            # spoken for a silent one.
            wire.recv(1, socket.MSG_PEEK)
        with self.taken:
            if self.failure is not None or self.server.wires.get(number) is not wire:
                return False
            try:
                self.server.hear(number)
                if self.heard():
                    self.ring()
                due = self.server.unsaid()
            except BaseException as error:
                due = []
                self._fail(error)
        self.server.answers.send(due, last=number)
        if self.taken.acquire(blocking=False):
            try:
                self.spare()
            except BaseException as error:
                self._fail(error)
            finally:
                self.taken.release()
        return True

    def _fail(self, error: BaseException) -> None:
        """Let the one who waits raise this; nobody is heard from here on."""
        self.failure = error
        self.ring()

    def answer(self) -> None:
        """Send at once what is to be sent: what comes next takes its time."""
        self.server.answers.send(self.server.unsaid())

    def ring(self) -> None:
        """Let `wait` come back."""
        os.eventfd_write(self.bell, 1)

    def wait(self, timeout: float | None) -> None:
        """Leave the floor to others until there is something else than a packet, or it is time.

        It is time after `timeout`, and when the patience with a worker may have run out.
        """
        # Whoever is expected from now on may be silent for that long.
        limit = self.server.shortest
        left = self.server.patience_left(time.monotonic())
        self._pause(min(x for x in (limit, left, timeout) if x is not None))
        self.server.give_up_the_silent(time.monotonic())

    def _pause(self, timeout: float) -> None:
        due = self.server.unsaid()
        self.taken.release()
        try:
            self.server.answers.send(due)
            found = self.selector.select(timeout)
        finally:
            self.taken.acquire()
        if self.failure is not None:
            raise self.failure
        for key, _ in found:
            key.data()

    def dismiss(self, until: float) -> None:
        """Tell everyone that it is over, and hear their last words until `until`."""
        self.server.dismiss()
        self.answer()
        while self.server.wires and time.monotonic() < until:
            self._pause(max(0.0, until - time.monotonic()))
