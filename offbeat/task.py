"""What is to be trained, apart from how: what a recipe or a user's `make` function returns."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from offbeat.errors import ConfigError

# A factory of an ordinary PyTorch optimiser: it takes parameters or parameter groups.
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Task:
    """Model, data, loss and test set, with the rate and batch size that suit them."""

    model: nn.Module
    data: Dataset[Any]
    loss: Callable[..., torch.Tensor]
    test: Dataset[Any] | None = None
    optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)
    batch_size: int = 32

    def optimizer_at(self, lr: float | None) -> OptimizerFactory:
        """The optimiser with the rate `lr`, or as it is."""
        if lr is None:
            return self.optimizer
        if not isinstance(self.optimizer, partial):
            raise ConfigError(
                "--lr cannot reach into the task's optimizer: set the rate there, or write "
                "optimizer=partial(torch.optim.SGD, lr=0.1) so that --lr can replace it"
            )
        return partial(self.optimizer, lr=lr)
