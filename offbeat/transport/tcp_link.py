"""A worker's end of a link over TCP: it dials out, and makes connections that break again."""

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from offbeat.log.records import Part
from offbeat.model.table import Flat
from offbeat.protocol.messages import (
    Go,
    Join,
    Probe,
    Probed,
    Push,
    Rejoin,
    Shown,
    Stop,
    ToStore,
    ToWorker,
    Welcome,
    encode,
    to_worker,
)
from offbeat.store.slot import Slot
from offbeat.transport.cargo import MeetingPacking, Packing
from offbeat.transport.dial import Dialer
from offbeat.transport.frames import (
    ALL,
    MOST,
    ConnectionLost,
    Frames,
    LinkEnded,
    Misbehaved,
    Views,
    tune,
)
from offbeat.transport.handshake import (
    Attach,
    Attached,
    Enter,
    Entered,
    NoSuchLink,
    NotYet,
    TooLate,
    ask,
)
from offbeat.transport.link import StoreGone
from offbeat.transport.meter import EVERY, Transfers
from offbeat.transport.slots import fill, snapshot_in
from offbeat.transport.wakeup import Wakeup
from offbeat.worker.contribution import Contribution, Snapshot

AWAY = 4  # times patience for which a worker looks for a store that does not answer
AT_FIRST = 1 / 8  # of patience that a connection may take; more with each that does not come
FAR = 2e-3  # seconds of a round trip from which one connection is not enough
LINK = 16  # bytes of the name of a link
BESIDE_PROBE = 1 << 18  # bytes that are sent in one go while the answer to a probe is due
Result = TypeVar("Result")
Mended = tuple[socket.socket, int]  # a connection, and how many bytes the store has had of it


def connections_for(round_trip: float) -> int:
    """How many connections a link has: one carries a window in each round trip, and no more."""
    return MOST if round_trip >= FAR else 1


class Maker(Protocol):
    """How the connections of a link are made, and from which of this machine's addresses."""

    host: str

    def enter(self) -> tuple[bytes, list[socket.socket]]:
        """Come with a new link; its name, and its connections."""

    def mend(self, link: bytes, index: int, received: int) -> Mended | None:
        """A connection in the place of one that has brought so many bytes.

        None if the store knows nothing of this link, or no more.
        """

    def stop(self) -> None:
        """Nobody looks for the store any more: whoever does ends with StoreGone."""


@dataclass
class DialedStore:
    """A store behind an address; `request` says who comes.

    There are as many `connections` as the round trip asks for, or as many as are said.
    """

    dialer: Dialer
    request: Enter
    patience: float
    connections: int | None = None
    number: int = -1  # the worker's, once it is in
    host: str = ""  # the address of this machine from which the store is reached
    stopped: threading.Event = field(default_factory=threading.Event)

    def enter(self) -> tuple[bytes, list[socket.socket]]:
        # The store knows by the name that a second attempt is no second worker.
        asked = msgspec.structs.replace(self.request, link=secrets.token_bytes(LINK), connections=0)
        return asked.link, self._reach(lambda seconds: self._enter(asked, seconds))

    def _enter(self, asked: Enter, seconds: float) -> list[socket.socket]:
        with ExitStack() as open_until_all_are_made:
            first, asked.round_trip = self.dialer.connect(self.patience, seconds)
            open_until_all_are_made.enter_context(first)
            self.host = first.getsockname()[0]
            if not asked.connections:
                asked.connections = self.connections or connections_for(asked.round_trip)
            answer = ask(first, asked)
            if isinstance(answer, NotYet):
                raise ConnectionRefusedError("there is no place yet")
            if not isinstance(answer, Entered):
                raise Misbehaved(f"the store has answered {type(answer).__name__}")
            # Whoever comes again would like to be the same, if nobody else is by then.
            self.request.number = self.number = answer.number
            self.request.instead = False
            tune(first, self.patience)
            wires = [first]
            for index in range(1, asked.connections):
                made = self._mend(asked.link, index, 0, seconds)
                if made is None:
                    raise ConnectionResetError("the store has lost a link that was just made")
                wires.append(open_until_all_are_made.enter_context(made[0]))
            open_until_all_are_made.pop_all()
            return wires

    def mend(self, link: bytes, index: int, received: int) -> Mended | None:
        return self._reach(lambda seconds: self._mend(link, index, received, seconds))

    def _mend(self, link: bytes, index: int, received: int, seconds: float) -> Mended | None:
        wire, _ = self.dialer.connect(self.patience, seconds)
        try:
            answer = ask(wire, Attach(link, index, received))
            if isinstance(answer, Attached):
                tune(wire, self.patience)
                return wire, answer.received
            if not isinstance(answer, NoSuchLink):
                raise Misbehaved(f"the store has answered {type(answer).__name__}")
        except BaseException:
            wire.close()
            raise
        wire.close()
        return None

    def _reach(self, attempt: Callable[[float], Result]) -> Result:
        """Try until the store answers: it may be out of reach for a while.

        The system asks ever more rarely for a connection that does not come, so a new attempt sees
        sooner that there is a way again. One who is far away is given longer with each.
        """
        until, seconds = time.monotonic() + AWAY * self.patience, AT_FIRST * self.patience
        while True:
            try:
                return attempt(seconds)
            except OSError as error:
                if time.monotonic() > until:
                    raise StoreGone from error
            seconds = min(2 * seconds, self.patience)
            if self.stopped.wait(min(1.0, self.patience / 20)):
                raise StoreGone

    def stop(self) -> None:
        self.stopped.set()


# ---------------------------------------------------------------- moving bytes


class Pump:
    """Moves the frames of a link when the worker sends or waits, and mends what breaks."""

    def __init__(self, maker: Maker, decode: Callable[[bytes], tuple[ToWorker, Views]]):
        self.maker, self.decode = maker, decode
        self.anew = self.over = self.closed = False
        self.joining: Join | None = None  # said, and not answered yet
        self.heard: deque[ToWorker] = deque()  # and not asked for yet
        self.asked = 0.0  # when the last probe went out whose answer is due
        self.came = 0  # frames that had come by then
        self.due = 0.0  # when the next one goes
        self.round_trip = 0.0  # that the last one took
        self.link, self.frames = self._fresh()

    def _fresh(self) -> tuple[bytes, Frames]:
        link, wires = self.maker.enter()
        frames = Frames(len(wires), self.decode)
        for connection, wire in zip(frames.connections, wires, strict=True):
            connection.attach(wire)
        return link, frames

    def put(self, message: ToStore, buffers: Sequence[memoryview] = ()) -> None:
        """Send, or begin to."""
        if self.closed:
            raise StoreGone
        if isinstance(message, Join):
            self.joining = message
        if isinstance(message, Push):
            self._probe()
        self.frames.put(encode(message), buffers)
        try:
            self._flush()
        except ConnectionLost as lost:
            self._mend(lost)

    def _probe(self) -> None:
        """Before what is large is on its way: the link is quiet now, in both directions."""
        now = time.perf_counter()
        if now < self.due:
            return
        found, self.frames.incoming = self.frames.incoming, Transfers()
        self.frames.put(encode(Probe(self.round_trip, found.nbytes, found.seconds)))
        self.due = now + EVERY
        self.asked, self.came, self.round_trip = now, self.frames.came, 0.0

    def _probed(self) -> None:
        """The answer to a probe; it says nothing if something else was before it on the way."""
        if self.asked and self.frames.came == self.came + 1:
            self.round_trip = time.perf_counter() - self.asked
        self.asked = 0.0

    def _flush(self) -> None:
        """Send what can be sent; while an answer is due little at a time, to see it at once."""
        self.frames.flush(BESIDE_PROBE if self.asked else ALL)

    def wait(self) -> ToWorker:
        """What comes next."""
        while (found := self.turn(None)) is None:
            continue
        return found

    def turn(self, wakeup: Wakeup | None) -> ToWorker | None:
        """Move what can be moved, and what has come; else wait for more, or for `wakeup`."""
        if self.closed:
            raise StoreGone
        if self.heard:
            return self._next()
        if self.anew:  # what was under way is lost
            self.anew = False
            return Rejoin()
        try:
            self._flush()
            if not self._absorb():
                self.frames.wait(wakeup)
        except ConnectionLost as lost:
            self._mend(lost)
        return self._next() if self.heard else None

    def _next(self) -> ToWorker:
        found = self.heard.popleft()
        if isinstance(found, Welcome):
            self.joining = None
        return found

    def _absorb(self) -> bool:
        """Read what is there; whether that was a message."""
        try:
            if not self.frames.absorb():
                return False
        except LinkEnded:
            raise StoreGone from None
        found: ToWorker = self.frames.message
        if isinstance(found, Probed):
            self._probed()
            return True
        self.over |= isinstance(found, Stop)
        self.heard.append(found)
        return True

    def _mend(self, lost: ConnectionLost) -> None:
        # A store that is through has said so, and is not to be looked for.
        with suppress(ConnectionLost):
            while not self.over and self._absorb():
                continue
        if self.over:
            if not self.heard:
                raise StoreGone
            return
        connection = self.frames.connections[lost.index]
        self.frames.lose(lost.index)
        self.asked = 0.0
        try:
            made = self.maker.mend(self.link, lost.index, connection.received)
            if made is not None:
                connection.attach(*made)
                return
            link, frames = self._fresh()
        except TooLate:  # it has ended without this worker
            raise StoreGone from None
        self.frames.close()
        self.heard.clear()
        self.link, self.frames = link, frames
        if self.joining is not None:
            self.frames.put(encode(self.joining))
        else:
            self.anew = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.frames.end()


class PumpThread:
    """The same in a thread of its own, while the worker computes."""

    def __init__(self, pump: Pump):
        self.pump = pump
        self.outbox: deque[tuple[ToStore, Sequence[memoryview]]] = deque()
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.open = True
        self.wakeup = Wakeup()
        self.thread = threading.Thread(target=self._work, name="offbeat link", daemon=True)
        self.thread.start()

    def put(self, message: ToStore, buffers: Sequence[memoryview] = ()) -> None:
        if not self.open:
            raise StoreGone
        self.outbox.append((message, buffers))
        self.wakeup.wake()

    def wait(self) -> ToWorker:
        """What has come next; raises what has ended the link."""
        found = self.inbox.get()
        if isinstance(found, BaseException):
            self.inbox.put(found)  # for whoever asks again
            raise found
        return found  # type: ignore[no-any-return]

    def _work(self) -> None:
        try:
            while True:
                self.wakeup.clear()  # before looking at anything that it is woken for
                while self.outbox:
                    self.pump.put(*self.outbox.popleft())
                if not self.open:
                    return
                found = self.pump.turn(self.wakeup)
                if found is not None:
                    self.inbox.put(found)
        except BaseException as error:
            self.inbox.put(error)

    def close(self) -> None:
        self.open = False
        self.pump.maker.stop()
        self.wakeup.wake()
        self.thread.join()
        self.pump.close()
        self.inbox.put(StoreGone())


# ---------------------------------------------------------------- the link


class TcpLink:
    """A worker's end: what it sends and pulls lies in its own slot, and its bytes travel."""

    def __init__(self, maker: Maker, slot: Slot, packing: Packing, overlap: bool = False):
        """With `overlap` bytes travel while the worker computes."""
        self.slot, self.cargo = slot, packing.cargo(slot)
        # What the store knows this worker to have, where pulls bring changes to it.
        self.held = [Flat(flat.table) for flat in slot.incoming[0]] if packing.pull else []
        pump = Pump(maker, self._decode)
        self.pump: Pump | PumpThread = PumpThread(pump) if overlap else pump
        self.prepared = Push(Part(-1, 0, 0, 0, [], 0), False)
        self.last_version = 0  # that the run came to, once it is over
        self.came = 0.0

    def _decode(self, told: bytes) -> tuple[ToWorker, Views]:
        try:
            message: ToWorker = to_worker(told)
        except msgspec.MsgspecError as error:
            raise Misbehaved(f"the store has said what is no message: {error}") from error
        if isinstance(message, Go):
            return message, self.cargo.of_go(message)
        if isinstance(message, Welcome):
            return message, self.cargo.of_welcome()
        return message, self.cargo.of_stop() if isinstance(message, Stop) else []

    def prepare(self, push: Push, contribution: Contribution) -> None:
        fill(self.slot, push, contribution, self.slot.updater)
        self.cargo.pack(push, contribution.packed)
        self.prepared = push

    def push(self) -> None:
        self.pump.put(self.prepared, self.cargo.of_push(self.prepared))

    def send(self, message: ToStore) -> None:
        self.pump.put(message)

    def receive(self) -> ToWorker:
        return self._came(self.pump.wait())

    def _came(self, found: ToWorker) -> ToWorker:
        self.came = time.perf_counter()
        if isinstance(found, Stop):
            self.last_version = found.version
        return found

    def snapshot(self, go: Go) -> Snapshot:
        if self.held and go.fresh:
            self._take_change(go)
        return snapshot_in(self.slot, go)

    @torch.no_grad()
    def _take_change(self, go: Go) -> None:
        pulled = self.slot.incoming[go.place]
        if go.packed:
            self.cargo.changes[go.place].add(self.held)
        for held, flat in zip(self.held, pulled, strict=True):
            if go.packed:
                flat.copy_(held)
            else:
                held.copy_(flat)

    def close(self) -> None:
        self.pump.close()


class MeetingLink(TcpLink):
    """The same where workers add up among themselves: their payloads do not go to the store.

    `local` is where the state of the local optimiser goes that the others are to have.
    """

    pump: Pump

    def __init__(self, maker: Maker, slot: Slot, packing: MeetingPacking):
        super().__init__(maker, slot, packing)
        self.local, self.maker = Flat(slot.updater.table), maker

    @property
    def host(self) -> str:
        """The address of this machine from which the store is reached."""
        return self.maker.host

    def prepare(self, push: Push, contribution: Contribution) -> None:
        fill(self.slot, push, contribution, self.local)
        push.place = -1
        self.prepared = push

    def send(self, message: ToStore) -> None:
        beside = self.cargo.of_shown() if isinstance(message, Shown) else []
        self.pump.put(message, beside)

    def receive_or(self, wakeup: Wakeup) -> ToWorker | None:
        """The next message; None when there is none yet, or it was woken."""
        found = self.pump.turn(wakeup)
        return None if found is None else self._came(found)
