"""What the studies share: methods, trials over seeds, rates chosen on held-back images, tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import msgspec
import torch
from rich.table import Table
from torch.utils.data import TensorDataset

from offbeat.config.task import OptimizerFactory, Task
from offbeat.discipline.discipline import Discipline
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import ConfigError, RunError
from offbeat.model.shared_model import untouched
from offbeat.recipes import digits, mnist
from offbeat.recipes.common import from_seed
from offbeat.recipes.mnist import ConvNet
from offbeat.report.summary import Summary
from offbeat.train import train

TaskOf = Callable[[int], Task]  # the task whose model is made from a seed
HELD_BACK = 0.2
HOLD_BACK_SEED = 20
NEVER = 1_000_000_000


# ---------------------------------------------------------------- what is trained


def digits_task(seed: int) -> Task:
    """The digits with the mean training image taken off, so that no weight only cancels it."""
    task = digits(seed=seed)
    (images, labels), (test_images, test_labels) = tensors(task.data), tensors(task.test)
    mean = images.mean(0)
    return replace(
        task,
        data=TensorDataset(images - mean, labels),
        test=TensorDataset(test_images - mean, test_labels),
    )


def mnist_task(folder: str | Path, limit: int | None = None) -> TaskOf:
    """MNIST from `folder`, read once, with a model for each seed."""
    task = mnist(folder, limit=limit)
    return lambda seed: replace(task, model=from_seed(seed, ConvNet))


def tensors(data: Any) -> tuple[torch.Tensor, ...]:
    """The tensors of a data set in memory."""
    if not isinstance(data, TensorDataset):
        raise ConfigError(
            f"a study needs its data as a TensorDataset, not {type(data).__name__}: "
            "write TensorDataset(images, labels)"
        )
    return data.tensors


def held_back(task: Task) -> Task:
    """A task that trains on four fifths of the training data and is tested on the other fifth."""
    columns = tensors(task.data)
    generator = torch.Generator().manual_seed(HOLD_BACK_SEED)
    order = torch.randperm(len(columns[0]), generator=generator)
    cut = round(HELD_BACK * len(order))
    return replace(
        task,
        data=TensorDataset(*(column[order[cut:]] for column in columns)),
        test=TensorDataset(*(column[order[:cut]] for column in columns)),
    )


# ---------------------------------------------------------------- one method, one run


@dataclass(frozen=True)
class Method:
    """A row of a table: a discipline on a cluster, with its batch size and optimiser."""

    name: str
    discipline: Discipline
    cluster: Cluster
    batch_size: int
    optimizer: OptimizerFactory


class Outcome(msgspec.Struct, frozen=True):
    """What one run came to; a run whose loss is no number any more scores as a guess would."""

    accuracy: float
    loss: float | None  # None after a run that ended in infinities
    seconds: float = 0.0  # virtual
    updates: int = 0
    staleness: float = 0.0
    bytes_sent: int = 0


def sgd(rate: float, momentum: float = 0.0) -> OptimizerFactory:
    return partial(torch.optim.SGD, lr=rate, momentum=momentum)


def trial(task: Task, method: Method, epochs: int, seed: int) -> Outcome:
    """Train once."""
    try:
        with untouched(task.model):
            run = train(
                task.model, task.data, task.loss, test=task.test, epochs=epochs, seed=seed,
                discipline=method.discipline, optimizer=method.optimizer, cluster=method.cluster,
                batch_size=method.batch_size, evaluate_every=epochs * len(tensors(task.data)[0]),
                hash_every=NEVER,
            )  # fmt: skip
    except RunError as error:
        return broken(task, error)
    return outcome(run.summary())


def outcome(figures: Summary) -> Outcome:
    loss, accuracy = figures.loss, figures.accuracy
    assert loss is not None
    assert accuracy is not None
    return Outcome(
        accuracy, loss if math.isfinite(loss) else None, figures.seconds, figures.updates,
        figures.staleness_mean, figures.bytes_sent,
    )  # fmt: skip


def broken(task: Task, error: RunError) -> Outcome:
    """The outcome of a run that ended in infinities; any other error is passed on."""
    if "the loss is" not in str(error):
        raise error
    classes = int(tensors(task.test)[1].max()) + 1
    return Outcome(1 / classes, None)


# ---------------------------------------------------------------- rows over several seeds


class MethodRow(msgspec.Struct, frozen=True):
    """One method over all seeds, and the rates it was tried with."""

    method: str
    rate: float
    outcomes: list[Outcome]
    sweep: dict[str, float] = {}  # rate to accuracy on the held-back images

    @property
    def accuracy(self) -> float:
        return fmean(one.accuracy for one in self.outcomes)

    @property
    def spread(self) -> float:
        """The standard deviation over seeds."""
        return stdev(o.accuracy for o in self.outcomes) if len(self.outcomes) > 1 else 0.0

    @property
    def loss(self) -> float | None:
        losses = [one.loss for one in self.outcomes if one.loss is not None]
        return fmean(losses) if len(losses) == len(self.outcomes) else None

    def mean(self, figure: str) -> float:
        """The mean of a figure over the runs that came to an end; not a number without any."""
        found = [getattr(one, figure) for one in self.outcomes if one.updates]
        return fmean(found) if found else math.nan


class Result(msgspec.Struct, frozen=True):
    """What a study found: its setting in words, its seeds, and a row for each method."""

    study: str
    setting: str
    seeds: list[int]
    rows: list[MethodRow]
    checks: dict[str, bool] = {}  # statements that hold to the bit, or do not

    def row(self, method: str) -> MethodRow:
        for row in self.rows:
            if row.method == method:
                return row
        raise ConfigError(
            f"no row {method!r}; there are {', '.join(row.method for row in self.rows)}"
        )


@dataclass(frozen=True)
class StudyTask:
    """Where methods are tried: the task, the number of epochs, and the seeds."""

    task: TaskOf
    epochs: int
    seeds: tuple[int, ...] = (0, 1, 2)
    tuning_seeds: tuple[int, ...] = (100,)

    def measure(
        self, method: Method, rate: float, sweep: dict[str, float] | None = None
    ) -> MethodRow:
        """The method on the test images, once for each seed."""
        outcomes = [trial(self.task(seed), method, self.epochs, seed) for seed in self.seeds]
        return MethodRow(method.name, rate, outcomes, sweep or {})

    def choose(
        self, make: Callable[[float], Method], rates: Sequence[float], margin: float = 0.0
    ) -> tuple[float, dict[str, float]]:
        """The rate that does best on held-back images, with seeds that no row uses.

        With a `margin` it is the largest rate whose accuracy is at most that far below the best.
        """
        scores: dict[float, tuple[float, float]] = {}
        for rate in rates:
            tried = [
                trial(held_back(self.task(seed)), make(rate), self.epochs, seed)
                for seed in self.tuning_seeds
            ]
            losses = [math.inf if one.loss is None else one.loss for one in tried]
            scores[rate] = (fmean(one.accuracy for one in tried), -fmean(losses))
        best = max(rates, key=lambda rate: scores[rate])
        if margin:
            best = max(rate for rate in rates if scores[rate][0] >= scores[best][0] - margin)
        return best, {f"{rate:g}": scores[rate][0] for rate in rates}

    def tuned(self, make: Callable[[float], Method], rates: Sequence[float]) -> MethodRow:
        """Choose a rate, then measure with it."""
        rate, sweep = self.choose(make, rates)
        return self.measure(make(rate), rate, sweep)


# ---------------------------------------------------------------- tables

Column = tuple[str, Callable[[MethodRow], str]]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.1f}"


ACCURACY: Column = ("accuracy %", lambda r: f"{100 * r.accuracy:.2f} ± {100 * r.spread:.2f}")
LOSS: Column = ("test loss", lambda r: "not finite" if r.loss is None else f"{r.loss:.3f}")
RATE: Column = ("rate", lambda r: f"{r.rate:.3g}")
STALENESS: Column = ("staleness", lambda r: _number(r.mean("staleness")))
SECONDS: Column = ("virtual s", lambda r: _number(r.mean("seconds")))


def table(result: Result, columns: Sequence[Column]) -> Table:
    """A row for each method, with the setting above and the checks below."""
    below = [f"{name}: {'yes' if holds else 'NO'}" for name, holds in result.checks.items()]
    shown = Table(title=result.setting, caption="\n".join(below) or None, title_justify="left")
    shown.add_column("method", no_wrap=True)
    for name, _ in columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for row in result.rows:
        shown.add_row(row.method, *(show(row) for _, show in columns))
    return shown
