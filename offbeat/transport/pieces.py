"""What workers add up among themselves: pieces of flat buffers, in the order of the workers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from offbeat.model.table import Flat, Sum

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


@dataclass(frozen=True)
class Addition:
    """`give` of all members is added up with their shares into `get`."""

    give: Tensor
    get: Tensor
    shares: Sequence[float]
    how: Sum


def add_up(total: Tensor, chunks: Sequence[Tensor], what: Addition) -> None:
    """Make `total` the sum of what has a share, in the order of the members."""
    live = [(chunk, share) for chunk, share in zip(chunks, what.shares, strict=True) if share]
    if len(live) == 1:
        total.copy_(live[0][0])
    elif live:
        what.how(total, [chunk for chunk, _ in live], [share for _, share in live])
    else:
        total.zero_()
