"""A network on the way to a store: it holds up, cuts and tears connections."""

import os
import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from offbeat.transport.wakeup import Wakeup

PIECE = 1 << 16
RESET = struct.pack("ii", 1, 0)  # closing with this sends a reset, and what is under way is lost


@dataclass
class Fate:
    """What happens to one connection.

    After `lasts` bytes it is torn (with a `reset`, or by an end in both directions), or is silent
    for `silent` seconds and goes on.
    """

    lasts: int = 1 << 62
    silent: float = 0.0
    reset: bool = True


@dataclass
class Way:
    """One connection: the worker's end, the store's end, and what lies between."""

    ends: tuple[socket.socket, socket.socket]
    fate: Fate
    waiting: list[bytearray] = field(default_factory=lambda: [bytearray(), bytearray()])
    moved: int = 0
    until: float = 0.0  # silent until then
    closed: list[bool] = field(default_factory=lambda: [False, False])


class Proxy:
    """Passes on what comes, as far as the fates let it."""

    def __init__(
        self, seed: int | None = None, silences: tuple[float, ...] = (), usual: float = 4000
    ):
        """With a `seed` every connection has a fate of its own, after about the `usual` bytes.

        `silences` are how long some are silent for.
        """
        self.random = None if seed is None else random.Random(seed)
        self.silences, self.usual = silences, usual
        self.next: list[Fate] = []  # of the connections that come next
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.setblocking(False)
        self.port = self.listening.getsockname()[1]
        self.target = 0
        self.ways: list[Way] = []
        self.connections = self.torn = self.silenced = self.bytes = 0
        self.wakeup, self.open = Wakeup(), True
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._work, name="proxy", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self.open = False
        self.wakeup.wake()
        self.thread.join(20.0)
        assert not self.thread.is_alive()
        for way in self.ways:
            for end in way.ends:
                end.close()
        self.listening.close()
        if self.failure is not None:
            raise self.failure

    def tear(self) -> None:
        """Tear whatever there is now; it is torn when this returns."""
        ways = list(self.ways)
        for way in ways:
            way.fate = Fate(lasts=0)
        self.wakeup.wake()
        end = time.monotonic() + 20.0
        while any(way in self.ways for way in ways):
            assert time.monotonic() < end
            os.sched_yield()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        try:
            while self.open:
                self._turn()
        except BaseException as error:
            self.failure = error

    def _turn(self) -> None:
        look, owner = select.poll(), {}
        look.register(self.listening, select.POLLIN)
        look.register(self.wakeup, select.POLLIN)
        now, left = time.monotonic(), None
        for way in self.ways:
            if way.until > now:
                left = min(way.until - now, left or way.until)
                continue
            for side in (0, 1):
                wanted = 0
                if not way.closed[side] and len(way.waiting[side]) < PIECE:
                    wanted |= select.POLLIN
                if way.waiting[1 - side]:
                    wanted |= select.POLLOUT
                if wanted:
                    look.register(way.ends[side], wanted)
                    owner[way.ends[side].fileno()] = way, side
        for handle, event in look.poll(None if left is None else 1 + int(1000 * left)):
            if handle == self.listening.fileno():
                self._meet()
            elif handle in owner:
                self._move(*owner[handle], event)
        self.wakeup.clear()
        for way in list(self.ways):
            if way.moved >= way.fate.lasts:
                self._strike(way)
            elif all(way.closed) and not any(way.waiting):
                self._end(way)

    def _meet(self) -> None:
        with suppress(BlockingIOError):
            worker, _ = self.listening.accept()
            store = socket.create_connection(("127.0.0.1", self.target))
            for end in (worker, store):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.ways.append(Way((worker, store), self._fate()))
            self.connections += 1

    def _fate(self) -> Fate:
        if self.next:
            return self.next.pop(0)
        if self.random is None:
            return Fate()
        lasts = int(self.random.expovariate(1 / self.usual))
        if self.silences and self.random.random() < 0.3:
            return Fate(lasts, self.random.choice(self.silences))
        return Fate(lasts, reset=self.random.random() < 0.7)

    def _move(self, way: Way, side: int, event: int) -> None:
        """What comes from this side, and what waits for it."""
        end, waiting = way.ends[side], way.waiting
        try:
            if event & (select.POLLIN | select.POLLHUP | select.POLLERR) and not way.closed[side]:
                came = end.recv(min(PIECE, max(1, way.fate.lasts - way.moved)))
                way.closed[side] = not came
                waiting[side] += came
                way.moved += len(came)
                self.bytes += len(came)
            if waiting[1 - side]:
                sent = end.send(waiting[1 - side])
                del waiting[1 - side][:sent]
        except BlockingIOError:
            return
        except OSError:
            self._end(way)
            return
        if way.closed[side] and not waiting[side]:
            with suppress(OSError):
                way.ends[1 - side].shutdown(socket.SHUT_WR)

    def _strike(self, way: Way) -> None:
        if way.fate.silent:
            self.silenced += 1
            way.until = time.monotonic() + way.fate.silent
            way.fate = Fate()
            return
        self.torn += 1
        if way.fate.reset:
            for end in way.ends:
                with suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._end(way)

    def _end(self, way: Way) -> None:
        if way in self.ways:
            self.ways.remove(way)
        for end in way.ends:
            end.close()
