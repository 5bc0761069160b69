"""A server at work: what comes in through its port goes to the protocol, and answers go back."""

from collections.abc import Callable

from offbeat.protocol.server import ServerProtocol
from offbeat.transport.link import Port


class Server:
    """Deals with one message at a time; `clock` says when."""

    def __init__(self, protocol: ServerProtocol, port: Port, clock: Callable[[], float]):
        self.protocol, self.port, self.clock = protocol, port, clock

    def connect(self, worker: int) -> None:
        """The port has a way to a worker, for the first time or again."""
        self.protocol.disconnect(worker)
        self.protocol.connect(worker, self.clock())
        self._deliver()

    def hear(self, worker: int) -> None:
        """Take the next message of a worker, and deal with it."""
        received = self.port.receive(worker)
        if received is None:
            self.protocol.gone(worker, self.clock())
        else:
            self.protocol.receive(worker, *received, self.clock())
        self._go_on()
        if worker not in self.protocol.connected:
            self.port.disconnect(worker)

    def interrupted(self, worker: int) -> None:
        """The way to a worker has broken; what it is told waits for another."""
        self.protocol.interrupted(worker, self.clock())

    def restored(self, worker: int) -> None:
        """There is a way to a worker again, and nothing that was said is lost."""
        self.protocol.restored(worker, self.clock())
        self._deliver()

    def gone(self, worker: int) -> None:
        """Somebody says that its process has ended; if that is wrong, it joins again."""
        self.protocol.gone(worker, self.clock())
        self._go_on()
        self.port.disconnect(worker)

    def look(self) -> None:
        """Go on without those whose time has run out."""
        self.protocol.look(self.clock(), self.port.spoken)
        self._go_on()

    def seconds_left(self) -> float | None:
        """Until somebody's time runs out."""
        now = self.clock()
        at = self.protocol.next_deadline(now, self.port.spoken)
        return None if at is None else max(0.0, at - now)

    def settle(self) -> bool:
        """Whether the store can be tested and saved; if not, it will be able to."""
        found = self.protocol.settle()
        self._deliver()
        return found

    def dismiss(self) -> None:
        """Tell everyone that it is over."""
        self.protocol.dismiss()
        self._deliver()

    def _go_on(self) -> None:
        now = self.clock()
        while self.protocol.proceed(now):
            continue
        self._deliver()

    def _deliver(self) -> None:
        for worker, message, snapshot in self.protocol.take():
            self.port.put(worker, message, snapshot)
