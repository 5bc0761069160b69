"""One at a time touches the store: whichever thread has heard something has the floor."""

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import partial

from offbeat.engine.ears import Ears
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
        self.ears = Ears(server.store.cells, server.shared.cores, self._hear)
        self.bell = os.eventfd(0)
        self.selector.register(self.bell, selectors.EVENT_READ, partial(os.eventfd_read, self.bell))

    def take(self) -> None:
        """Have the floor from now on, except while waiting."""
        self.taken.acquire()

    def connect(self, number: int, wire: socket.socket) -> None:
        """Listen to a worker; a new wire takes the place of one that is dead."""
        self.server.connect(number, wire)
        self.ears.add(number, wire)

    def _hear(self, number: int, wire: socket.socket, changes: int) -> None:
        """As an ear: something lies in this wire, to be dealt with by one who has the floor.

        It stays in the wire until then, so that nobody takes a worker that has spoken for a silent
        one.
        """
        due: list[int] = []
        with self.taken:
            if changes != self.ears.changes or not self.ears.open:
                return
            try:
                if self.server.wires.get(number) is not wire:
                    self.ears.drop(number)
                    return
                self.server.hear(number)
                if self.heard():
                    self.ring()
                due = self.server.unsaid()
                self.ears.look()
            except BaseException as error:
                self._fail(error)
        self.server.answers.send(due, last=number)
        if due and self.taken.acquire(blocking=False):
            try:
                self.spare()
            except BaseException as error:
                self._fail(error)
            finally:
                self.taken.release()
        if not self.ears.together:
            self.server.shared.cores.follow(number)

    def _fail(self, error: BaseException) -> None:
        """Let the one who waits raise this; nobody is heard from here on."""
        self.failure = error
        self.ears.close()
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
