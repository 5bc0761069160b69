"""The hash of a version: what a replay is compared with, and two runs too."""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from offbeat.model.table import Flat

_LOW = (1 << 128) - 1  # the bits of a hash


class ParameterDigest:
    """A hash of every tensor's bits by name, the same however they are spread over shards.

    It is the sum of one hash per tensor, each seeded with the tensor's name. So whoever holds some
    of the tensors adds up theirs, and only sums have to meet.
    """

    def __init__(self, flats: Sequence[Flat]):
        self.pieces = [
            (
                flat.bytes[entry.offset : entry.offset + entry.nbytes],
                xxh3_64_intdigest(entry.name.encode()),
            )
            for flat in flats
            for entry in flat.table
        ]

    def sum(self) -> int:
        """What these tensors add to the hash."""
        total = 0
        for piece, seed in self.pieces:
            total += xxh3_128_intdigest(piece, seed)
        return total

    def __call__(self) -> str:
        return hexadecimal(self.sum())


def hexadecimal(total: int) -> str:
    """The hash as it is logged, from the sum over all tensors."""
    return f"{total & _LOW:032x}"
