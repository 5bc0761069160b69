"""Link and port on one machine: tensors lie in shared memory, a small packet is the signal."""

import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from offbeat.model.table import Flat
from offbeat.protocol.messages import (
    Go,
    Message,
    Push,
    ToStore,
    ToWorker,
    Welcome,
    encode,
    to_store,
    to_worker,
)
from offbeat.store.parameters import Parameters
from offbeat.store.slot import Slot
from offbeat.transport.link import Received, StoreGone
from offbeat.transport.slots import contribution_in, fill, lay_out, snapshot_in
from offbeat.transport.wakeup import Wakeup
from offbeat.worker.contribution import Contribution, Snapshot

# ---------------------------------------------------------------- packets


class Waiting:
    """How a worker waits, and what it does before a step: nothing special.

    An engine that knows the machine may do better; see `engine/local/cpu.py`.
    """

    attention = 0.0  # seconds for which the core is kept awake while an answer is waited for

    def step_begins(self) -> None:
        """The worker is about to compute."""


class Packets:
    """Receives one packet at a time into a buffer that is made once: they come by the thousand."""

    LARGEST = 1 << 18  # bytes

    def __init__(self) -> None:
        self.view = memoryview(bytearray(self.LARGEST))

    def receive(self, wire: socket.socket, attention: float = 0.0) -> memoryview:
        """The next packet, to be decoded before the next one; empty if the other end is gone.

        For `attention` seconds this core is kept from falling asleep: one that sleeps takes longer
        to wake than most answers take to come. Whoever else is to run on it goes first.
        """
        try:
            until = time.perf_counter() + attention if attention else 0.0
            while until and time.perf_counter() < until:
                os.sched_yield()
                with suppress(BlockingIOError):
                    return self.receive_now(wire)
            return self.view[: wire.recv_into(self.view)]
        except ConnectionError:
            return self.view[:0]

    def receive_now(self, wire: socket.socket) -> memoryview:
        """The same without waiting; raises BlockingIOError if there is none."""
        try:
            return self.view[: wire.recv_into(self.view, 0, socket.MSG_DONTWAIT)]
        except ConnectionError:
            return self.view[:0]


class Outbox:
    """Packets for each worker, put here while the store is locked and sent when it is not.

    Whoever is sent something wakes, and may push the sender off its core. Nobody should have to
    wait for one who was pushed aside with the lock in its hands.
    """

    def __init__(self, workers: int):
        self.unsent: list[deque[tuple[socket.socket, bytes]]] = [deque() for _ in range(workers)]
        self.sending = [threading.Lock() for _ in range(workers)]
        self.due: list[int] = []  # for whom something has been put here

    def put(self, number: int, wire: socket.socket, packet: bytes) -> None:
        """With the store locked."""
        self.unsent[number].append((wire, packet))
        self.due.append(number)

    def take(self) -> list[int]:
        """With the store locked, before it is unlocked: whom to send something then."""
        due, self.due = self.due, []
        return due

    def send(self, due: list[int], last: int | None = None) -> None:
        """Send what they are due, `last` after the others: it runs where this thread runs."""
        if last in due and len(due) > 1:
            due = [number for number in due if number != last] + [last]
        for number in due:
            unsent = self.unsent[number]
            with self.sending[number]:  # so that no second packet overtakes the first
                while unsent:
                    wire, packet = unsent.popleft()
                    try:
                        wire.send(packet)
                    except OSError:
                        continue  # its death shows when its wire is read


# ---------------------------------------------------------------- the two ends


class MemoryLink:
    """A worker's end: payloads are already in its slot, so a push is a signal and not a copy.

    `local` is where the local optimiser's state goes; the slot, unless others still read that.
    """

    host = "127.0.0.1"  # where other processes of this machine reach one another

    def __init__(
        self,
        wire: socket.socket,
        slot: Slot,
        waiting: Waiting | None = None,
        local: Flat | None = None,
    ):
        self.wire, self.slot = wire, slot
        self.waiting = waiting or Waiting()
        self.local = slot.updater if local is None else local
        self.packets = Packets()
        self.prepared = b""
        self.came = 0.0

    def prepare(self, push: Push, contribution: Contribution) -> None:
        fill(self.slot, push, contribution, self.local)
        if contribution.packed is not None:
            # On one machine nothing is gained by packing; the store sees what packing left.
            for flat in self.slot.outgoing[push.place]:
                for name, view in flat.views.items():
                    packed = contribution.packed[name]
                    view.copy_(packed.codec.decode(packed))
        self.prepared = encode(push)

    def push(self) -> None:
        self._send(self.prepared)

    def send(self, message: ToStore) -> None:
        self._send(encode(message))

    def _send(self, packet: bytes) -> None:
        try:
            self.wire.send(packet)
        except OSError as error:
            raise StoreGone from error

    def receive(self) -> ToWorker:
        packet = self.packets.receive(self.wire, self.waiting.attention)
        self.came = time.perf_counter()
        if not packet:
            raise StoreGone
        message: ToWorker = to_worker(packet)
        if isinstance(message, Go):
            self.waiting.step_begins()
        return message

    def receive_or(self, wakeup: Wakeup) -> ToWorker | None:
        """The next message, or None when it was woken."""
        look = select.poll()
        for one in (self.wire, wakeup):
            look.register(one, select.POLLIN)
        ready = {handle for handle, _ in look.poll()}
        return self.receive() if self.wire.fileno() in ready else None

    def snapshot(self, go: Go) -> Snapshot:
        return snapshot_in(self.slot, go)

    def close(self) -> None:
        self.wire.close()


class MemoryPort:
    """The server's end: it finds contributions in the slots, and has parameters copied there."""

    def __init__(self, slots: Sequence[Slot], parameters: Parameters):
        self.slots, self.parameters = slots, parameters
        self.wires: dict[int, socket.socket] = {}
        self.packets = Packets()
        self.outbox = Outbox(len(slots))
        self.pulls = [0] * len(slots)

    def connect(self, worker: int, wire: socket.socket) -> None:
        """A worker's wire; a new one takes the place of one that is dead."""
        self.disconnect(worker)
        self.wires[worker] = wire

    def disconnect(self, worker: int) -> None:
        """Whoever listens to the wire closes it."""
        old = self.wires.pop(worker, None)
        if old is not None:
            with suppress(OSError):  # its other end may be gone
                old.shutdown(socket.SHUT_RDWR)

    def way(self, worker: int) -> socket.socket | None:
        return self.wires.get(worker)

    @property
    def connected(self) -> bool:
        return bool(self.wires)

    # ------------------------------------------------------------ what comes

    def receive(self, worker: int) -> Received | None:
        packet = self.packets.receive_now(self.wires[worker])
        if not packet:
            return None
        message: ToStore = to_store(packet)
        if not isinstance(message, Push):
            return Received(message)
        return Received(message, contribution_in(self.slots[worker], message))

    def spoken(self, worker: int) -> bool:
        wire = self.wires.get(worker)
        if wire is None:
            return False
        with suppress(ConnectionError):
            try:
                wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    # ------------------------------------------------------------ what goes

    def put(self, worker: int, message: Message, snapshot: Any) -> None:
        wire = self.wires.get(worker)
        if wire is None:
            return
        if isinstance(message, Go):
            lay_out(self.slots[worker], message, worker, self.parameters, self.pulls[worker])
            self.pulls[worker] += 1
        elif isinstance(message, Welcome):
            self.parameters.averages.write(self.slots[worker].statistics.views)
        self.outbox.put(worker, wire, encode(message))

    def take(self) -> list[int]:
        return self.outbox.take()

    def send(self, workers: list[int], last: int | None = None) -> None:
        self.outbox.send(workers, last)
