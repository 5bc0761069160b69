"""Workers on several hosts that add up what they have, over links that prove the run's token.

Each has one connection to every other. Whoever comes later in the order of the workers dials; both
ends prove the token, as they do to the store, and then that they have been told of this group. What
is exchanged has its number and its length before it, and both are known on both sides.
"""

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offbeat.model.table import Sum, combine
from offbeat.protocol.messages import GroupFailed, StartRound
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.frames import Connection, ConnectionLost, Misbehaved, Views, tune
from offbeat.transport.handshake import NUMBER, Meet, Refused, packet, prove
from offbeat.transport.pieces import Addition, add_up
from offbeat.transport.wakeup import Wakeup

HEADER = struct.Struct("!QQ")  # the number of an exchange, and its bytes
WAITING = 256  # connections that wait for a group
LOOK_AGAIN = 0.05  # seconds until one who was not reached is tried again
FOR_GROUP = 4  # times patience for which a member waits for the others


class Left(Exception):
    """This member has left the group."""


class Unreached(ConnectionError):
    """A member could not be reached by this one."""

    def __init__(self, worker: int, why: str):
        super().__init__(why)
        self.worker = worker


class Arrivals:
    """Connections of other members, until the group that they are for has begun here too."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.waiting: dict[tuple[int, int], tuple[Meet, socket.socket]] = {}

    def put(self, meet: Meet, wire: socket.socket) -> None:
        with self.changed:
            self._drop((meet.group, meet.worker))  # it has come again
            if len(self.waiting) == WAITING:
                self._drop(min(self.waiting))
            self.waiting[meet.group, meet.worker] = meet, wire
            self.changed.notify_all()

    def take(self, group: int) -> list[tuple[Meet, socket.socket]]:
        """Those of a group; whoever waits for an earlier one is late. With `changed` held."""
        for key in [key for key in self.waiting if key[0] < group]:
            self._drop(key)
        return [self.waiting.pop(key) for key in sorted(self.waiting) if key[0] == group]

    def _drop(self, key: tuple[int, int]) -> None:
        if key in self.waiting:
            self.waiting.pop(key)[1].close()

    def close(self) -> None:
        with self.changed:
            for key in list(self.waiting):
                self._drop(key)


@dataclass(frozen=True)
class Meeting:
    """How a worker reaches the others, and is reached: `arrivals` are those that have dialled."""

    token: bytes
    encrypts: bool
    patience: float
    arrivals: Arrivals = field(default_factory=Arrivals)

    def group(self, start: StartRound, me: int) -> "TcpGroup":
        return TcpGroup(start, me, self)


def proof(secret: bytes, who: bytes, group: int, one: int, other: int, number: bytes) -> bytes:
    """What worker `one`, who dials, and the `other` say to each other in a group."""
    return prove(secret, who, f"{group} {one} {other}".encode(), number)


class Incoming:
    """What comes from one member in one exchange: a header, and as many bytes as are expected."""

    def __init__(self, number: int, views: Views):
        self.number, self.views = number, views
        self.header = bytearray(HEADER.size)
        self.wanted = deque([memoryview(self.header)])
        self.begun = False

    def take(self, way: Connection) -> bool:
        """Read what is there; whether that was the last of it."""
        while self.wanted:
            count = way.take(self.wanted[0])
            if count < len(self.wanted[0]):
                self.wanted[0] = self.wanted[0][count:]
                if way.lost:
                    raise ConnectionLost(way.index)
                return False
            self.wanted.popleft()
            if not self.begun:
                self.begun = True
                self._check()
                self.wanted.extend(self.views)
        return True

    def _check(self) -> None:
        number, nbytes = HEADER.unpack(self.header)
        expected = sum(map(len, self.views))
        if (number, nbytes) != (self.number, expected):
            raise Misbehaved(
                f"{nbytes} bytes of exchange {number}, where {expected} of {self.number} are due"
            )


class TcpGroup:
    """Members that are connected, and a thread that adds up pieces in the order they are given.

    Nothing waits for one member alone, so that all may send at once. A group that has lost a member
    never comes back; what has gone wrong is told from the thread.
    """

    def __init__(self, start: StartRound, me: int, meeting: Meeting):
        self.number, self.members = start.group, [number for number, _ in start.members]
        self.rank = self.members.index(me)
        self.tasks: SimpleQueue[Addition | Callable[[], None] | None] = SimpleQueue()
        self.me, self.meeting, self.secret = me, meeting, start.secret
        self.places = dict(zip(self.members, start.places, strict=True))
        self.ways: dict[int, Connection] = {}  # to each other member, by its rank
        self.open, self.dialling = True, False
        self.wakeup = Wakeup()
        self.exchanges = 0
        self.room = torch.empty(0, dtype=torch.uint8)

    def start(self, failed: Callable[[GroupFailed], None]) -> None:
        self.thread = threading.Thread(
            target=self._work, args=(failed,), name="offbeat group", daemon=True
        )
        self.thread.start()

    def add(self, give: Tensor, get: Tensor, shares: Sequence[float], how: Sum = combine) -> None:
        """Add up `give` of all members with their shares into `get`."""
        self.tasks.put(Addition(give, get, shares, how))

    def then(self, told: Callable[[], None]) -> None:
        """Call `told`, in the group's thread, when all that was given has been added up."""
        self.tasks.put(told)

    def end(self) -> None:
        """Leave; nothing of this group is written or read any more when this returns."""
        self.open = False
        with self.meeting.arrivals.changed:
            self.meeting.arrivals.changed.notify_all()
        self.wakeup.wake()
        self.tasks.put(None)
        if not self.dialling:  # one that dials has nothing yet, and ends by itself
            self.thread.join()

    def _work(self, failed: Callable[[GroupFailed], None]) -> None:
        torch.set_num_threads(1)
        try:
            self._connect()
            while (task := self.tasks.get()) is not None:
                if isinstance(task, Addition):
                    self._add(task)
                else:
                    task()
        except Left:
            return
        except Exception as error:  # whatever it is, the group is of no more use
            worker = error.worker if isinstance(error, Unreached) else -1
            failed(GroupFailed(self.number, f"{type(error).__name__}: {error}"[:500], worker))
        finally:
            for way in self.ways.values():
                way.detach()

    @property
    def sent(self) -> int:
        """Bytes that have gone to the others."""
        return sum(way.sent for way in self.ways.values())

    # ------------------------------------------------------------ connecting

    def _connect(self) -> None:
        """Whoever has answered knows the token, and has been told the secret of this group."""
        until = time.monotonic() + FOR_GROUP * self.meeting.patience
        meets: dict[int, Meet] = {}
        for rank, other in enumerate(self.members[: self.rank]):
            number = secrets.token_bytes(NUMBER)
            mine = proof(self.secret, b"dials", self.number, self.me, other, number)
            meets[rank] = Meet(self.number, self.me, number, mine)
            self._attach(rank, self._dial(other, meets[rank]))
        while len(self.ways) < len(self.members) - 1:
            for rank, meet, wire in self._come(until):
                self._attach(rank, wire)
                meets[rank] = meet
        said, heard, expected = {}, {}, {}
        for rank, meet in meets.items():
            one, other = (rank, self.rank) if rank > self.rank else (self.rank, rank)
            between = self.members[one], self.members[other]
            answer = proof(self.secret, b"takes", self.number, *between, meet.number)
            if one == rank:
                said[rank] = [memoryview(answer)]
            else:
                heard[rank], expected[rank] = [memoryview(bytearray(NUMBER))], answer
        self._move(said, heard, until)
        for rank, answer in expected.items():
            if not hmac.compare_digest(bytes(heard[rank][0]), answer):
                raise Misbehaved(f"what answered for worker {self.members[rank]} is another")

    def _attach(self, rank: int, wire: socket.socket) -> None:
        # One that computes reads nothing for as long as patience allows, and is no less alive.
        tune(wire, FOR_GROUP * self.meeting.patience)
        self.ways[rank] = Connection(rank)
        self.ways[rank].attach(wire)

    def _dial(self, other: int, meet: Meet) -> socket.socket:
        """A connection to a member; one that cannot be had after half of patience is none."""
        seconds = self.meeting.patience / 2
        until = time.monotonic() + seconds
        self.dialling = True
        try:
            while True:
                self._look()
                try:
                    return self._dialled(other, meet, max(0.1, until - time.monotonic()))
                except OSError as error:
                    if time.monotonic() > until:
                        where = self.places[other] or "no address"
                        told = f"worker {self.me} cannot reach worker {other} at {where} ({error})"
                        raise Unreached(other, told) from error
                with self.meeting.arrivals.changed:
                    self.meeting.arrivals.changed.wait(LOOK_AGAIN)
        finally:
            self.dialling = False

    def _dialled(self, other: int, meet: Meet, seconds: float) -> socket.socket:
        if not self.places[other]:
            raise ConnectionError("it does not listen")
        address = Address.read(self.places[other])
        try:
            wire, _ = Dialer(address, self.meeting.token, self.meeting.encrypts).connect(seconds)
        except Refused as refused:
            raise ConnectionError(str(refused)) from refused
        try:
            wire.sendall(packet(meet))
        except BaseException:
            wire.close()
            raise
        return wire

    def _come(self, until: float) -> list[tuple[int, Meet, socket.socket]]:
        """Members that have dialled, as they come; whoever has not been told the secret is none."""
        arrivals = self.meeting.arrivals
        with arrivals.changed:
            came = arrivals.take(self.number)
            if not came:
                self._look()
                if not arrivals.changed.wait(until - time.monotonic()):
                    missing = [m for r, m in enumerate(self.members) if r not in self.ways]
                    missing.remove(self.me)
                    raise TimeoutError(f"workers {missing} have not come")
        found = []
        for meet, wire in came:
            expected = proof(self.secret, b"dials", self.number, meet.worker, self.me, meet.number)
            later = self.members[self.rank + 1 :]
            if meet.worker in later and hmac.compare_digest(meet.proof, expected):
                found.append((self.members.index(meet.worker), meet, wire))
            else:
                wire.close()
        return found

    def _look(self) -> None:
        if not self.open:
            raise Left

    # ------------------------------------------------------------ exchanging

    @torch.no_grad()
    def _add(self, what: Addition) -> None:
        count, size = len(self.members), what.give.numel()
        chunk = -(-size // count)
        parts = [slice(min(size, r * chunk), min(size, (r + 1) * chunk)) for r in range(count)]
        mine = parts[self.rank]
        rooms = self._rooms(what.give, mine.stop - mine.start)
        self._move(
            {rank: bytes_of(what.give[parts[rank]]) for rank in self.ways},
            {rank: bytes_of(room) for rank, room in rooms.items()},
        )
        chunks = [rooms.get(rank, what.give[mine]) for rank in range(count)]
        add_up(what.get[mine], chunks, what)
        self._move(
            {rank: bytes_of(what.get[mine]) for rank in self.ways},
            {rank: bytes_of(what.get[parts[rank]]) for rank in self.ways},
        )

    def _rooms(self, like: Tensor, size: int) -> dict[int, Tensor]:
        """Where this member's chunk comes in from each of the others."""
        each = -(-size * like.element_size() // 64) * 64
        if self.room.numel() < each * len(self.ways):
            self.room = torch.empty(each * len(self.ways), dtype=torch.uint8)
        return {
            rank: self.room[i * each :][: size * like.element_size()].view(like.dtype)
            for i, rank in enumerate(self.ways)
        }

    def _move(
        self, out: Mapping[int, Views], into: Mapping[int, Views], until: float | None = None
    ) -> None:
        """Send to each other member what is for it, and take what comes, both at the same time."""
        self.exchanges += 1
        wanted: dict[int, Incoming] = {}
        for rank, way in self.ways.items():
            header = HEADER.pack(self.exchanges, sum(map(len, out.get(rank, []))))
            for view in (memoryview(header), *out.get(rank, [])):
                way.put(view, self.exchanges)
            wanted[rank] = Incoming(self.exchanges, into.get(rank, []))
        unsent = set(self.ways)
        try:
            while True:
                self._look()
                for rank in unsent:
                    self.ways[rank].flush()
                unsent = {rank for rank in unsent if not self.ways[rank].flushed}
                for rank in list(wanted):
                    if wanted[rank].take(self.ways[rank]):
                        del wanted[rank]
                if not unsent and not wanted:
                    break
                self._wait(unsent, set(wanted), until)
        except ConnectionLost as lost:
            other = self.members[lost.index]
            raise ConnectionError(f"the connection to worker {other} has broken") from lost
        for way in self.ways.values():
            way.forget(self.exchanges)

    def _wait(self, unsent: set[int], wanted: set[int], until: float | None) -> None:
        look = select.poll()
        look.register(self.wakeup, select.POLLIN)
        for rank in unsent | wanted:
            wire = self.ways[rank].wire
            assert wire is not None
            reads, writes = rank in wanted, rank in unsent
            look.register(wire, reads * select.POLLIN | writes * select.POLLOUT)
        seconds = None if until is None else max(0.0, until - time.monotonic())
        if not look.poll(None if seconds is None else 1e3 * seconds):
            others = sorted(self.members[rank] for rank in wanted)
            raise TimeoutError(f"workers {others} have not answered")


def bytes_of(tensor: Tensor) -> Views:
    """A stretch of a flat buffer as bytes."""
    array: Any = tensor.view(torch.uint8).numpy()
    return [memoryview(array)] if len(array) else []
