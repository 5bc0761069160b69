"""What a worker's loop asks of the store: questions and answers over a link, whatever that is."""

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from offbeat.data.lease import Lease
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    EndRun,
    Go,
    Goodbye,
    Join,
    Leased,
    Leave,
    Message,
    Pull,
    Push,
    Rejoin,
    Rest,
    Stop,
    ToStore,
    ToWorker,
    Wake,
    Welcome,
)
from offbeat.transport.link import GivenUp, Link, RunOver, RunStopped, StoreGone
from offbeat.worker.contribution import Contribution, Snapshot

M = TypeVar("M", bound=Message)
WITH_LEASES = (Accepted, Go, Leased)


def ignore(lease: Lease) -> None:
    """For one who does not want to know of leases before they are computed."""


class StoreClient:
    """A worker's side of the protocol; every call may raise GivenUp or RunOver.

    With `centre` a pull does not wait for others (elastic exchange). With `ahead` one more step is
    computed while a contribution is under way, with `pipelined` several are. `announce` is told of
    every lease as soon as it comes.
    """

    def __init__(
        self,
        link: Link,
        centre: bool = False,
        ahead: bool = False,
        pipelined: bool = False,
        announce: Callable[[Lease], None] = ignore,
    ):
        self.link, self.centre, self.ahead, self.announce = link, centre, ahead, announce
        self.leases: deque[Lease] = deque()
        self.promised = False  # an answer to a pull is due without asking for it
        self.begun: list[Lease] = []  # since the last pull, where a pipeline computes
        self.pipelined = pipelined
        self.then_pull = True
        self.waited = 0.0  # seconds the last pull was held up by other workers
        self.before = 0.0  # and by the beginning of the run, which is nobody's time

    @property
    def came(self) -> float:
        """When the last answer was there (perf_counter)."""
        return self.link.came

    def join(self) -> int:
        """Enter, or enter again; returns the incarnation."""
        self.leases.clear()
        self.promised = False
        self._send(self._hello())
        while True:
            # What was on its way to an earlier incarnation is not for this one.
            message = self._receive()
            if isinstance(message, Welcome):
                return message.incarnation

    def _hello(self) -> Join:
        return Join()

    def pull(self, computed: list[Lease]) -> Snapshot:
        """Wait until the discipline lets this worker go on, and take the parameters.

        `computed` are steps done since the last push.
        """
        if not self.promised:
            self._send(Pull(computed, not self.centre))
        self.promised = False
        go = self._await(Go)
        self.waited, self.before = go.waited, go.before
        return self.link.snapshot(go)

    def lease(self) -> Lease | None:
        """The next samples, or None when there are none now."""
        if not self.leases and not self.promised:
            self._send(AskLeases())
            self._await(Leased)
        return self.leases.popleft() if self.leases else None

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        """Make a contribution ready, so that a push is a signal and nothing more.

        With `then_pull` a pull follows, so that one answer can serve for both.
        """
        ahead = self.begun
        if not self.pipelined:
            ahead = [self.leases[0]] if self.ahead and self.leases else []
        push = Push(contribution.part, then_pull, ahead, sorted(contribution.absent))
        self.link.prepare(push, contribution)
        self.then_pull = then_pull

    def push(self) -> None:
        """Hand over what was put; its buffers are free when the next call has returned."""
        try:
            self.link.push()
        except StoreGone:
            self._hear_the_end()
        self.promised = self.then_pull
        if not self.then_pull:
            self._await(Accepted)

    def rest(self, wait: float, communication: float) -> None:
        """Wait until leases have come back; the time since the last contribution is told."""
        self._send(Rest(wait, communication))
        self._await(Wake)

    def leave(self) -> None:
        """Tell that the others are to go on without this worker; nobody answers."""
        with suppress(StoreGone):
            self.link.send(Leave())

    def end(self) -> NoReturn:
        """End the run for everybody; raises RunOver when it is."""
        self._send(EndRun())
        while True:
            self._receive()

    def bye(self, figures: dict[str, float]) -> None:
        """Tell what this worker came to; nobody answers."""
        with suppress(RunOver):  # nobody is there to hear it
            self.link.send(Goodbye(figures))

    def close(self) -> None:
        """End the link, and whatever else there is to others."""
        self.link.close()

    def _send(self, message: ToStore) -> None:
        try:
            self.link.send(message)
        except StoreGone:
            self._hear_the_end()

    def _hear_the_end(self) -> NoReturn:
        """One that slept through the end finds nobody there, but what was said to it last."""
        while True:
            self._receive()

    def _receive(self) -> ToWorker:
        message = self.link.receive()
        self._unless_over(message)
        return message

    def _unless_over(self, message: ToWorker) -> None:
        if isinstance(message, Stop):
            raise RunOver if message.finished else RunStopped

    def _await(self, kind: type[M]) -> M:
        """The next message, which must be of `kind`; leases that come with it are kept."""
        message = self._receive()
        if isinstance(message, Rejoin):
            raise GivenUp
        assert isinstance(message, kind), message
        if isinstance(message, WITH_LEASES):
            for lease in message.leases:
                self.leases.append(lease)
                self.announce(lease)
        return message
