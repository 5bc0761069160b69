"""Some workers connected by gloo, who add up what they have, always in the same order."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.model.table import Flat, Sum, combine
from offbeat.transport.group_keys import Keys

PIECE = 16 << 20  # bytes that are added up in one go


def scaled(total: Tensor, chunks: Sequence[Tensor], shares: Sequence[float]) -> None:
    """As the store averages the state of local optimisers; `total` holds zeros."""
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


class GlooGroup:
    """Members that are connected, and a thread that adds up pieces in the order they are given.

    A group that has lost a member never comes back: it is left alone with the memory it writes,
    and its thread ends when gloo gives up. `failed` is told from that thread.
    """

    def __init__(self, number: int, members: Sequence[int], me: int, keys: Keys):
        self.number, self.members, self.rank = number, list(members), list(members).index(me)
        self.keys = keys
        self.tasks: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()

    def start(self, failed: Callable[[str], None]) -> None:
        self.thread = threading.Thread(
            target=self._work, args=(failed,), name="offbeat group", daemon=True
        )
        self.thread.start()

    def add(self, give: Tensor, get: Tensor, shares: Sequence[float], how: Sum = combine) -> None:
        """Add up `give` of all members with their shares into `get`."""
        self.tasks.put(partial(self._add, give, get, shares, how))

    def then(self, told: Callable[[], None]) -> None:
        """Call `told`, in the group's thread, when all that was given has been added up."""
        self.tasks.put(lambda gloo: told())

    def end(self, idle: bool) -> None:
        """Let go of the others; an `idle` group is gone when this returns.

        One that ended while the interpreter does would take the process with it.
        """
        self.tasks.put(None)
        if idle:
            self.thread.join()

    def _work(self, failed: Callable[[str], None]) -> None:
        torch.set_num_threads(1)
        try:
            gloo = self.keys.connect(self.number, self.rank, len(self.members))
            while (task := self.tasks.get()) is not None:
                task(gloo)
        except Exception as error:  # whatever gloo says, the group is of no more use
            failed(f"{type(error).__name__}: {error}"[:500])
        finally:
            self.keys.close()

    @torch.no_grad()
    def _add(self, give: Tensor, get: Tensor, shares: Sequence[float], how: Sum, gloo: Any) -> None:
        """Each member adds up one chunk of everybody's, in order, and all take the sums.

        gloo's own all-reduce moves as many bytes, but the order in which it adds depends on the
        place in the buffer, so that no store and no replay could arrive at the same bits.
        """
        count, size = len(self.members), give.numel()
        chunk = -(-size // count)
        sizes = [max(0, min(chunk, size - rank * chunk)) for rank in range(count)]
        room = get if chunk * count == size else give.new_empty(chunk * count)
        mine = sizes[self.rank]
        gloo.alltoall_base(
            room[: mine * count], give, [mine] * count, sizes, dist.AllToAllOptions()
        ).wait()
        live = [(room[r * mine : (r + 1) * mine], s) for r, s in enumerate(shares) if s]
        total = give.new_zeros(chunk)
        if len(live) == 1:
            total[:mine].copy_(live[0][0])
        else:
            how(total[:mine], [part for part, _ in live], [share for _, share in live])
        gloo._allgather_base(room, total).wait()
        if room is not get:
            get.copy_(room[:size])
