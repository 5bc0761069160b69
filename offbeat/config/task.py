"""What is to be trained, apart from how: what a recipe or a user's `make` function returns."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.errors import ConfigError

# A factory of an ordinary PyTorch optimiser: it takes parameters or parameter groups.
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Metric:
    """A score of the user's own: `fn(model, test)` is a number for the whole test set.

    It is called at every test, with the model in evaluation mode and without gradients.
    """

    name: str
    fn: Callable[[nn.Module, Any], float]
    higher_is_better: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise ConfigError(f"a metric has a name such as 'f1', not {self.name!r}")
        if not callable(self.fn):
            raise ConfigError(
                f"the metric {self.name} is computed by a function fn(model, test), "
                f"not by {self.fn!r}"
            )
        if not isinstance(self.higher_is_better, bool):
            raise ConfigError(f"higher_is_better is True or False, not {self.higher_is_better!r}")

    def described(self) -> dict[str, Any]:
        """What a run folder says of it."""
        return {"name": self.name, "higher": self.higher_is_better}


@dataclass(frozen=True)
class Task:
    """Model, data, loss and test set, with the rate and batch size that suit them."""

    model: nn.Module
    data: Dataset[Any] | DataLoader[Any]
    loss: Callable[..., torch.Tensor]
    test: Dataset[Any] | DataLoader[Any] | None = None
    optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)
    batch_size: int = 32
    metric: Metric | None = None

    def __post_init__(self) -> None:
        check_metric(self.metric, self.test)

    def optimizer_at(self, lr: float | None) -> OptimizerFactory:
        """The optimiser with the rate `lr`, or as it is."""
        if lr is None:
            return self.optimizer
        if not 0 <= lr < math.inf:
            raise ConfigError(f"a learning rate must be a number of at least 0, not {lr:g}")
        if not isinstance(self.optimizer, partial):
            raise ConfigError(
                "--lr cannot reach into the task's optimizer: set the rate there, or write "
                "optimizer=partial(torch.optim.SGD, lr=0.1) so that --lr can replace it"
            )
        return partial(self.optimizer, lr=lr)


def check_metric(metric: Any, test: Any) -> None:
    """Refuse what is no metric, and one that nothing would be measured with."""
    if metric is None:
        return
    if not isinstance(metric, Metric):
        raise ConfigError(
            "metric is a value such as ob.Metric('f1', fn, higher_is_better=True), where "
            f"fn(model, test) is a number, not {metric!r}"
        )
    if test is None:
        raise ConfigError(f"the metric {metric.name} needs a test set: pass test=, or leave it out")
