"""The server's end of links over TCP: a thread for each moves its bytes, in both directions.

What is put for a worker waits in its link's outbox until that thread takes it, so that nobody waits
for a slow link. A frame is read into the worker's slot while the store is free for others; only
what is whole is heard.
"""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from offbeat.model.table import Flat
from offbeat.protocol.messages import (
    Go,
    Message,
    Push,
    Shown,
    Stop,
    ToStore,
    Welcome,
    encode,
    to_store,
)
from offbeat.store.parameters import Parameters
from offbeat.store.slot import Slot
from offbeat.transport.bell import Bell
from offbeat.transport.cargo import Cargo, Packing, views_of
from offbeat.transport.frames import (
    ConnectionLost,
    Frames,
    LinkEnded,
    Misbehaved,
    Views,
    tune,
)
from offbeat.transport.handshake import Answer, Attached, packet
from offbeat.transport.link import Received
from offbeat.transport.slots import contribution_in, lay_out

NOTES = 8  # times within patience that it is noted whether a link lives


class Ears(Protocol):
    """Who is told what happens to a link, by its thread."""

    def hear(self, worker: int, way: object) -> None:
        """Something can be received, or the link has ended."""

    def interrupted(self, worker: int, way: object) -> None:
        """A connection has broken; it may be made again."""

    def restored(self, worker: int, way: object) -> None:
        """It has been made again, and the link goes on where it was."""


class WorkerLink:
    """One worker's link, as the server has it."""

    def __init__(self, name: bytes, connections: int, cargo: Cargo, final: Views):
        """`final` is what goes out with the end of the run."""
        self.name, self.cargo, self.final = name, cargo, final
        self.frames = Frames(connections, self._decode)
        self.outbox: deque[tuple[bytes, Views]] = deque()
        self.coming: deque[tuple[int, socket.socket, int, Answer | None]] = deque()  # connections
        self.arrived: deque[ToStore] = deque()  # whole, and not heard yet
        self.open, self.ended, self.broken = True, False, False
        self.heard, self.heard_at = 0, time.monotonic()
        self.bell = Bell()
        self.thread: threading.Thread | None = None

    def _decode(self, told: bytes) -> tuple[ToStore, Views]:
        try:
            message: ToStore = to_store(told)
        except msgspec.MsgspecError as error:
            raise Misbehaved(f"a worker has said what is no message: {error}") from error
        if isinstance(message, Shown):
            return message, self.cargo.of_shown()
        if not isinstance(message, Push):
            return message, []
        self.cargo.expect(message)
        return message, self.cargo.of_push(message)

    def put(self, message: Message) -> None:
        """With the store locked: what lies beside the message is in the slot by now."""
        views: Views = []
        if isinstance(message, Go):
            views = self.cargo.of_go(message)
        elif isinstance(message, Welcome):
            views = self.cargo.of_welcome()
        elif isinstance(message, Stop):
            views = self.final
        self.outbox.append((encode(message), views))

    def attach(
        self, index: int, wire: socket.socket, received: int = 0, answer: Answer | None = None
    ) -> None:
        """Go on over a new connection, whose other end has so many bytes of the one before.

        It is told how many have come this way, or the `answer`.
        """
        self.coming.append((index, wire, received, answer))
        self.ring()

    def ring(self) -> None:
        """Let the thread see to what there is to do."""
        if threading.current_thread() is not self.thread:
            self.bell.ring()

    def lives(self, within: float) -> bool:
        """Whether the other end has sent or taken bytes not longer ago than that."""
        return time.monotonic() - self.heard_at < within

    def _note(self) -> None:
        """See whether anything has come, or arrived there, since the last time."""
        heard = self.frames.heard
        if heard > self.heard and not self.broken:  # of what is broken nothing can be known
            self.heard, self.heard_at = heard, time.monotonic()

    @property
    def abandoned(self) -> bool:
        """Whether nobody is at its other end: all its connections are closed there, or broken."""
        look = select.poll()
        wires = self.frames.wires()
        for wire in wires:
            look.register(wire, select.POLLRDHUP)
        return self.ended or len(look.poll(0)) == len(wires)

    # ------------------------------------------------------------ its thread

    def begin(self, worker: int, patience: float, ears: Ears) -> None:
        self.thread = threading.Thread(
            target=self._work, args=(worker, patience, ears), name=f"link {worker}", daemon=True
        )
        self.thread.start()

    def _work(self, worker: int, patience: float, ears: Ears) -> None:
        try:
            while not self.ended:
                self.bell.answer()  # before looking at anything that it is rung for
                if not self.open:
                    return
                try:
                    self._take_connections(worker, patience, ears)
                    self._move(worker, patience, ears)
                except ConnectionLost as lost:
                    self._lose(lost, worker, ears)
                except (LinkEnded, Misbehaved):  # whoever breaks the rules is as good as gone
                    self.ended = True
        finally:
            self.frames.close()
            self.ended = True
        ears.hear(worker, self)

    def _take_connections(self, worker: int, patience: float, ears: Ears) -> None:
        while self.coming:
            index, wire, received, answer = self.coming.popleft()
            connection = self.frames.connections[index]
            connection.detach()  # from here on nothing more of the old one counts
            try:
                wire.settimeout(patience)
                wire.sendall(packet(answer or Attached(connection.received)))
                tune(wire, patience)
            except OSError:
                wire.close()
                continue
            connection.attach(wire, received)
            self.heard, self.heard_at = 0, time.monotonic()
            if self.broken and len(self.frames.wires()) == len(self.frames.connections):
                self.broken = False
                ears.restored(worker, self)

    def _move(self, worker: int, patience: float, ears: Ears) -> None:
        sent = self._send()
        while self.frames.absorb():
            message = self.frames.message
            if isinstance(message, Push):
                self.cargo.unpack(message)
            self.arrived.append(message)
            ears.hear(worker, self)
            sent = self._send()
        look = select.poll()
        look.register(self.bell, select.POLLIN)
        for wire in self.frames.wires():
            look.register(wire, select.POLLIN if sent else select.POLLIN | select.POLLOUT)
        self._note()
        if not self.outbox:
            look.poll(1e3 * patience / NOTES)

    def _send(self) -> bool:
        while self.outbox:
            self.frames.put(*self.outbox.popleft())
        return self.frames.flush()

    def _lose(self, lost: ConnectionLost, worker: int, ears: Ears) -> None:
        """Whoever broke it: its worker has patience to make another."""
        self.frames.connections[lost.index].detach()
        if not self.broken:
            self.broken = True
            ears.interrupted(worker, self)

    def close(self) -> None:
        """Nothing more goes either way."""
        self.open = False
        self.ring()


class TcpPort:
    """The server's end of all links: it finds contributions in the slots, and sends what is put."""

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Parameters,
        final: Sequence[Flat],
        packing: Packing,
        patience: float,
    ):
        """`final` is where the parameters and averaged buffers lie that a run ends with."""
        self.slots, self.parameters, self.final = slots, parameters, views_of(final)
        self.packing, self.patience = packing, patience
        self.links: dict[int, WorkerLink] = {}
        self.due: list[int] = []
        self.pulls = [0] * len(slots)

    def link(self, worker: int, name: bytes, connections: int) -> WorkerLink:
        """A new link of a worker, whose connections come by and by."""
        cargo = self.packing.cargo(self.slots[worker])
        return WorkerLink(name, connections, cargo, self.final)

    def named(self, name: bytes) -> WorkerLink | None:
        """The link of that name, if there is one."""
        return next((one for one in self.links.values() if one.name == name), None)

    def connect(self, worker: int, way: WorkerLink) -> None:
        """A worker's link; a new one takes the place of one that is dead."""
        self.disconnect(worker)
        self.links[worker] = way

    def disconnect(self, worker: int) -> None:
        old = self.links.pop(worker, None)
        if old is not None:
            old.close()

    def way(self, worker: int) -> WorkerLink | None:
        return self.links.get(worker)

    @property
    def connected(self) -> bool:
        return bool(self.links)

    # ------------------------------------------------------------ what comes

    def receive(self, worker: int) -> Received | None:
        link = self.links[worker]
        if not link.arrived:
            if link.ended:
                return None
            raise BlockingIOError
        message = link.arrived.popleft()
        if not isinstance(message, Push):
            return Received(message)
        if message.part.worker != worker:  # it speaks for another: as good as gone
            link.ended = True
            return None
        return Received(message, contribution_in(self.slots[worker], message))

    def spoken(self, worker: int) -> bool:
        """Bytes that are on their way are a sign of life too."""
        link = self.links.get(worker)
        if link is None:
            return False
        return bool(link.arrived) or link.ended or link.lives(self.patience)

    # ------------------------------------------------------------ what goes

    def put(self, worker: int, message: Message, snapshot: Any) -> None:
        link = self.links.get(worker)
        if link is None:
            return
        if isinstance(message, Go):
            lay_out(self.slots[worker], message, worker, self.parameters, self.pulls[worker])
            self.pulls[worker] += 1
            packed = self.parameters.pulls.packed(worker)
            if packed is not None:
                message.packed = True
                link.cargo.changes[message.place].write(packed)
        elif isinstance(message, Welcome):
            self.parameters.averages.write(self.slots[worker].statistics.views)
        link.put(message)
        self.due.append(worker)

    def take(self) -> list[int]:
        due, self.due = self.due, []
        return due

    def send(self, workers: Sequence[int], last: int | None = None) -> None:
        """Wake their threads; the one that asks sees to its own."""
        for worker in workers:
            link = self.links.get(worker)
            if link is not None:
                link.ring()
