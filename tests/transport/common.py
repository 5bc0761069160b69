"""What the tests of memory links share: slots without a run, and both ends of a wire."""

import select
import socket
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.data.lease import Lease
from offbeat.engine.local.shared_memory import MemoryPlan, SharedMemory
from offbeat.log.records import Part
from offbeat.model.table import Entry, Table
from offbeat.protocol.messages import Go, Message, encode, to_store, to_worker
from offbeat.store.slot import Slot
from offbeat.transport.memory_link import Packets
from offbeat.worker.contribution import Contribution

A, B, C = Lease(0, 0, 4), Lease(0, 4, 8), Lease(0, 8, 12)
LONG = 20.0


def shared_memory(workers: int = 1, places: int = 1) -> SharedMemory:
    """One parameter, one averaged buffer, and one tensor of averaged local state."""
    parameters = Table.of([Entry("w", (4,), torch.float32, "trained")])
    statistics = Table.of([Entry("mean", (2,), torch.float32, "averaged")])
    updater = Table.of([Entry("momentum", (4,), torch.float32, "averaged")])
    return SharedMemory(MemoryPlan([parameters], statistics, updater, workers, places, places))


def wire_pair() -> tuple[socket.socket, socket.socket]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(LONG)
    return mine, theirs


class WireEnd:
    """One end of a wire, which the test holds."""

    def __init__(self, wire: socket.socket, of_server: bool):
        self.wire, self.decode = wire, to_store if of_server else to_worker

    def say(self, *messages: Message) -> None:
        for message in messages:
            self.wire.send(encode(message))

    def heard(self) -> Any:
        """The next message; None at the end."""
        packet = self.wire.recv(Packets.LARGEST)
        return self.decode(packet) if packet else None

    @property
    def quiet(self) -> bool:
        return not select.select([self.wire], [], [], 0)[0]


def go(*leases: Lease, version: int = 3, **more: Any) -> Go:
    return Go(version, 2, 1, list(leases), 0.5, **more)


def contribution(
    slot: Slot, place: int = 0, leases: Sequence[Lease] = (A,), **more: Any
) -> Contribution:
    return Contribution(Part(0, 1, 0, 3, list(leases), 4), slot.outgoing[place], **more)
