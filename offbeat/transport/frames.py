"""Frames over TCP: a small message and the buffers beside it, in order, over several connections.

A frame is a header, the message, and the bytes of its buffers. Header and message go over the first
connection; many bytes of buffers are cut into as many equal stretches as there are connections.
Each connection is a stream of bytes that is counted on both sides, so that one that breaks goes on
in the middle of a buffer when it is made again. What was sent is kept until the other end is known
to have it.
"""

import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from fcntl import ioctl
from termios import TIOCOUTQ
from typing import Any, NamedTuple

from offbeat.errors import OffbeatError
from offbeat.transport.meter import LARGE, Transfers
from offbeat.transport.wakeup import Wakeup

Views = list[memoryview]

_COUNT = struct.Struct("i")
HEADER = struct.Struct("!IQQ")  # bytes of the message, of the buffers; frames received so far
LARGEST = 1 << 20  # bytes of a message
TOGETHER = 1 << 16  # bytes of a frame that are copied into one piece: one call sends them
FEW = 1 << 15  # bytes that are read by way of a small buffer; more go straight to their place
STRIPED = 1 << 20  # bytes of buffers from which on all connections carry some
PIECE = 1 << 18  # bytes that go through TLS in one call: the same have to be tried again
MOST = 4  # connections of a link
ENDS = select.POLLRDHUP | select.POLLHUP | select.POLLERR
ALL = 1 << 62  # bytes: more than there are


class ConnectionLost(Exception):
    """A connection has broken, whoever broke it; it may be made again."""

    def __init__(self, index: int):
        super().__init__(index)
        self.index = index


class LinkEnded(Exception):
    """The other end has said that it will send nothing more."""


class Misbehaved(OffbeatError):
    """What has come is no frame of this link."""


class Piece(NamedTuple):
    """Bytes of a stream that may have to be sent again, until `frame` is known to have arrived."""

    start: int
    view: memoryview
    frame: int


class Connection:
    """One TCP connection, or none for a while, and the streams in its two directions."""

    def __init__(self, index: int):
        self.index = index
        self.wire: socket.socket | None = None
        self.sent = self.end = 0  # what the socket has taken, and all there is, of what goes out
        self.received = 0
        self.kept: deque[Piece] = deque()
        self.inbox = memoryview(bytearray(TOGETHER))
        self.first = self.last = 0  # what lies there and has not been taken
        self.lost = False

    def attach(self, wire: socket.socket, received: int = 0) -> None:
        """Go on over `wire`, whose other end has received so many bytes of the stream."""
        begins = self.kept[0].start if self.kept else self.end
        self.detach()
        if not begins <= received <= self.end:
            wire.close()
            raise Misbehaved(f"the other end has {received} bytes, and there are {self.end}")
        self.wire, self.sent, self.lost = wire, received, False

    def detach(self) -> None:
        if self.wire is not None:
            self.wire.close()
            self.wire = None

    # ------------------------------------------------------------ out

    def put(self, view: memoryview, frame: int) -> None:
        self.kept.append(Piece(self.end, view, frame))
        self.end += len(view)

    def forget(self, frames: int) -> None:
        """The other end has so many frames whole."""
        while self.kept and self.kept[0].frame <= frames:
            self.kept.popleft()

    @property
    def flushed(self) -> bool:
        """Whether the socket has taken all there is."""
        return self.sent == self.end

    def flush(self, most: int = ALL) -> None:
        """Send what the socket takes now, or about `most` bytes of it."""
        wire, until = self.wire, self.sent + most
        if wire is None:
            return
        for start, view, _ in self.kept:
            stop = start + len(view)
            while self.sent < stop:
                if self.sent >= until:
                    return
                rest = view[self.sent - start : until - start]
                try:
                    self.sent += wire.send(rest if type(wire) is socket.socket else rest[:PIECE])
                except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    return
                except OSError as error:
                    raise ConnectionLost(self.index) from error

    # ------------------------------------------------------------ in

    def take(self, into: memoryview) -> int:
        """Fill `into` as far as bytes are there; returns how many were.

        Those count even if the connection breaks behind them: they will not be sent again.
        """
        taken = 0
        while taken < len(into):
            rest = into[taken:]
            if self.first == self.last and len(rest) <= FEW:
                self.first, self.last = 0, self._receive(self.inbox)
            if self.first < self.last:
                some = min(self.last - self.first, len(rest))
                rest[:some] = self.inbox[self.first : self.first + some]
                self.first += some
            else:
                some = 0 if len(rest) <= FEW else self._receive(rest)
            if not some:
                break
            taken += some
        return taken

    def _receive(self, into: memoryview) -> int:
        """Read what is there; 0 if nothing is."""
        if self.wire is None or self.lost:
            return 0
        try:
            count = self.wire.recv_into(into)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError:
            count = 0
        self.lost = not count
        self.received += count
        return count


class Frames:
    """Both directions of a link; `decode` makes of bytes a message, and says where its buffers go.

    It raises Misbehaved if there can be no such message. Nothing here waits: what can be sent is
    sent, what is there is read.
    """

    def __init__(self, connections: int, decode: Callable[[bytes], tuple[Any, Views]]):
        self.connections = [Connection(index) for index in range(connections)]
        self.decode = decode
        self.queued = self.came = 0  # frames, since the link began
        self.header = memoryview(bytearray(HEADER.size))
        self.message: Any = None  # of the last whole frame
        self.wanted: list[deque[memoryview]] = [deque() for _ in self.connections]
        self.nbytes, self.told = 0, memoryview(b"")  # of the frame that is coming
        self.since, self.before = 0.0, 0  # when it began to come, and what had come, if it is large
        self.incoming = Transfers()  # those that have come without a break
        self.stage = self._begin()

    # ------------------------------------------------------------ out

    def put(self, message: bytes, buffers: Sequence[memoryview] = ()) -> None:
        """Queue a frame; `buffers` may be written again when the other end has said more."""
        self.queued += 1
        nbytes = sum(map(len, buffers))
        header = HEADER.pack(len(message), nbytes, self.came)
        first = self.connections[0]
        if len(header) + len(message) + nbytes <= TOGETHER:
            first.put(memoryview(b"".join((header, message, *buffers))), self.queued)
            return
        first.put(memoryview(header + message), self.queued)
        for connection, views in zip(self.connections, self._cut(buffers), strict=True):
            for view in views:
                connection.put(view, self.queued)

    @property
    def flushed(self) -> bool:
        """Whether the sockets have taken all there is."""
        return all(connection.flushed for connection in self.connections)

    def flush(self, most: int = ALL) -> None:
        """Send what can be sent now, or some of it."""
        for connection in self.connections:
            connection.flush(most)

    def _cut(self, buffers: Sequence[memoryview]) -> list[Views]:
        """Which bytes go over which connection."""
        count = len(self.connections)
        nbytes = sum(map(len, buffers))
        if count == 1 or nbytes < STRIPED:
            return [[view for view in buffers if len(view)], *([] for _ in range(count - 1))]
        ends = [nbytes * (index + 1) // count for index in range(count)]
        found: list[Views] = [[] for _ in range(count)]
        at = index = 0
        for view in buffers:
            while len(view):
                some = view[: ends[index] - at]
                if len(some):
                    found[index].append(some)
                    at, view = at + len(some), view[len(some) :]
                if at == ends[index] and index + 1 < count:
                    index += 1
        return found

    # ------------------------------------------------------------ in

    def _begin(self) -> str:
        self.wanted[0].append(self.header)
        return "header"

    def absorb(self) -> bool:
        """Read what is there; True when a frame is whole, whose `message` is kept."""
        while self._read():
            if self.stage == "header":
                length, self.nbytes, arrived = HEADER.unpack(self.header)
                if not length:
                    raise LinkEnded
                if length > LARGEST or arrived > self.queued:
                    raise Misbehaved("a header that cannot be")
                for connection in self.connections:
                    connection.forget(arrived)
                self.told = memoryview(bytearray(length))
                self.wanted[0].append(self.told)
                self.stage = "message"
            elif self.stage == "message":
                self.message, views = self.decode(bytes(self.told))
                if sum(map(len, views)) != self.nbytes:
                    raise Misbehaved("buffers of another size than this link has")
                for wanted, mine in zip(self.wanted, self._cut(views), strict=True):
                    wanted.extend(mine)
                self.stage = "buffers"
                if self.nbytes >= LARGE:
                    self.since, self.before = time.perf_counter(), self.received
            else:
                self.came += 1
                if self.since:
                    # Without what came together with its head, which has taken no time.
                    nbytes = self.received - self.before
                    self.incoming.add(nbytes, time.perf_counter() - self.since)
                    self.since = 0.0
                self.stage = self._begin()
                return True
        return False

    def _read(self) -> bool:
        """Whether everything that is wanted now has come."""
        whole = True
        for connection, wanted in zip(self.connections, self.wanted, strict=True):
            while wanted:
                count = connection.take(wanted[0])
                if count < len(wanted[0]):
                    wanted[0] = wanted[0][count:]
                    if connection.lost:
                        raise ConnectionLost(connection.index)
                    whole = False
                    break
                wanted.popleft()
        return whole

    def wait(self, wakeup: Wakeup | None = None, most: float | None = None) -> bool:
        """Until something has come, or it is woken by `wakeup`, or more can be sent if not all is.

        False if `most` milliseconds have passed before.

        A connection from which nothing is wanted is looked at for its end alone: what has come
        early over it, and lies there, would be no reason to wake.
        """
        look = select.poll()
        idle: dict[int, Connection] = {}
        for connection, wanted in zip(self.connections, self.wanted, strict=True):
            if connection.wire is None:
                continue
            if not wanted:
                idle[connection.wire.fileno()] = connection
            events = select.POLLIN if wanted else select.POLLRDHUP
            if not connection.flushed:
                events |= select.POLLOUT
            look.register(connection.wire, events)
        if wakeup is not None:
            look.register(wakeup, select.POLLIN)
        found = look.poll(most)
        for handle, event in found:
            if handle in idle and event & ENDS:
                raise ConnectionLost(idle[handle].index)
        return bool(found)

    @property
    def sent(self) -> int:
        """Bytes that have gone out."""
        return sum(one.sent for one in self.connections)

    @property
    def received(self) -> int:
        """Bytes that have come in."""
        return sum(one.received for one in self.connections)

    @property
    def moved(self) -> int:
        """Bytes that have gone either way."""
        return self.sent + self.received

    @property
    def unconfirmed(self) -> int:
        """Bytes that the system holds because the other end has not confirmed them.

        Unlike `flushed` this looks beyond what the sockets have taken.
        """
        return sum(map(_held, self.wires()))

    @property
    def heard(self) -> int:
        """Bytes that the other end has sent, or whose arrival its system has confirmed.

        What this system has taken to send proves nothing: the way may have been cut.
        """
        return self.moved - self.unconfirmed

    @property
    def coming(self) -> bool:
        """Whether the buffers of a frame are on their way."""
        return self.stage == "buffers"

    def lose(self, index: int) -> None:
        """A connection is gone; the time of what was coming says nothing of the link."""
        self.connections[index].detach()
        self.since = 0.0

    def wires(self) -> list[socket.socket]:
        return [one.wire for one in self.connections if one.wire is not None]

    def end(self) -> None:
        """Say that nothing more will come, as far as that gets through, and close."""
        self.connections[0].put(memoryview(HEADER.pack(0, 0, self.came)), self.queued)
        with suppress(ConnectionLost):
            self.flush()
        self.close()

    def close(self) -> None:
        for connection in self.connections:
            connection.detach()


def _held(wire: socket.socket) -> int:
    try:
        return int(_COUNT.unpack(ioctl(wire, TIOCOUTQ, bytes(_COUNT.size)))[0])
    except (OSError, ValueError):  # it is closed
        return 0


def tune(wire: socket.socket, patience: float) -> None:
    """Small frames leave at once, and one who has gone silent is noticed within `patience`."""
    milliseconds = max(1, int(patience * 500))
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with suppress(OSError, AttributeError):  # not every system knows these
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(patience / 4)))
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(patience / 8)))
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    wire.setblocking(False)
