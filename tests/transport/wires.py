"""Two ends of a link over wires in memory, which can be cut at any byte."""

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import pytest

from offbeat.transport import frames as module
from offbeat.transport.frames import ConnectionLost, Frames, Misbehaved, Views

FOR_EVER = 1 << 62


class MemoryWire:
    """What `Frames` needs of a socket; after so many bytes either way both ends are broken."""

    def __init__(self, capacity: int, budget: list[int]):
        self.coming = bytearray()
        self.capacity, self.budget = capacity, budget
        self.losing = budget[0] % 2 == 1  # what is under way is lost in every other break
        self.other: MemoryWire
        self.open = True

    @classmethod
    def pair(cls, capacity: int, after: int = FOR_EVER) -> "tuple[MemoryWire, MemoryWire]":
        budget = [after]
        mine, theirs = cls(capacity, budget), cls(capacity, budget)
        mine.other, theirs.other = theirs, mine
        return mine, theirs

    @property
    def broken(self) -> bool:
        return self.budget[0] <= 0

    def send(self, view: memoryview) -> int:
        if self.broken or not self.other.open:
            raise BrokenPipeError
        room = self.capacity - len(self.other.coming)
        if not room:
            raise BlockingIOError
        some = view[: min(room, self.budget[0])]
        self.budget[0] -= len(some)
        self.other.coming += some
        if self.broken and self.losing:
            self.other.coming.clear()
        return len(some)

    def recv_into(self, into: memoryview) -> int:
        if not self.coming:
            if self.broken:
                raise ConnectionResetError
            if not self.other.open:
                return 0
            raise BlockingIOError
        count = min(len(into), len(self.coming))
        into[:count] = self.coming[:count]
        del self.coming[:count]
        return count

    def close(self) -> None:
        self.open = False


def wire(end: MemoryWire) -> socket.socket:
    """As the type that it stands for."""
    return cast(socket.socket, end)


class End:
    """One end: what it has been told, and buffers of the sizes that each message says."""

    def __init__(self, connections: int):
        self.frames = Frames(connections, self._decode)
        self.buffers: list[bytearray] = []
        self.heard: list[tuple[bytes, list[bytes]]] = []
        self.asked = 0  # bytes of buffers that were made

    def _decode(self, told: bytes) -> tuple[Any, Views]:
        try:
            sizes, word = msgspec.msgpack.decode(told, type=tuple[list[int], bytes])
        except msgspec.MsgspecError as error:
            raise Misbehaved("no message") from error
        self.asked += sum(sizes)
        self.buffers = [bytearray(size) for size in sizes]
        return word, [memoryview(buffer) for buffer in self.buffers]

    def say(self, word: bytes, buffers: list[bytes]) -> None:
        told = msgspec.msgpack.encode(([len(one) for one in buffers], word))
        self.frames.put(told, [memoryview(one) for one in buffers])

    def turn(self) -> None:
        """Send what can be sent, take what is there."""
        self.frames.flush()
        while self.frames.absorb():
            self.heard.append((self.frames.message, [bytes(one) for one in self.buffers]))

    @property
    def kept(self) -> int:
        """Bytes that may have to be sent again."""
        return sum(len(piece.view) for one in self.frames.connections for piece in one.kept)


class Pair:
    """Two ends; `lasting` says after how many bytes each new connection breaks."""

    def __init__(self, connections: int, lasting: Callable[[], int], capacity: int = 97):
        self.ends = (End(connections), End(connections))
        self.lasting, self.capacity = lasting, capacity
        self.made = 0
        for index in range(connections):
            self.connect(index)

    def connect(self, index: int) -> None:
        """As both sides do when a connection has broken: each is told what the other has."""
        self.made += 1
        mine, theirs = (end.frames.connections[index] for end in self.ends)
        first, second = MemoryWire.pair(self.capacity, self.lasting())
        mine.detach()
        theirs.detach()
        mine.attach(wire(first), theirs.received)
        theirs.attach(wire(second), mine.received)

    def until(self, true: Callable[[], bool]) -> None:
        """Let both ends take turns, and mend what breaks."""
        for _ in range(100_000):
            if true():
                return
            for end in self.ends:
                try:
                    end.turn()
                except ConnectionLost as lost:
                    self.connect(lost.index)
        raise AssertionError("nothing more arrives")


def cuts(lengths: list[int]) -> Callable[[], int]:
    """Connections that last for so many bytes, one after the other; then one that lasts."""
    left = deque(lengths)
    return lambda: left.popleft() if left else FOR_EVER


@contextmanager
def small_limits() -> Iterator[None]:
    """Every path of a large frame with few bytes: cut over connections, straight to its place."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STRIPED", 40), ("TOGETHER", 64), ("FEW", 16)):
            patch.setattr(module, name, value)
        yield
