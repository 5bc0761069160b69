"""How the processes of one replica hand tensors to each other: a wire for each pair of them."""

import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import torch
from torch import Tensor

from offbeat.errors import RunError

Tag = tuple[str, int, int]  # what it is, the stage it is for, and the number of the microbatch


class Parted(Exception):
    """Another process of the replica is gone."""

    def __init__(self, process: int):
        super().__init__(process)
        self.process = process


class _Leaf(msgspec.Struct, array_like=True):
    """A tensor's place in a value: which one it is, and how to make it again."""

    shape: list[int]
    dtype: str
    taught: bool  # whether a gradient comes back for it


class _Header(msgspec.Struct, array_like=True):
    """What goes before the bytes of a message."""

    tag: Tag
    form: Any  # the value with a number in the place of each tensor
    leaves: list[_Leaf]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Header).decode


class Channel:
    """One end of a wire to another process; nobody waits for a reader that is busy.

    What the wire does not take at once goes out from a thread, so that two processes that send to
    each other never stand in each other's way.
    """

    def __init__(self, wire: socket.socket, other: int):
        self.wire, self.other = wire, other
        self.came: dict[Tag, deque[Any]] = {}
        self.queue: deque[memoryview] = deque()
        self.room = threading.Condition()
        self.thread: threading.Thread | None = None

    def send(self, tag: Tag, value: Any) -> None:
        found: list[Tensor] = []
        form = _form(value, found)
        leaves = [
            _Leaf(list(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad)
            for t in found
        ]
        header = _encode(_Header(tag, form, leaves))
        pieces = [len(header).to_bytes(4, "big") + header]
        # Copies where a tensor is not in one piece; and a thread keeps what it still has to send.
        pieces += [_bytes(tensor) for tensor in found if tensor.numel()]
        self._put([memoryview(piece) for piece in pieces])

    def _put(self, pieces: list[memoryview]) -> None:
        with self.room:
            if not self.queue:
                pieces = self._now(pieces)
            if not pieces:
                return
            self.queue.extend(pieces)
            if self.thread is None:
                self.thread = threading.Thread(target=self._work, name="offbeat mesh", daemon=True)
                self.thread.start()
            self.room.notify_all()

    def _now(self, pieces: list[memoryview]) -> list[memoryview]:
        """What is left after as much as the wire takes without waiting."""
        with suppress(BlockingIOError, ConnectionError):  # a death shows where it is read
            while pieces:
                sent = self.wire.send(pieces[0], socket.MSG_DONTWAIT)
                pieces = pieces[1:] if sent == len(pieces[0]) else [pieces[0][sent:], *pieces[1:]]
        return pieces

    def _work(self) -> None:
        while True:
            with self.room:
                while not self.queue:
                    self.room.wait()
                piece = self.queue[0]
            with suppress(OSError):
                self.wire.sendall(piece)
            with self.room:
                self.queue.popleft()
                self.room.notify_all()

    def flush(self) -> None:
        with self.room:
            while self.queue:
                self.room.wait()

    def receive(self, tag: Tag) -> Any:
        """The next value with this tag; others that come before it are kept."""
        while not self.came.get(tag):
            came, value = self._next()
            if came == tag:
                return value
            self.came.setdefault(came, deque()).append(value)
        return self.came[tag].popleft()

    def _next(self) -> tuple[Tag, Any]:
        length = int.from_bytes(self._exactly(torch.empty(4, dtype=torch.uint8)), "big")
        header = _decode(self._exactly(torch.empty(length, dtype=torch.uint8)))
        found = []
        for leaf in header.leaves:
            tensor = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype))
            if tensor.numel():
                self._exactly(tensor)
            found.append(tensor.requires_grad_(leaf.taught))
        return header.tag, _filled(header.form, found)

    def _exactly(self, into: Tensor) -> memoryview:
        view = whole = memoryview(_bytes(into))
        while view:
            try:
                count = self.wire.recv_into(view)
            except ConnectionError:
                count = 0
            if not count:
                raise Parted(self.other)
            view = view[count:]
        return whole


class Mesh:
    """A process's channels to all others of its replica."""

    def __init__(self, me: int, channels: dict[int, Channel]):
        self.me, self.channels = me, channels
        self.kept: dict[Tag, deque[Any]] = {}
        self.watchers: list[Callable[[int | None, Tag | None], None]] = []

    def send(self, other: int, tag: Tag, value: Any) -> None:
        if other == self.me:
            self.kept.setdefault(tag, deque()).append(value)
        else:
            self.channels[other].send(tag, value)

    def flush(self) -> None:
        """Wait until everything is on its way."""
        for channel in self.channels.values():
            channel.flush()

    def receive(self, other: int, tag: Tag) -> Any:
        if other == self.me:
            return self.kept[tag].popleft()
        for watcher in self.watchers:
            watcher(other, tag)
        value = self.channels[other].receive(tag)
        for watcher in self.watchers:
            watcher(None, None)
        return value

    def subscribe(self, watcher: Callable[[int | None, Tag | None], None]) -> None:
        """Tell `watcher` what this process waits for, and None when it has come."""
        self.watchers.append(watcher)


def alone() -> Mesh:
    """The mesh of a replica that is one process."""
    return Mesh(0, {})


class Wires:
    """The wires between all pairs of `count` processes, made before any of them is forked."""

    def __init__(self, count: int):
        self.ends: dict[tuple[int, int], socket.socket] = {}
        for one in range(count):
            for other in range(one + 1, count):
                self.ends[one, other], self.ends[other, one] = socket.socketpair()

    def mesh(self, me: int) -> Mesh:
        """In process `me`: its own ends; the others are closed, so that a death is noticed."""
        mine = {}
        for (one, other), end in self.ends.items():
            if one == me:
                mine[other] = Channel(end, other)
            else:
                end.close()
        return Mesh(me, mine)


# ---------------------------------------------------------------- values and bytes


def _bytes(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def _form(value: Any, found: list[Tensor]) -> Any:
    """A value as plain lists: tensors by their place in `found`, containers by kind."""
    if isinstance(value, Tensor):
        found.append(value)
        return ["t", len(found) - 1]
    if type(value) is dict:
        return ["d", [[key, _form(item, found)] for key, item in value.items()]]
    if type(value) in (tuple, list):
        return ["u" if type(value) is tuple else "l", [_form(item, found) for item in value]]
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return ["v", value]
    raise RunError(
        f"a {type(value).__name__} cannot travel between stages: let blocks return tensors, or "
        "plain tuples, lists and dicts of them"
    )


def _filled(form: Any, found: Sequence[Tensor]) -> Any:
    kind, value = form
    if kind == "t":
        return found[value]
    if kind == "d":
        return {key: _filled(item, found) for key, item in value}
    if kind in ("u", "l"):
        items = [_filled(item, found) for item in value]
        return tuple(items) if kind == "u" else items
    return value
