"""What is to be trained, apart from how: what a recipe or a user's `make` function returns."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.config.text import nearest
from offbeat.errors import ConfigError

# A factory of an ordinary PyTorch optimiser: it takes parameters or parameter groups.
OptimizerFactory = Callable[[Iterable[Any]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Metric:
    """A score of the user's own, taken at every test; `on` says what it is computed from.

    "model": `fn(model, test)` is a number for the whole test set, with the model in evaluation mode
    and without gradients. "outputs": `fn(outputs, targets)`, of all of them at once. "loss":
    `fn(loss)`, of the mean loss on the test set. Instead of a function, an object with `update`,
    `compute` and `reset` is told outputs and targets batch by batch, as torchmetrics has it.
    """

    name: str
    fn: Any
    higher_is_better: bool = True
    on: Literal["model", "outputs", "loss"] = "model"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise ConfigError(f"a metric has a name such as 'f1', not {self.name!r}")
        if not callable(self.fn) and not self.counts:
            raise ConfigError(
                f"the metric {self.name} is computed by a function fn(model, test), or by an "
                f"object with update, compute and reset, not by {self.fn!r}"
            )
        if not isinstance(self.higher_is_better, bool):
            raise ConfigError(f"higher_is_better is True or False, not {self.higher_is_better!r}")
        if self.on not in ("model", "outputs", "loss"):
            raise ConfigError(
                f"the metric {self.name} is computed on 'model', 'outputs' or 'loss', "
                f"not {self.on!r}"
            )

    @property
    def counts(self) -> bool:
        """Whether it is an object that is told of one batch after the other."""
        return _counts(self.fn)

    @property
    def sees_outputs(self) -> bool:
        """Whether it is computed from what the model puts out."""
        return self.counts or self.on == "outputs"

    def described(self) -> dict[str, Any]:
        """What a run folder says of it."""
        return {"name": self.name, "higher": self.higher_is_better}


PERPLEXITY = Metric("perplexity", math.exp, higher_is_better=False, on="loss")
NAMED = {"perplexity": PERPLEXITY}
# What a user may pass: one of the above, its name, a function of outputs and targets, an object
# that counts, or several of these in a list, or by name.
Metrics = Any


def metrics_of(value: Metrics) -> tuple[Metric, ...]:
    """What a user passes as `metric`, one by one; runs are judged by the first."""
    found = tuple(_each(value, None))
    for place, one in enumerate(found):
        if one.name in [other.name for other in found[:place]]:
            raise ConfigError(
                f"two metrics are called {one.name}: give them names, metric={{'one': ...}}"
            )
    return found


def _each(value: Any, name: str | None) -> Iterator[Metric]:
    if value is None:
        return
    if isinstance(value, str):
        if value not in NAMED:
            raise ConfigError(f"there is no metric {value!r}{nearest(value, NAMED)}: {_REMEDY}")
        value = NAMED[value]
    if isinstance(value, Metric):
        yield value if name is None else replace(value, name=name)
    elif _counts(value) and hasattr(value, "items"):  # a collection of such objects
        for key, one in value.items():
            yield from _each(one, str(key))
    elif _counts(value) or (callable(value) and not isinstance(value, type)):
        higher = getattr(value, "higher_is_better", None)
        called = getattr(value, "__name__", type(value).__name__)
        yield Metric(name or called, value, higher is None or bool(higher), on="outputs")
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _each(one, key)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _each(one, None)
    else:
        raise ConfigError(f"{value!r} is no metric: {_REMEDY}")


def _counts(value: Any) -> bool:
    told = not isinstance(value, type | Mapping)
    return told and all(hasattr(value, word) for word in ("update", "compute", "reset"))


_REMEDY = (
    "pass a function of outputs and targets, an object with update, compute and reset, "
    "'perplexity', or ob.Metric('f1', fn, higher_is_better=True), where fn(model, test) is a "
    "number"
)


@dataclass(frozen=True)
class Task:
    """Model, data, loss and test set, with the rate and batch size that suit them."""

    model: nn.Module
    data: Dataset[Any] | DataLoader[Any]
    loss: Callable[..., torch.Tensor]
    test: Dataset[Any] | DataLoader[Any] | None = None
    optimizer: OptimizerFactory = partial(torch.optim.SGD, lr=0.1)
    batch_size: int = 32
    metric: Metrics = None

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


def check_metric(metric: Metrics, test: Any) -> None:
    """Refuse what is no metric, and one that nothing would be measured with."""
    found = metrics_of(metric)
    if found and test is None:
        raise ConfigError(
            f"the metric {found[0].name} needs a test set: pass test=, or leave it out"
        )
