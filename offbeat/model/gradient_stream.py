"""Gradients on their way out while backward still runs: copied when made, and freed at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.model.table import Flat

LEAST = 1 << 20  # bytes of a model for which this pays; a small one is copied faster in one go


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
