"""The link on one machine: tensors lie in shared memory, a small packet is the signal."""

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

from offbeat.contribution import Contribution, Snapshot
from offbeat.lease import Lease
from offbeat.link.base import Gone, Over, Refused, Stopped
from offbeat.link.memory import Slot, without
from offbeat.link.messages import (
    Again,
    Ask,
    Bye,
    End,
    Go,
    Join,
    Leased,
    Leave,
    Message,
    Packets,
    Pull,
    Push,
    Rest,
    Stop,
    Took,
    ToWorker,
    Wake,
    Welcome,
    encode,
    to_worker,
)

M = TypeVar("M", bound=Message)
WITH_LEASES = (Took, Go, Leased)


class SharedLink:
    """A worker's end: payloads are already in its slot, so a push is a signal and not a copy."""

    def __init__(self, wire: socket.socket, slot: Slot, centre: bool = False):
        self.wire, self.slot, self.centre = wire, slot, centre
        self.local = slot.updater  # where the local optimiser's state goes
        self.packets = Packets()
        self.leases: deque[Lease] = deque()
        self.announce: Callable[[Lease], None] = lambda lease: None  # told of every lease at once
        self.promised = False  # an answer to a pull is due without asking for it
        self.begun: list[Lease] | None = None  # since the last pull, where a pipeline computes
        self.ready = b""  # the signal of what was put
        self.then_pull = True
        self.attention = 0.0  # seconds, see Packets.receive
        self.waited = self.came = 0.0

    def join(self) -> int:
        self.leases.clear()
        self.promised = False
        self._say(Join())
        while True:
            # What was on its way to an earlier incarnation is not for this one.
            packet = self._receive()
            if isinstance(packet, Welcome):
                return packet.incarnation

    def pull(self, computed: list[Lease]) -> Snapshot:
        if not self.promised:
            self._say(Pull(computed, not self.centre))
        self.promised = False
        go = self._await(Go)
        self.slot.settle()
        self.waited = go.waited
        updater = without(self.slot.updater.views, go.lacking) if go.updater else {}
        return Snapshot(go.version, go.steps, go.epoch, self.slot.incoming[go.place], updater)

    def lease(self) -> Lease | None:
        if not self.leases and not self.promised:
            self._say(Ask())
            self._await(Leased)
        return self.leases.popleft() if self.leases else None

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        slot, place = self.slot, -1
        if contribution.payload is not None:
            place = 0  # by identity: comparing would look into the tensors
            while slot.outgoing[place][0] is not contribution.payload[0]:
                place += 1
        if contribution.packed is not None:
            # On one machine nothing is gained by packing; the store sees what packing left.
            for flat in slot.outgoing[place]:
                for name, view in flat.views.items():
                    packed = contribution.packed[name]
                    view.copy_(packed.codec.decode(packed))
        for name, tensor in contribution.statistics.items():
            slot.statistics.views[name].copy_(tensor)
        lacking: list[int] = []  # places, as names may not fit into a packet
        for at, (name, view) in enumerate(self.local.views.items()):
            mine = contribution.updater.get(name)
            if mine is None:
                lacking.append(at)
                view.zero_()  # where workers add up among themselves, nothing is to be added
            elif mine is not view:
                view.copy_(mine)
        ahead = self.begun
        if ahead is None:
            ahead = [self.leases[0]] if self.leases and len(slot.outgoing) > 1 else []
        absent = sorted(contribution.absent)
        self.ready = encode(Push(contribution.part, absent, then_pull, place, ahead, lacking))
        self.then_pull = then_pull

    def push(self) -> None:
        self._send(self.ready)
        self.promised = self.then_pull
        if not self.then_pull:
            self._await(Took)

    def rest(self, wait: float, communication: float) -> None:
        self._say(Rest(wait, communication))
        self._await(Wake)

    def leave(self) -> None:
        """Tell that the others are to go on without this worker; nobody answers."""
        with suppress(OSError):
            self.wire.send(encode(Leave()))

    def end(self) -> NoReturn:
        """End the run for everybody; raises Over when it is."""
        self._say(End())
        while True:
            self._receive()

    def bye(self, figures: dict[str, float]) -> None:
        """Tell what this worker came to; nobody answers."""
        try:
            self.wire.send(encode(Bye(figures)))
        except OSError:
            return  # nobody is there to hear it

    # ------------------------------------------------------------ packets

    def _say(self, message: Message) -> None:
        self._send(encode(message))

    def _send(self, packet: bytes) -> None:
        try:
            self.wire.send(packet)
        except OSError as error:
            # One that slept through the end finds nobody there, but what was said to it last.
            with suppress(OSError):
                while True:
                    self._receive()
            raise Gone from error

    def _receive(self) -> ToWorker:
        packet = self.packets.receive(self.wire, self.attention)
        self.came = time.perf_counter()
        if not packet:
            raise Gone
        message: ToWorker = to_worker(packet)
        if isinstance(message, Stop):
            raise Over if message.finished else Stopped
        return message

    def _await(self, kind: type[M]) -> M:
        """The next packet, which must be of `kind`; leases that come with it are kept."""
        message = self._receive()
        if isinstance(message, Again):
            raise Refused
        assert isinstance(message, kind), message
        if isinstance(message, WITH_LEASES):
            for lease in message.leases:
                self.leases.append(lease)
                self.announce(lease)
        return message
