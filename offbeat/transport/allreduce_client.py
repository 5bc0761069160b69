"""A worker's side where workers add up among themselves, and apply, beside a server."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from offbeat.data.lease import Lease
from offbeat.log.records import Part
from offbeat.model.gradient_stream import Stream
from offbeat.model.table import Flat
from offbeat.protocol.messages import (
    Applied,
    ApplyMean,
    Go,
    GroupFailed,
    HasMean,
    Join,
    Ping,
    Pong,
    Rejoin,
    Seen,
    Show,
    Shown,
    StartRound,
    ToWorker,
)
from offbeat.store.digest import ParameterDigest
from offbeat.store.parameters import Parameters
from offbeat.store.slot import Slot
from offbeat.transport.link import GivenUp, Link, RunOver
from offbeat.transport.pieces import Chunk, pieces_of, scaled
from offbeat.transport.tcp_group import TcpGroup
from offbeat.transport.wakeup import Wakeup
from offbeat.worker.client import M, StoreClient, ignore
from offbeat.worker.contribution import Contribution


class GroupLink(Link, Protocol):
    """A link to a server that keeps no parameters."""

    slot: Slot
    local: Flat  # what is to be averaged of the local optimiser

    @property
    def host(self) -> str:
        """The address of this machine where other workers may reach this one."""

    def receive_or(self, wakeup: Wakeup) -> ToWorker | None:
        """The next message; None when there is none yet, or it was woken."""


class Members(Protocol):
    """The other workers, and how they reach this one."""

    def place(self, host: str) -> str:
        """Where they do, at this address of the machine."""

    def group(self, start: StartRound, me: int) -> TcpGroup:
        """What adds up a round, for this worker."""

    def close(self) -> None:
        """Nobody reaches this worker any more."""


class AllreduceClient(StoreClient):
    """A worker's side where contributions meet without a store.

    The worker says when its contribution is made, when it has the mean of all, and when it has
    applied that. It applies only when the server has heard that everybody has the mean: until
    then its own contribution is intact, and the round can be added up again without one who died.
    """

    link: GroupLink

    def __init__(
        self,
        link: GroupLink,
        number: Callable[[], int],
        make: Callable[[Sequence[Flat]], Parameters],
        members: Members,
        announce: Callable[[Lease], None] = ignore,
    ):
        """`make` makes parameters that live in the slot.

        The link puts local state beside the slot, which has what was averaged last, for others to
        read while the next is under way.
        """
        super().__init__(link, announce=announce)
        self.slot, self.who, self.make, self.others = link.slot, number, make, members
        self.parameters: Parameters | None = None
        self.group: TcpGroup | None = None
        self.round: StartRound | None = None
        self.made: list[Flat] | None = None  # what was put
        self.payload: list[Flat] | None = None  # of the round, once it is whole
        self.mean: list[Flat] = []
        self.averaged = link.local
        self.pieces: list[Chunk] = []
        self.waits: list[set[str]] = []  # names that each piece still waits for
        self.given = 0  # pieces of this attempt
        self.summed = False  # whether all of them have been added up
        self.sent = 0  # bytes to other workers, in groups that are no more
        self.wakeup = Wakeup()
        self.from_group: deque[HasMean | GroupFailed] = deque()  # what the group's thread has said

    @property
    def number(self) -> int:
        """Which worker this is; it may have become another when it had to come again."""
        return self.who()

    def listen(self, stream: Stream | None) -> None:
        """Give gradients to the others while backward still makes the rest."""
        if stream is not None:
            stream.subscribe(self._came)

    def join(self) -> int:
        self.round = self.payload = None
        incarnation = super().join()
        self.parameters = self.make(self.slot.incoming[0])  # not before: others may have read it
        return incarnation

    def _hello(self) -> Join:
        return Join(self.others.place(self.link.host))

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        super().put(contribution, then_pull)
        self.made = contribution.payload

    def push(self) -> None:
        super().push()
        self.payload = self.made
        self._give_rest()
        self._apply(self._awaited())

    def bye(self, figures: dict[str, float]) -> None:
        self._leave()
        self.others.close()
        super().bye(figures)

    def close(self) -> None:
        self._leave()
        self.others.close()
        super().close()

    def _leave(self) -> None:
        if self.group is not None:
            self.group.end()
            self.sent += self.group.sent
        self.group = None

    # ------------------------------------------------------------ one round

    def _begin(self, go: Go) -> None:
        assert self.parameters is not None
        self.payload, self.round = None, None
        if go.fresh:
            self.slot.rule_state.give(self.parameters.updaters)
        self.parameters.advance(go.version, go.epoch, go.progress)
        if go.start is not None:
            self._convene(go.start)

    def _convene(self, start: StartRound) -> None:
        """An attempt at a round; if the contribution is whole already, all of it is given anew."""
        members = [number for number, _ in start.members]
        if self.group is None or self.group.number != start.group:
            self._leave()
        self.round, self.given, self.summed = start, 0, False
        if self.group is None and len(members) > 1:
            self.group = self.others.group(start, self.number)
            self.group.start(self._ring)
            # Memory of its own: without others the mean is what was made.
            self.mean = [Flat(flat.table) for flat in self.slot.outgoing[0]]
            self.averaged = Flat(self.slot.updater.table)
            self.pieces = pieces_of(self.mean)
        self.waits = [set(piece.names) for piece in self.pieces]
        if self.payload is not None:
            self._give_rest()

    def _came(self, name: str) -> None:
        """A gradient is made: pieces go out in their order, each when it is whole."""
        if self.round is None or self.group is None:
            return
        for waits in self.waits:
            waits.discard(name)
        while self.given < len(self.pieces) and not self.waits[self.given]:
            self._give(self.slot.outgoing[0])

    def _give(self, payload: Sequence[Flat]) -> None:
        assert self.group is not None
        piece = self.pieces[self.given]
        self.given += 1
        self.group.add(piece.of(payload), piece.of(self.mean), self._shares())

    def _give_rest(self) -> None:
        assert self.round is not None
        assert self.payload is not None
        attempt = self.round.attempt
        if self.group is None:
            self.mean, self.averaged = self.payload, self.link.local
            self._send(HasMean(attempt))
            return
        while self.given < len(self.pieces):
            self._give(self.payload)
        for mine, mean in zip(self.link.local.spans, self.averaged.spans, strict=True):
            self.group.add(mine, mean, self._shares(), scaled)
        self.group.then(lambda: self._ring(HasMean(attempt)))

    def _shares(self) -> list[float]:
        assert self.round is not None
        total = sum(samples for _, samples in self.round.members)
        return [samples / total if total else 0.0 for _, samples in self.round.members]

    def _apply(self, order: ApplyMean) -> None:
        assert self.parameters is not None
        if order.live:
            one = Part(self.number, 0, 0, 0, [], 1, settings=order.settings)
            self.parameters.update([Contribution(one, self.mean, None, frozenset(order.absent))])
            self.slot.rule_state.keep(self.parameters.updaters)
            self.slot.updater.copy_(self.averaged)
            views = list(self.slot.updater.views.values())
            for place, factor in order.lifts.items():
                views[place].mul_(factor)
        self._send(Applied(ParameterDigest(self.slot.incoming[0])() if order.hashed else ""))

    # ------------------------------------------------------------ messages

    def _ring(self, message: HasMean | GroupFailed) -> None:
        """Wake this worker from its group's thread."""
        self.from_group.append(message)
        self.wakeup.wake()

    def _awaited(self) -> ApplyMean:
        """Wait for the server and for the group, whichever comes first."""
        while True:
            self.wakeup.clear()  # before looking at anything that it is woken for
            while self.from_group:
                self._heard(self.from_group.popleft())
            message = self.link.receive_or(self.wakeup)
            if message is None:
                continue
            self._unless_over(message)
            if isinstance(message, Rejoin):
                raise GivenUp
            if isinstance(message, ApplyMean):
                return message
            assert self._noticed(message), message

    def _heard(self, message: HasMean | GroupFailed) -> None:
        """Pass on what the group has said, unless it is over with that one."""
        assert self.round is not None
        if isinstance(message, HasMean) and message.attempt == self.round.attempt:
            self.summed = True
            self._send(message)
        if isinstance(message, GroupFailed) and message.group == self.round.group:
            self._send(message)

    def _noticed(self, message: ToWorker) -> bool:
        """What the server may say at any time."""
        if isinstance(message, StartRound):
            self._convene(message)
        elif isinstance(message, Ping):
            self._send(Pong())
        return isinstance(message, StartRound | Ping)

    def _receive(self) -> ToWorker:
        while self._noticed(message := super()._receive()):
            pass
        return message

    def _await(self, kind: type[M]) -> M:
        message = super()._await(kind)
        if isinstance(message, Go):
            self._begin(message)
        return message


class DistantAllreduceClient(AllreduceClient):
    """The same with a server on another host, which has to be shown what this worker holds."""

    version = 0  # that lies in the slot
    shown = seen = 0  # times

    def leave(self) -> None:
        """Nobody else may hold this version by the time that somebody looks for it."""
        with suppress(RunOver):
            self._show(self.version)
            while self.seen < self.shown:
                message = self.link.receive()
                self._unless_over(message)
                if isinstance(message, Rejoin):
                    break
                self.seen += isinstance(message, Seen)
        super().leave()

    def _begin(self, go: Go) -> None:
        super()._begin(go)
        self.version = go.version

    def _apply(self, order: ApplyMean) -> None:
        super()._apply(order)
        self.version += 1

    def _noticed(self, message: ToWorker) -> bool:
        if isinstance(message, Show):
            self._show(message.version)
        self.seen += isinstance(message, Seen)
        return isinstance(message, Show | Seen) or super()._noticed(message)

    def _show(self, version: int) -> None:
        self.shown += 1
        self._send(Shown(version))

    def bye(self, figures: dict[str, float]) -> None:
        self._leave()
        # What goes from one worker to another is counted where it is sent.
        super().bye(figures | {"wire": figures.get("wire", 0.0) + self.sent})
