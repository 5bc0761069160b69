"""Some workers that are connected to each other, and add up what they have in their order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch
from torch import Tensor

from offbeat.model.table import Flat, Sum, combine
from offbeat.protocol.messages import GroupFailed

PIECE = 16 << 20  # bytes that are added up in one go


def scaled(total: Tensor, chunks: Sequence[Tensor], shares: Sequence[float]) -> None:
    """As the store averages the state of local optimisers."""
    total.zero_()
    for chunk, share in zip(chunks, shares, strict=True):
        total.add_(chunk * share)


@dataclass
class Chunk:
    """A stretch of a flat buffer, the same in what a worker gives and in what it gets."""

    shard: int
    span: int
    start: int  # in elements of the span
    stop: int
    names: frozenset[str]

    def of(self, flats: Sequence[Flat]) -> Tensor:
        return flats[self.shard].spans[self.span][self.start : self.stop]


def pieces_of(flats: Sequence[Flat], size: int = PIECE) -> list[Chunk]:
    """Cut flat buffers into pieces, the last tensors first, as backward makes them."""
    return [
        Chunk(shard, span, start, stop, frozenset(names))
        for shard, flat in enumerate(flats)
        for span in range(len(flat.spans))
        for start, stop, names in _cut(flat, span, size)
    ][::-1]


def _cut(flat: Flat, span: int, size: int) -> Iterator[tuple[int, int, list[str]]]:
    whole = flat.table.spans[span]
    width = whole.dtype.itemsize
    inside = [e for e in flat.table if e.dtype is whole.dtype]
    names: list[str] = []
    start = whole.start
    for entry, after in zip(inside, [*inside[1:], None], strict=True):
        names.append(entry.name)
        stop = whole.stop if after is None else after.offset
        if stop - start >= size or after is None:
            yield (start - whole.start) // width, (stop - whole.start) // width, names
            names, start = [], stop


class Left(Exception):
    """This member has left the group."""


class Unreached(ConnectionError):
    """A member could not be reached by this one."""

    def __init__(self, worker: int, why: str):
        super().__init__(why)
        self.worker = worker


@dataclass(frozen=True)
class Addition:
    """`give` of all members is added up with their shares into `get`."""

    give: Tensor
    get: Tensor
    shares: Sequence[float]
    how: Sum


class Group:
    """Members that are connected, and a thread that adds up pieces in the order they are given.

    A group that has lost a member never comes back. What has gone wrong is told from the thread.
    """

    def __init__(self, number: int, members: Sequence[int], me: int):
        self.number, self.members, self.rank = number, list(members), list(members).index(me)
        self.tasks: SimpleQueue[Addition | Callable[[], None] | None] = SimpleQueue()

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

    def end(self, idle: bool) -> None:
        """Let go of the others; an `idle` group is gone when this returns."""
        self.tasks.put(None)
        if idle:
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
            self._close()

    def _connect(self) -> None:
        """Wait for the other members, and know that it is them."""
        raise NotImplementedError

    def _add(self, what: Addition) -> None:
        """Each member adds up one chunk of everybody's, in order, and all take the sums."""
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


def add_up(total: Tensor, chunks: Sequence[Tensor], what: Addition) -> None:
    """Make `total` the sum of what has a share, in the order of the members."""
    live = [(chunk, share) for chunk, share in zip(chunks, what.shares, strict=True) if share]
    if len(live) == 1:
        total.copy_(live[0][0])
    elif live:
        what.how(total, [chunk for chunk, _ in live], [share for _, share in live])
    else:
        total.zero_()
