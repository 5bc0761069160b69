"""How good the store's parameters are on a test set: loss, accuracy, metrics of the user's."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from offbeat.config.task import PERPLEXITY, Metric
from offbeat.data.lease import Lease
from offbeat.data.loader import in_order, taken
from offbeat.data.reader import Collate
from offbeat.errors import ConfigError, RunError
from offbeat.model.device import CPU, Device
from offbeat.model.objective import BatchLoss, Loss


class Scores(NamedTuple):
    """What a test found: None where the loss is no number, or outputs are no class scores."""

    loss: float | None
    accuracy: float | None
    metric: float | None
    metrics: dict[str, float | None]  # others beside it


class Seen:
    """What a metric has seen of one test."""

    def __init__(self, metric: Metric):
        self.metric = metric
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        if metric.counts:
            metric.fn.reset()

    @torch.no_grad()
    def batch(self, output: Any, batch: Any) -> None:
        """One more batch, with what the model has put out for it."""
        if not self.metric.sees_outputs:
            return
        output = output.detach() if isinstance(output, Tensor) else output
        if self.metric.counts:
            self.metric.fn.update(output, batch[1])
            return
        for seen, value in ((self.outputs, output), (self.targets, batch[1])):
            if not isinstance(value, Tensor):
                raise RunError(
                    f"the metric {self.metric.name} is a function of all outputs and targets, "
                    f"and these are {type(value).__name__}, not tensors: use an object with "
                    "update, compute and reset, or ob.Metric(name, fn) with fn(model, test)"
                )
            seen.append(value)

    @torch.no_grad()
    def value(self, model: nn.Module, data: Any, loss: float) -> float | None:
        """The number, after all batches; None where it is not finite."""
        metric = self.metric
        if metric.counts:
            found = metric.fn.compute()
        elif metric.on == "outputs":
            found = metric.fn(torch.cat(self.outputs), torch.cat(self.targets))
        elif metric.on == "loss":
            with suppress(OverflowError):
                return _finite(float(metric.fn(loss)))
            return None
        else:
            found = metric.fn(model, data)
        try:
            return _finite(float(found))
        except (TypeError, ValueError, RuntimeError):
            raise RunError(
                f"the metric {metric.name} returned {type(found).__name__}: "
                "return one number for the whole test set"
            ) from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Evaluator:
    """The test set, read in order; a model is put in evaluation mode for the while."""

    def __init__(
        self,
        data: Dataset[Any] | DataLoader[Any],
        loss: Loss,
        collate: Collate | None = None,
        batch: int = 512,
        metrics: Sequence[Metric] = (),
        device: Device = CPU,
    ):
        self.reader, self.batch = in_order(data, collate), batch
        if isinstance(data, DataLoader):
            self.batch = taken(data)["batch_size"]
        self.data, self.loss, self.metrics, self.device = data, loss, metrics, device
        self.differentiates = False  # whether the loss takes derivatives itself: found out in time
        if not len(self.reader):
            raise ConfigError("the test set is empty: leave test= out, or give it samples")
        for metric in metrics:
            if metric.sees_outputs and isinstance(loss, BatchLoss):
                raise ConfigError(
                    f"the metric {metric.name} is computed from outputs, and a BatchLoss keeps "
                    "them to itself: use ob.Metric(name, fn) with fn(model, test)"
                )

    def __call__(self, model: nn.Module, after: Callable[[], None] = lambda: None) -> Scores:
        """Mean loss, accuracy, and the user's metrics; `after` is called after each batch."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total, right, labelled = 0.0, 0, 0
        seen, tokens = [Seen(metric) for metric in self.metrics], False
        for start in range(0, len(self.reader), self.batch):
            lease = Lease(0, start, min(start + self.batch, len(self.reader)))
            batch = self.device.batch(self.reader.read(lease))
            output, value = self._computed(model, batch)
            classes = None if output is None else _classes(output, batch[1])
            if classes is not None:
                right += int((output.argmax(classes) == batch[1]).sum())
                labelled += batch[1].numel()
            if not start:
                tokens = classes is not None and _next_token(output, batch[1], classes, value)
            for one in seen:
                one.batch(output, batch)
            total += value.item() * lease.samples
            after()
        loss = total / len(self.reader)
        found = {one.metric.name: one.value(model, self.data, loss) for one in seen}
        for module, mode in modes:
            module.training = mode
        first = found.pop(self.metrics[0].name) if self.metrics else None
        if tokens and all(metric.name != PERPLEXITY.name for metric in self.metrics):
            found[PERPLEXITY.name] = Seen(PERPLEXITY).value(model, self.data, loss)
        accuracy = right / labelled if labelled else None
        return Scores(loss if math.isfinite(loss) else None, accuracy, first, found)

    @torch.no_grad()
    def has_classes(self, model: nn.Module) -> bool:
        """Whether there will be an accuracy, as the first test sample shows."""
        if isinstance(self.loss, BatchLoss):
            return False
        batch = self.reader.read(Lease(0, 0, 1))
        return _classes(model.eval()(batch[0]), batch[1]) is not None

    def _computed(self, model: nn.Module, batch: Any) -> tuple[Any, Tensor]:
        """What the model puts out, if the loss takes that, and the loss."""
        try:
            with torch.set_grad_enabled(self.differentiates):
                if isinstance(self.loss, BatchLoss):
                    return None, self.loss.fn(model, batch)
                output = model(batch[0])
                return output, self.loss(output, batch[1])
        except RuntimeError:
            if self.differentiates:
                raise
            self.differentiates = True
            return self._computed(model, batch)


def _classes(output: Any, target: Any) -> int | None:
    """Which dimension of the output holds class scores for whole-number targets, if one does."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return None
    if target.is_floating_point() or target.is_complex() or output.dim() != target.dim() + 1:
        return None
    if output.shape[:1] + output.shape[2:] == target.shape:
        return 1  # (N, C, ...), as PyTorch's losses have it
    return -1 if output.shape[:-1] == target.shape else None


@torch.no_grad()
def _next_token(output: Tensor, target: Tensor, classes: int, value: Tensor) -> bool:
    """Whether the loss is a language model's: the cross entropy of a token at each position."""
    if target.dim() != 2:
        return False
    entropy = functional.cross_entropy(output.movedim(classes, 1), target)
    return math.isclose(entropy.item(), value.item(), rel_tol=1e-4)
