"""The seam between workers and server: small messages, and tensors that travel beside them."""

from typing import Any, NamedTuple, Protocol

from offbeat.protocol.messages import Go, Message, Push, ToStore, ToWorker
from offbeat.worker.contribution import Contribution, Snapshot


class GivenUp(Exception):
    """The store has given this incarnation up: join again."""


class RunOver(Exception):
    """There is nothing more to do for this process."""


class RunStopped(RunOver):
    """The run was stopped before its end."""


class StoreGone(RunOver):
    """The store is gone; whoever started this process knows what comes next."""


class Received(NamedTuple):
    """What a worker has said, and what it has sent along."""

    message: ToStore
    contribution: Contribution | None = None


class Link(Protocol):
    """A worker's end. A link that has ended raises StoreGone."""

    came: float  # when the last message was there (perf_counter)

    def prepare(self, push: Push, contribution: Contribution) -> None:
        """Make a contribution ready, so that sending it is a signal and nothing more."""

    def push(self) -> None:
        """Send what was prepared; its buffers are free again when an answer has come."""

    def send(self, message: ToStore) -> None:
        """Send a message without tensors."""

    def receive(self) -> ToWorker:
        """Wait for the next message."""

    def snapshot(self, go: Go) -> Snapshot:
        """The parameters that have come with `go`."""

    def close(self) -> None:
        """End the link; the port notices."""


class Port(Protocol):
    """The server's end of all its workers' links.

    What is put for a worker leaves when it is sent, in the order in which it was put. Between the
    two nothing touches the store, so tensors are read when they are put.
    """

    def receive(self, worker: int) -> Received | None:
        """The next message of a worker; None if its end is gone.

        Raises BlockingIOError if there is none.
        """

    def spoken(self, worker: int) -> bool:
        """Whether there is something to receive from a worker, or its end is gone."""

    def put(self, worker: int, message: Message, snapshot: Any) -> None:
        """Read what travels beside a message, and keep both until they are sent."""

    def take(self) -> list[int]:
        """Workers for whom something has been put since the last call."""

    def send(self, workers: list[int], last: int | None = None) -> None:
        """Send them what has been put, `last` after the others."""

    def disconnect(self, worker: int) -> None:
        """Hear no more of a worker, and tell it nothing more."""


class ConnectedPort(Port, Protocol):
    """A port to which workers come by ways of their own: a socket, or a link of several."""

    def connect(self, worker: int, way: Any) -> None:
        """A way to a worker; a new one takes the place of one that is dead."""

    def way(self, worker: int) -> Any:
        """The way to a worker; None if there is none."""

    @property
    def connected(self) -> bool:
        """Whether there is a way to anybody."""
