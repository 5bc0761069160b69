"""Gradients on their way out while backward still runs: copied when made, and freed at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.model.device import BesideComputing
from offbeat.model.table import Flat

LEAST = 1 << 20  # bytes of a model for which this pays; a small one is copied faster in one go
PIECE = 4 << 20  # bytes that are worth a copy of their own between two memories


class Stream:
    """Takes each gradient from its parameter into a buffer, while it is still in the cache."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]):
        self.places: dict[str, Tensor] = {}
        self.sums: dict[str, float] = {}  # of those that have come
        self.listeners: list[Callable[[str], None]] = []  # told of each
        self.hooks: list[Any] = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._take, name)
            )
            for name, parameter in parameters.items()
        ]

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` the name of each gradient when it is in its place."""
        self.listeners.append(listener)

    def end(self) -> None:
        """Leave the gradients where backward puts them."""
        for hook in self.hooks:
            hook.remove()

    def begin(self, into: Sequence[Flat]) -> None:
        """The gradients of the next step go to `into`."""
        self.places = {name: view for flat in into for name, view in flat.views.items()}
        self.sums.clear()

    @torch.no_grad()
    def _take(self, name: str, parameter: Tensor) -> None:
        place, gradient = self.places[name], parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if name in self.sums:  # a batch that is computed in parts
            place.add_(gradient)
        else:
            place.copy_(gradient)
        parameter.grad = None
        self.sums[name] = place.sum().item()  # in the cache still, and infinite if any element is
        for listener in self.listeners:
            listener(name)

    def absent(self) -> frozenset[str]:
        """The parameters that got no gradient; their places become zero."""
        missing = [name for name in self.places if name not in self.sums]
        for name in missing:
            self.places[name].zero_()
        return frozenset(missing)

    def finite(self) -> bool:
        """Whether all that came is finite; only where a sum is not, elements are asked."""
        odd = [name for name, total in self.sums.items() if not math.isfinite(total)]
        return all(bool(torch.isfinite(self.places[name]).all()) for name in odd)


class Piece:
    """Neighbours in a flat buffer that come down together, when the gradients of all are there."""

    def __init__(self, flat: int, start: int):
        self.flat, self.start, self.stop = flat, start, start
        self.names: set[str] = set()
        self.missing: set[str] = set()


class DeviceStream(Stream):
    """The same from a device: pieces come down while backward still makes the next ones.

    They come into memory that the device writes by itself, and are moved on from there when all
    are there.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], flats: Sequence[Flat]):
        """`flats` have the layout of what goes out, and lie where the parameters do."""
        super().__init__(parameters)
        self.made = [flat.zeros() for flat in flats]
        self.beside = BesideComputing(self.made[0].buffer.device)
        self.down = [Flat(flat.table, self.beside.room(flat.table.nbytes)) for flat in flats]
        self.pieces = [piece for number in range(len(flats)) for piece in self._pieces(number)]
        self.piece_of = {name: piece for piece in self.pieces for name in piece.names}
        self.into: Sequence[Flat] = ()

    def _pieces(self, number: int) -> list[Piece]:
        table = self.made[number].table
        found = [Piece(number, 0)]
        for entry in table:
            if found[-1].stop - found[-1].start >= PIECE:
                found.append(Piece(number, entry.offset))
            found[-1].names.add(entry.name)
            found[-1].stop = entry.offset + entry.nbytes
        return found

    def begin(self, into: Sequence[Flat]) -> None:
        super().begin(self.made)
        self.into = into
        for piece in self.pieces:
            piece.missing = set(piece.names)

    @torch.no_grad()
    def _take(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.places[name].copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        parameter.grad = None
        self.sums[name] = 0.0  # to look at it here would hold up what computes
        piece = self.piece_of[name]
        piece.missing.discard(name)
        if not piece.missing:
            self._bring(piece)

    def _bring(self, piece: Piece) -> None:
        part = slice(piece.start, piece.stop)
        self.beside.copy(self.down[piece.flat].buffer[part], self.made[piece.flat].buffer[part])

    def absent(self) -> frozenset[str]:
        missing = super().absent()
        for piece in self.pieces:
            if piece.missing:
                self._bring(piece)
        self.beside.wait()
        for out, flat in zip(self.into, self.down, strict=True):
            out.copy_(flat)
        for listener in self.listeners:
            for name in self.sums:
                listener(name)
        return missing

    def finite(self) -> bool:
        return all(flat.finite() for flat in self.down)
