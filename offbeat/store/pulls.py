"""What a worker pulls: the parameters as they are, or the change since its last pull, packed."""

import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.codec import Codec, Packed
from offbeat.data.reader import mix
from offbeat.model.table import Flat, fill, named, under


class WholePulls:
    """Everybody pulls the parameters as they are."""

    nbytes = 0  # that are held for this beside the parameters

    def take(self, worker: int, version: int, flats: Sequence[Flat]) -> None:
        """`worker` pulls this version."""

    def of(self, worker: int, flats: list[Flat]) -> list[Flat]:
        """What `worker` has then."""
        return flats

    def packed(self, worker: int) -> Mapping[str, Packed] | None:
        """What travels to `worker`; None is all of it."""
        return None

    def bytes_of(self, worker: int, whole: int) -> int:
        """How many bytes that is."""
        return whole

    def forget(self, worker: int) -> None:
        """Whoever comes in its place has nothing yet."""

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor], flats: Sequence[Flat]) -> None:
        return


class PackedPulls(WholePulls):
    """A copy of what each worker has, and the packed difference to it that makes its next pull.

    What a codec leaves out stays in that difference, so that the next pull brings it. The first
    pull is whole.
    """

    def __init__(self, codec: Codec, seed: int):
        self.codec, self.seed = codec, seed
        self.held: dict[int, list[Flat]] = {}
        self.sent: dict[int, dict[str, Packed] | None] = {}

    @torch.no_grad()
    def take(self, worker: int, version: int, flats: Sequence[Flat]) -> None:
        held = self.held.get(worker)
        if held is None:
            self.held[worker] = [flat.clone() for flat in flats]
            self.sent[worker] = None
            return
        sent: dict[str, Packed] = {}
        for mine, flat in zip(held, flats, strict=True):
            for name, view in mine.views.items():
                # Of each tensor a draw of its own, so that nothing depends on how they lie.
                draw = torch.Generator()
                draw.manual_seed(mix(self.seed, 8, worker, version, zlib.crc32(name.encode())))
                sent[name] = self.codec.encode(flat.views[name] - view, draw)
                add(view, sent[name])
        self.sent[worker] = sent

    def of(self, worker: int, flats: list[Flat]) -> list[Flat]:
        return self.held[worker]

    def packed(self, worker: int) -> Mapping[str, Packed] | None:
        return self.sent[worker]

    def bytes_of(self, worker: int, whole: int) -> int:
        sent = self.sent[worker]
        return whole if sent is None else sum(packed.nbytes for packed in sent.values())

    def forget(self, worker: int) -> None:
        self.held.pop(worker, None)
        self.sent.pop(worker, None)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return sum(flat.table.nbytes for held in self.held.values() for flat in held)

    def state(self) -> dict[str, Tensor]:
        return {k: t for w, held in self.held.items() for k, t in named(f"{w}/", held).items()}

    def load(self, tensors: Mapping[str, Tensor], flats: Sequence[Flat]) -> None:
        for worker in {int(name.partition("/")[0]) for name in tensors}:
            held = [Flat(flat.table) for flat in flats]
            fill(held, under(f"{worker}/", tensors))
            self.held[worker], self.sent[worker] = held, None


def add(view: Tensor, packed: Packed) -> None:
    """Take in a change, at the store as at the worker."""
    view.add_(packed.codec.decode(packed))
