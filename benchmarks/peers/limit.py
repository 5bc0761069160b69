"""The limit of the memory: what an exchange must cost even if nobody had to be told of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

LR = 0.01
Work = Callable[[], None]
# The rules whose exchange is measured; of each, how many floats a parameter takes at the store.
RULES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=LR),
    "momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3, fused=True),
}
HELD = {"sgd": 1, "momentum": 2, "adam": 3}


def resnet_shapes() -> list[list[int]]:
    """The shapes of the parameters of ResNet-50: 25,557,032 floats."""
    from offbeat.recipes.resnet import ResNet50

    with torch.device("meta"):
        return [list(parameter.shape) for parameter in ResNet50(1000).parameters()]


def step_and_copy(rule: str, floats: int, shared: bool) -> Work:
    """One step in place over one flat tensor, then one copy of it; all in `shared` memory or not.

    Two passes, as a pull follows its push: copying at once would find everything in the cache.
    """
    parameters, gradients, copy = (_tensor(floats, shared) for _ in range(3))
    parameters.grad = gradients
    optimizer = RULES[rule]([parameters])

    def work() -> None:
        if rule == "sgd":  # nothing but p -= rate x g
            parameters.add_(gradients, alpha=-LR)
        else:
            optimizer.step()
        copy.copy_(parameters)

    return work


def before_image(rule: str, floats: int) -> Work:
    """Copies of the parameters and of the rule's state, as they would be kept before each step."""
    pairs = [(_tensor(floats, True), _tensor(floats, True)) for _ in range(HELD[rule])]

    def work() -> None:
        for old, new in pairs:
            old.copy_(new)

    return work


def _tensor(floats: int, shared: bool) -> Tensor:
    # Small, so that hundreds of steps in one direction stay ordinary numbers.
    tensor: Any = torch.randn(floats).mul_(1e-3)
    return tensor.share_memory_() if shared else tensor
