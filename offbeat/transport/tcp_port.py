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
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from offbeat.errors import OffbeatError
from offbeat.model.table import Flat
from offbeat.protocol.messages import (
    Go,
    Message,
    Probe,
    Probed,
    Push,
    Shown,
    Stop,
    ToStore,
    Welcome,
    encode,
    to_store,
)
from offbeat.store.board import Cells, LinkState, Row, new_board
from offbeat.store.parameters import Parameters
from offbeat.store.slot import Slot
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
from offbeat.transport.meter import LARGE, Gauge, Meter
from offbeat.transport.slots import contribution_in, lay_out
from offbeat.transport.wakeup import Wakeup

# Of patience, in which bytes are a sign of life: an answer leaves a moment after patience began.
ALIVE = 7 / 8
NOTES = 16  # times within patience that it is looked whether what was sent has been confirmed


class LinkEvents(Protocol):
    """Who is told what happens to a link, by its thread."""

    def hear(self, worker: int, way: object) -> None:
        """Something can be received, or the link has ended."""

    def interrupted(self, worker: int, way: object) -> None:
        """A connection has broken; it may be made again."""

    def restored(self, worker: int, way: object) -> None:
        """It has been made again, and the link goes on where it was."""


FIRST_LOOK, LOOK = 2, 50  # milliseconds to the looks at what is under way, at most
_PROBED = encode(Probed())


class WorkerLink:
    """One worker's link, as the server has it."""

    def __init__(
        self,
        name: bytes,
        connections: int,
        cargo: Cargo,
        final: Views,
        gauge: Gauge,
        round_trip: float = 0.0,
    ):
        """`final` is what goes out with the end of the run; `gauge` shows how the link does."""
        self.name, self.cargo, self.final, self.gauge = name, cargo, final, gauge
        self.frames = Frames(connections, self._decode)
        self.meter = Meter(gauge, self.frames.incoming, round_trip, time.monotonic())
        self.outbox: deque[tuple[bytes, Views]] = deque()
        self.coming: deque[tuple[int, socket.socket, int, Answer | None]] = deque()  # connections
        self.arrived: deque[ToStore] = deque()  # whole, and not heard yet
        self.open, self.ended, self.broken = True, False, False
        self.misbehaved = False  # whether it has ended because its worker broke the rules
        self.lock = threading.Lock()  # around its end, so that no connection comes after it
        # Whether much has gone out, and whether the system still holds some; time to a look at it.
        self.large, self.held, self.again = False, False, FIRST_LOOK
        self.heard, self.heard_at = 0, time.monotonic()
        self.read = 0  # bytes that had come then
        self.wakeup = Wakeup()
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
        with self.lock:
            if self.ended:
                wire.close()
                return
            self.coming.append((index, wire, received, answer))
        self.wake()

    def wake(self) -> None:
        """Let the thread see to what there is to do."""
        if threading.current_thread() is not self.thread:
            self.wakeup.wake()

    def lives(self, patience: float) -> bool:
        """Whether the other end was heard of within `patience`, and not just when that began."""
        now = time.monotonic()
        return self.frames.received > self.read or now - self.heard_at < ALIVE * patience

    def _note(self) -> None:
        """As its thread: when bytes have come, or have been confirmed."""
        came = self.frames.received
        if not self.broken:  # of what is broken nothing can be known
            confirmed = False
            if self.large:
                # A system confirms a few bytes for a process that stands still; not many for long.
                before, self.heard = self.heard, self.frames.heard
                confirmed = self.heard > before
            if came > self.read or confirmed:
                self.heard_at = time.monotonic()
        self.read = came

    @property
    def abandoned(self) -> bool:
        """Whether nobody is at its other end: all its connections are closed there, or broken."""
        look = select.poll()
        handles = {wire.fileno() for wire in self.frames.wires()} - {-1}  # closed by its thread
        for handle in handles:
            look.register(handle, select.POLLRDHUP)
        return self.ended or len(look.poll(0)) == len(handles)

    # ------------------------------------------------------------ its thread

    def begin(
        self, worker: int, patience: float, events: LinkEvents, before: "WorkerLink | None" = None
    ) -> None:
        """`before` is the worker's link so far, which is closed, and may be writing its slot."""
        last = None if before is None else before.thread
        self.thread = threading.Thread(
            target=self._work,
            args=(worker, patience, events, last),
            name=f"link {worker}",
            daemon=True,
        )
        self.thread.start()

    def _work(
        self, worker: int, patience: float, events: LinkEvents, last: threading.Thread | None
    ) -> None:
        if last is not None:
            last.join()
        try:
            while not self.ended:
                self.wakeup.clear()  # before looking at anything that it is woken for
                if not self.open:
                    return
                try:
                    self._go_on(worker, patience, events)
                except LinkEnded:
                    self.ended = True
                except Misbehaved:
                    self.give_up()
        finally:
            with self.lock:
                self.ended = True
            self.frames.close()
            while self.coming:
                self.coming.popleft()[1].close()
            self.gauge.show(LinkState.IDLE)
        events.hear(worker, self)

    def _go_on(self, worker: int, patience: float, events: LinkEvents) -> None:
        try:
            self._take_connections(worker, patience, events)
            self._move(worker, patience, events)
        except ConnectionLost as lost:
            # What has come before it broke counts: else one that breaks often gets nowhere.
            with suppress(ConnectionLost):
                while self._absorb(worker, events):
                    continue
            self._lose(lost, worker, events)

    def _take_connections(self, worker: int, patience: float, events: LinkEvents) -> None:
        while self.coming:
            index, wire, received, answer = self.coming.popleft()
            connection = self.frames.connections[index]
            self.frames.lose(index)  # from here on nothing more of the old one counts
            try:
                wire.settimeout(patience)
                wire.sendall(packet(answer or Attached(connection.received)))
                tune(wire, patience)
            except OSError as error:
                wire.close()
                raise ConnectionLost(index) from error
            connection.attach(wire, received)
            self.heard, self.heard_at = self.frames.heard, time.monotonic()
            if self.broken and len(self.frames.wires()) == len(self.frames.connections):
                self.broken = False
                events.restored(worker, self)

    def _move(self, worker: int, patience: float, events: LinkEvents) -> None:
        self._send()
        while self._absorb(worker, events):
            self._send()
        if self.ended or not self.open:  # which this thread has just done, and wakes nobody
            return
        self._note()
        if not self.outbox:
            self.gauge.show(self._doing())
            self._wait(1e3 * patience / NOTES)

    def _wait(self, note: float) -> None:
        """Until there is something to do; nobody tells when what was sent has been confirmed."""
        if self.frames.flushed and self.large:
            if not self.frames.wait(self.wakeup, min(self.again, note)):
                self.large = self.held = self.frames.unconfirmed > 0
                self.again = min(2 * self.again, LOOK)
        else:
            self.frames.wait(self.wakeup, note if self.large else None)

    def _absorb(self, worker: int, events: LinkEvents) -> bool:
        """Read what is there; whether that was a message, and there may be more."""
        if not self.frames.absorb():
            return False
        message = self.frames.message
        if isinstance(message, Probe):
            self.frames.put(_PROBED)
            self.meter.probed(message.round_trip, message.nbytes, message.seconds)
            return True
        self.large = self.held = False  # whoever speaks has got it
        if isinstance(message, Push):
            self._unpack(message)
        self.arrived.append(message)
        events.hear(worker, self)
        return self.open and not self.ended

    def _doing(self) -> int:
        """What the link is about while its thread waits."""
        if self.broken:
            return LinkState.BROKEN
        if self.frames.coming:
            return LinkState.SENDING
        quiet = self.frames.flushed and not self.held
        return LinkState.IDLE if quiet else LinkState.RECEIVING

    def _unpack(self, push: Push) -> None:
        try:
            self.cargo.unpack(push)
        except (OffbeatError, RuntimeError, IndexError) as error:  # what is said of nonsense
            raise Misbehaved(f"a payload that cannot be unpacked: {error}") from error

    def _send(self) -> None:
        while self.outbox:
            told, views = self.outbox.popleft()
            if sum(map(len, views)) >= LARGE:
                if not self.large:
                    self.heard = self.frames.heard
                self.large, self.again = True, FIRST_LOOK
            self.frames.put(told, views)
        self.frames.flush()

    def _lose(self, lost: ConnectionLost, worker: int, events: LinkEvents) -> None:
        """Whoever broke it: its worker has patience to make another."""
        self._note()
        self.frames.lose(lost.index)
        if not self.broken:
            self.broken = True
            events.interrupted(worker, self)

    def give_up(self) -> None:
        """Whoever breaks the rules is as good as gone."""
        self.ended = self.misbehaved = True

    def close(self) -> None:
        """Nothing more goes either way."""
        self.open = False
        self.wake()


class TcpPort:
    """The server's end of all links: it finds contributions in the slots, and sends what is put."""

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Parameters,
        final: Sequence[Flat],
        packing: Packing,
        patience: float,
        cells: Cells | None = None,
    ):
        """`final` is where the parameters and averaged buffers lie that a run ends with.

        `cells` is the board, on which links show how they do.
        """
        self.slots, self.parameters, self.final = slots, parameters, views_of(final)
        self.packing, self.patience = packing, patience
        self.cells = new_board(len(slots)) if cells is None else cells
        self.cells[Row.LINK] = LinkState.IDLE
        self.links: dict[int, WorkerLink] = {}
        self.due: list[int] = []
        self.pulls = [0] * len(slots)

    def link(
        self, worker: int, name: bytes, connections: int, round_trip: float = 0.0
    ) -> WorkerLink:
        """A new link of a worker, whose connections come by and by."""
        cargo, gauge = self.packing.cargo(self.slots[worker]), Gauge(self.cells, worker)
        return WorkerLink(name, connections, cargo, self.final, gauge, round_trip)

    def numbered(self, name: bytes) -> tuple[int, WorkerLink] | None:
        """The link of that name, if there is one, and whose it is."""
        return next((found for found in self.links.items() if found[1].name == name), None)

    def named(self, name: bytes) -> WorkerLink | None:
        """The link of that name, if there is one."""
        found = self.numbered(name)
        return None if found is None else found[1]

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
        if message.part.worker != worker:  # it speaks for another
            link.give_up()
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
                link.wake()
