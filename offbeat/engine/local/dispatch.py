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
from typing import Any, Protocol

from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.server import Server
from offbeat.transport.link import ConnectedPort

LOOKS = 4  # in the time of patience, at one who may still be on the way

# Of a worker's number, and the way it came: a socket, or a link of several.
Receive = Callable[[int, Any], None]


class Listening(Protocol):
    """Threads that listen to the workers; all but listening is done with the store locked."""

    def connect(self, number: int, way: Any) -> None:
        """Listen to a worker; a new way takes the place of one that is dead."""

    def disconnect(self, number: int) -> None:
        """Listen to a worker no more."""

    def connected(self, number: int, way: Any) -> bool:
        """Whether this is still the worker's."""

    def close(self) -> None:
        """Listen to nobody any more."""


class Receiver:
    """A thread that waits for what one worker says.

    The system wakes a thread where it last ran. One that listens to one worker alone last ran where
    that worker now waits, on a core that has nothing else to do; one that listens to all would push
    a worker aside there, while the core of another stands idle.
    """

    def __init__(self, receivers: "Receivers", number: int):
        self.receivers, self.number = receivers, number
        self.epoll = select.epoll()
        self.epoll.register(receivers.wakeup, select.EPOLLIN)
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
    """A receiver for each worker of this machine."""

    def __init__(self, receive: Receive):
        self.receive = receive
        self.threads: dict[int, Receiver] = {}
        self.open = True
        self.wakeup = os.eventfd(0)  # written to once, when it is over

    def connect(self, number: int, wire: socket.socket) -> None:
        if number not in self.threads:
            self.threads[number] = Receiver(self, number)
        self.disconnect(number)
        self.threads[number].connect(wire)

    def disconnect(self, number: int) -> None:
        self.threads[number].disconnect()

    def connected(self, number: int, wire: socket.socket) -> bool:
        return self.open and self.threads[number].wire is wire

    def close(self) -> None:
        self.open = False
        os.eventfd_write(self.wakeup, 1)


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

    def __init__(
        self,
        server: Server,
        port: ConnectedPort,
        cpu: CpuPolicy,
        around: Around,
        listen: "Listen",
    ):
        """`listen` makes the threads, which tell this dispatcher when something has come."""
        self.server, self.port, self.cpu, self.around = server, port, cpu, around
        self.selector = selectors.DefaultSelector()  # of callables
        self.lock = threading.Lock()
        self.failure: BaseException | None = None  # what went wrong in one of the threads
        self.wakeup = os.eventfd(0)
        self.selector.register(
            self.wakeup, selectors.EVENT_READ, partial(os.eventfd_read, self.wakeup)
        )
        self.receivers = listen(self)

    def connect(self, number: int, way: Any) -> None:
        """Listen to a worker; a new way takes the place of one that is dead."""
        self.port.connect(number, way)
        self.server.connect(number)
        self.receivers.connect(number, way)

    def hear(self, number: int, way: Any) -> None:
        """As a receiver: something has come this way, to be dealt with by one who holds the lock.

        It stays there until then, so that nobody takes a worker that has spoken for a silent one.
        """
        due: list[int] = []
        with self.lock:
            if not self.receivers.connected(number, way):
                return
            try:
                if self.port.way(number) is not way:
                    self.receivers.disconnect(number)
                    return
                self.server.hear(number)
                if self.around.dealt_with():
                    self.wake()
                due = self._due()
            except BlockingIOError:
                return  # what woke this thread was meant for an earlier way
            except BaseException as error:
                self.fail(error)
        self.port.send(due, last=number)  # it runs where this thread runs
        if due and self.lock.acquire(blocking=False):
            try:
                self.around.spare()
            except BaseException as error:
                self.fail(error)
            finally:
                self.lock.release()
        self.cpu.received(number)

    def gone(self, number: int) -> None:
        """Nobody is to be waited for at the other end of this worker's way; holds the lock."""
        if self.port.way(number) is not None:
            self.server.gone(number)

    def interrupted(self, number: int, way: Any) -> None:
        """As a receiver: the way has broken, and may be made again."""
        with self.lock:
            if self.receivers.connected(number, way):
                self.server.interrupted(number)

    def restored(self, number: int, way: Any) -> None:
        """As a receiver: the way has been made again, and goes on where it was."""
        with self.lock:
            if not self.receivers.connected(number, way):
                return
            self.server.restored(number)
            due = self._due()
        self.port.send(due, last=number)

    def _due(self) -> list[int]:
        """Who is to be sent something as soon as the lock is left; it is on record by then."""
        due = self.port.take()
        if due:
            self.around.record()
        return due

    def fail(self, error: BaseException) -> None:
        """Let the one who waits raise this; nobody is heard from here on."""
        self.failure = error
        self.receivers.close()
        self.wake()

    def answer(self) -> None:
        """Send at once what is to be sent: what comes next takes its time."""
        self.port.send(self._due())

    def wake(self) -> None:
        """Let `wait` come back."""
        os.eventfd_write(self.wakeup, 1)

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

    def dismiss(self, patience: float) -> None:
        """Tell everyone that it is over, and hear their last words; `patience` with the silent."""
        self.server.dismiss()
        self.answer()
        until = time.monotonic() + patience
        while self.port.connected:
            now = time.monotonic()
            if now >= until:
                ways = range(self.server.protocol.workers)
                if not any(self.port.spoken(worker) for worker in ways):
                    return
                until = now + patience / LOOKS
            self._pause(until - now)


# Makes the threads that tell a dispatcher what has come.
Listen = Callable[[Dispatcher], Listening]


def local_receivers(dispatcher: Dispatcher) -> Receivers:
    """Threads that listen to workers on this machine."""
    return Receivers(dispatcher.hear)
