"""One stage of a replica at work: microbatches forward, their gradients back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.model.precision import autocast
from offbeat.split.tree import mapped, tensors

Cost = Callable[[Any], Tensor]  # the loss of what the last stage gives
Gradients = Sequence[Tensor | None]


def ready_for_halves() -> None:
    """Load what backward passes in two halves take, once for all processes that are forked later.

    Only one schedule needs it, and it brings a good part of torch.distributed along.
    """
    import torch.distributed.pipelining._backward  # noqa: F401


@dataclass
class _Flight:
    """A microbatch between its forward and its backward pass."""

    entered: list[Tensor]  # starts of the graph, whose gradients go back to the stage before
    left: list[Tensor]  # its ends: what was handed on, or the loss
    seeds: list[Tensor] | None = None
    groups: Any = None  # what torch remembers between the two halves of a backward pass
    weights: Gradients | None = None  # gradients of the parameters, where they are known already


@dataclass
class Passes:
    """The passes of microbatches through one stage; gradients add up on its parameters.

    A graph ends where the stage ends: what comes in is the start of a new one. So a stage computes
    the same bits wherever the others are.
    """

    stage: nn.Module
    precision: str = "float32"
    scale: float = 1.0  # of the loss on the way back, and so of all gradients
    flights: dict[Any, _Flight] = field(default_factory=dict)
    halves: bool | None = None  # whether a backward pass can be made in two halves, once known

    def forward(self, key: Any, value: Any, cost: Cost | None = None) -> Any:
        """What the stage makes of `value`, or the loss of that; `key` is for the way back."""
        entered = mapped(_start, value)
        device = next((t.device.type for t in tensors(entered)), "cpu")
        with autocast(self.precision, device):
            # A copy: the first operation may write in place, which no start of a graph allows, nor
            # other microbatches of the same batch, whose memory this one shares.
            out = self.stage(mapped(Tensor.clone, entered))
            if cost is not None:
                out = cost(out)
        scaled = out if cost is None or self.scale == 1.0 else out * self.scale
        self.flights[key] = _Flight(
            [t for t in tensors(entered) if t.requires_grad],
            [t for t in tensors(scaled) if t.requires_grad],
        )
        return mapped(_start, out)

    def backward(self, key: Any, gradients: Gradients) -> list[Tensor | None]:
        """Descend from `gradients`, one for each tensor handed on; returns those of what came in.

        The last stage descends from its loss and is given none.
        """
        flight = self._seeded(self.flights.pop(key), gradients)
        if flight.left:
            torch.autograd.backward(flight.left, flight.seeds)
        return [tensor.grad for tensor in flight.entered]

    def backward_input(self, key: Any, gradients: Gradients) -> list[Tensor | None]:
        """The first half of a backward pass: only what the stage before waits for."""
        from torch.distributed.pipelining._backward import stage_backward_input

        weights = self._weights()
        if self.halves is False or not weights:  # without weights the first half is all
            return self.backward(key, gradients)
        flight = self._seeded(self.flights[key], gradients)
        if not flight.entered or not flight.left:
            return [None] * len(flight.entered)
        if self.halves is None:
            flight.weights = torch.autograd.grad(
                flight.left, weights, flight.seeds, retain_graph=True, allow_unused=True
            )
        found, flight.groups = stage_backward_input(
            flight.left, flight.seeds, flight.entered, iter(weights)
        )
        if flight.weights is not None:
            # torch looks for weights on the way from the inputs; one off that way would get none.
            reached = sum(len(group["params"]) for group in flight.groups)
            self.halves = reached == sum(g is not None for g in flight.weights)
        return list(found)

    def backward_weight(self, key: Any) -> None:
        """The second half: the gradients of the stage's own parameters."""
        from torch.distributed.pipelining._backward import stage_backward_weight

        flight = self.flights.pop(key, None)
        if flight is None or not flight.left:
            return
        if flight.weights is not None:
            for weight, gradient in zip(self._weights(), flight.weights, strict=True):
                if gradient is None:
                    continue
                if weight.grad is None:
                    weight.grad = gradient
                else:
                    weight.grad += gradient
        elif flight.groups is None:  # nobody waited for the first half
            torch.autograd.backward(flight.left, flight.seeds)
        else:
            stage_backward_weight(iter(self._weights()), flight.groups)

    def _weights(self) -> list[nn.Parameter]:
        return [p for p in self.stage.parameters() if p.requires_grad]

    def _seeded(self, flight: _Flight, gradients: Gradients) -> _Flight:
        """Where to descend from; what the stage behind made no use of is left out."""
        if gradients:
            pairs = [(t, g) for t, g in zip(flight.left, gradients, strict=True) if g is not None]
            flight.left, flight.seeds = [t for t, _ in pairs], [g for _, g in pairs]
        return flight


def _start(tensor: Tensor) -> Tensor:
    """The same values as the start of a graph of their own."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
