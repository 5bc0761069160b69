"""What travels between worker and store: contributions out, snapshots back."""

from enum import Enum

import msgspec
from torch import Tensor

from offbeat.codec import Packed
from offbeat.log.records import Part
from offbeat.model.table import Flat, total_bytes


class Contribution(msgspec.Struct, gc=False):
    """What a worker sends; `part` is its line in the log, the rest are numbers.

    `payload` is a gradient to descend, one flat buffer per shard: a gradient, a sum of gradients,
    or the negative of a change, so that one store rule serves them all. None in a cost-only run.
    """

    part: Part
    payload: list[Flat] | None = None
    packed: dict[str, Packed] | None = None  # the payload as it travels, where a codec is used
    absent: frozenset[str] = frozenset()  # parameters that got no gradient at all
    statistics: dict[str, Tensor] = {}  # averaged buffers
    updater: dict[str, Tensor] = {}  # local optimiser state to average
    place: int = -1  # which of its worker's buffers the payload lies in, where memory is shared

    @property
    def nbytes(self) -> int:
        """Bytes that go out."""
        beside = 0
        if self.statistics or self.updater:
            beside = total_bytes([*self.statistics.values(), *self.updater.values()])
        if self.packed is not None:
            return beside + sum(packed.nbytes for packed in self.packed.values())
        return beside + sum(flat.table.payload_bytes for flat in self.payload or [])

    def keep(self) -> None:
        """Own the numbers: the worker's buffers are about to be written again."""
        if self.payload is not None:
            self.payload = [flat.clone() for flat in self.unpacked()]
            self.packed = None
        self.updater = {name: tensor.clone() for name, tensor in self.updater.items()}
        self.place = -1

    def unpacked(self) -> list[Flat]:
        """The payload as the store sees it."""
        assert self.payload is not None
        if self.packed is None:
            return self.payload
        flats = [Flat(flat.table) for flat in self.payload]
        for flat in flats:
            for name, view in flat.views.items():
                view.copy_(self.packed[name].codec.decode(self.packed[name]))
        return flats


class Snapshot(msgspec.Struct, gc=False):
    """What a worker pulls: exactly one version, whole."""

    version: int
    steps: int  # local steps until the next push
    epoch: int  # epochs done, for rate schedules
    parameters: list[Flat] = []  # none in a cost-only run
    updater: dict[str, Tensor] = {}
    progress: int = 0  # batches that a plain loop would have done by then


class Admission(Enum):
    """What the store says to a contribution."""

    ADMITTED = "admitted"
    DROPPED = "dropped"  # too late
    REPEATED = "repeated"  # this very contribution was admitted before
    REFUSED = "refused"  # from an incarnation that was given up: join again

    def __init__(self, word: str):
        # Plain attributes: they are asked for every contribution.
        self.refused = word == "refused"
        self.counts = word in ("admitted", "dropped")  # dealt with, now and not before


# Names of their own, as an attribute of an Enum costs more than the question it answers.
ADMITTED, DROPPED, REPEATED, REFUSED = Admission
