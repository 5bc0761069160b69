"""The limit of the memory: what an exchange must cost even if nobody had to be told of it."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.common import Times, timed
from benchmarks.peers.launch import alone

LR = 0.01
Limit = Callable[..., Times]


def resnet_shapes() -> list[list[int]]:
    """The shapes of the parameters of ResNet-50: 25,557,032 floats."""
    from offbeat.recipes.resnet import ResNet50

    with torch.device("meta"):
        return [list(parameter.shape) for parameter in ResNet50(1000).parameters()]


def axpy_copy(
    shapes: Sequence[Sequence[int]], *, repeats: int = 15, threads: int = 1, shared: bool = True
) -> Times:
    """One update in place (p -= rate x g) and one copy; `shared` puts all in shared memory."""
    return _measure("axpy_rounds", shapes, repeats, threads, shared)


def adam_copy(
    shapes: Sequence[Sequence[int]], *, repeats: int = 15, threads: int = 1, shared: bool = True
) -> Times:
    """One step of torch's fused Adam and one copy."""
    return _measure("adam_rounds", shapes, repeats, threads, shared)


def flat(shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The same floats as one tensor: the limit proper."""
    return [[sum(prod(shape) for shape in shapes)]]


def _measure(
    rounds: str, shapes: Sequence[Sequence[int]], repeats: int, threads: int, shared: bool
) -> Times:
    arguments = {"shapes": [list(s) for s in shapes], "repeats": repeats, "shared": shared}
    return Times(tuple(alone(f"limit:{rounds}", arguments, threads)["seconds"]))


def axpy_rounds(shapes: list[list[int]], repeats: int, shared: bool) -> dict[str, Any]:
    parameters, gradients, copies = (_tensors(shapes, shared) for _ in range(3))

    def exchange() -> None:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient, alpha=-LR)
        # A second pass, as a pull follows its push: copying at once would find all in the cache.
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.copy_(parameter)

    return {"seconds": timed(exchange, repeats, 3)}


def adam_rounds(shapes: list[list[int]], repeats: int, shared: bool) -> dict[str, Any]:
    parameters, gradients, copies = (_tensors(shapes, shared) for _ in range(3))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.Adam(parameters, lr=1e-3, fused=True)

    def exchange() -> None:
        optimizer.step()
        for copy, parameter in zip(copies, parameters, strict=True):
            copy.copy_(parameter)

    return {"seconds": timed(exchange, repeats, 3)}


def _tensors(shapes: list[list[int]], shared: bool) -> list[Tensor]:
    tensors = [torch.randn(shape) for shape in shapes]
    return [tensor.share_memory_() for tensor in tensors] if shared else tensors
