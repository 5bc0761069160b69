"""Threads that listen to the workers, and the lock: one of them at a time touches the store."""

import os
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.server import Server
from offbeat.transport.memory_link import MemoryPort

# Of a worker's number and wire.
Receive = Callable[[int, socket.socket], None]


class Receiver:
    """A thread that waits for what one worker says.

    The system wakes a thread where it last ran. One that listens to one worker alone last ran where
    that worker now waits, on a core that has nothing else to do; one that listens to all would push
    a worker aside there, while the core of another stands idle.
    """

    def __init__(self, receivers: "Receivers", number: int):
        self.receivers, self.number = receivers, number
        self.epoll = select.epoll()
        self.epoll.register(receivers.bell, select.EPOLLIN)
        self.wire: socket.socket | None = None
        self.thread = threading.Thread(target=self._listen, name=f"receiver {number}", daemon=True)
        self.thread.start()

    def connect(self, wire: socket.socket) -> None:
        self.wire = wire
        self.epoll.register(wire, select.EPOLLIN)

    def disconnect(self) -> None:
        if self.wire is not None:
            self.epoll.unregister(self.wire)
            self.wire.close()
            self.wire = None

    def _listen(self) -> None:
        while self.receivers.open:
            self.epoll.poll()
            wire = self.wire
            if wire is not None and self.receivers.open:
                self.receivers.receive(self.number, wire)


class Receivers:
    """Who listens to whom; all but listening itself is done with the store locked."""

    def __init__(self, receive: Receive):
        self.receive = receive
        self.threads: dict[int, Receiver] = {}
        self.open = True
        self.bell = os.eventfd(0)  # rung once, when it is over

    def connect(self, number: int, wire: socket.socket) -> None:
        """Listen to a worker; a new wire takes the place of one that is dead."""
        if number not in self.threads:
            self.threads[number] = Receiver(self, number)
        self.disconnect(number)
        self.threads[number].connect(wire)

    def disconnect(self, number: int) -> None:
        """Listen to a worker no more."""
        self.threads[number].disconnect()

    def connected(self, number: int, wire: socket.socket) -> bool:
        """Whether this wire is still the worker's."""
        return self.open and self.threads[number].wire is wire

    def close(self) -> None:
        """Listen to nobody any more."""
        self.open = False
        os.eventfd_write(self.bell, 1)


def nothing() -> None:
    """For one who has nothing to do."""


@dataclass(frozen=True)
class Around:
    """What else happens around the messages of workers.

    `record` comes before anybody is answered; `dealt_with` after every message, and says whether
    the thread that waits has to know; `spare` when all are answered and nobody has come meanwhile.
    """

    record: Callable[[], None] = nothing
    dealt_with: Callable[[], bool] = lambda: False
    spare: Callable[[], None] = nothing


class Dispatcher:
    """Threads that listen to the workers, and a wait for everything else that a server hears."""

    def __init__(self, server: Server, port: MemoryPort, cpu: CpuPolicy, around: Around):
        self.server, self.port, self.cpu, self.around = server, port, cpu, around
        self.selector = selectors.DefaultSelector()  # of callables
        self.lock = threading.Lock()
        self.failure: BaseException | None = None  # what went wrong in one of the threads
        self.receivers = Receivers(self._receive)
        self.bell = os.eventfd(0)
        self.selector.register(self.bell, selectors.EVENT_READ, partial(os.eventfd_read, self.bell))

    def connect(self, number: int, wire: socket.socket) -> None:
        """Listen to a worker; a new wire takes the place of one that is dead."""
        self.port.connect(number, wire)
        self.server.connect(number)
        self.receivers.connect(number, wire)

    def _receive(self, number: int, wire: socket.socket) -> None:
        """As a receiver: something lies in this wire, to be dealt with by one who holds the lock.

        It stays in the wire until then, so that nobody takes a worker that has spoken for a silent
        one.
        """
        due: list[int] = []
        with self.lock:
            if not self.receivers.connected(number, wire):
                return
            try:
                if self.port.wires.get(number) is not wire:
                    self.receivers.disconnect(number)
                    return
                self.server.hear(number)
                if self.around.dealt_with():
                    self.ring()
                due = self._due()
            except BlockingIOError:
                return  # what woke this thread was meant for an earlier wire
            except BaseException as error:
                self._fail(error)
        self.port.send(due, last=number)  # it runs where this thread runs
        if due and self.lock.acquire(blocking=False):
            try:
                self.around.spare()
            except BaseException as error:
                self._fail(error)
            finally:
                self.lock.release()
        self.cpu.received(number)

    def _due(self) -> list[int]:
        """Who is to be sent something as soon as the lock is left; it is on record by then."""
        due = self.port.take()
        if due:
            self.around.record()
        return due

    def _fail(self, error: BaseException) -> None:
        """Let the one who waits raise this; nobody is heard from here on."""
        self.failure = error
        self.receivers.close()
        self.ring()

    def answer(self) -> None:
        """Send at once what is to be sent: what comes next takes its time."""
        self.port.send(self._due())

    def ring(self) -> None:
        """Let `wait` come back."""
        os.eventfd_write(self.bell, 1)

    def wait(self, timeout: float) -> None:
        """Leave the lock to others until there is something else than a message, or it is time.

        It is time after `timeout`, and when the patience with a worker may have run out.
        """
        # Whoever is expected from now on may be silent for that long.
        limits = (self.server.protocol.shortest, self.server.seconds_left(), timeout)
        self._pause(min(limit for limit in limits if limit is not None))
        self.server.look()

    def _pause(self, timeout: float) -> None:
        due = self._due()
        self.lock.release()
        try:
            self.port.send(due)
            found = self.selector.select(timeout)
        finally:
            self.lock.acquire()
        if self.failure is not None:
            raise self.failure
        for key, _ in found:
            key.data()

    def dismiss(self, until: float) -> None:
        """Tell everyone that it is over, and hear their last words until `until`."""
        self.server.dismiss()
        self.answer()
        while self.port.wires and time.monotonic() < until:
            self._pause(max(0.0, until - time.monotonic()))
