"""How good the store's parameters are on a test set: loss, accuracy, and a metric of the user's."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from offbeat.config.task import Metric
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
    metric: float | None = None


class Evaluator:
    """The test set, read in order; a model is put in evaluation mode for the while."""

    def __init__(
        self,
        data: Dataset[Any] | DataLoader[Any],
        loss: Loss,
        collate: Collate | None = None,
        batch: int = 512,
        metric: Metric | None = None,
        device: Device = CPU,
    ):
        self.reader, self.batch = in_order(data, collate), batch
        if isinstance(data, DataLoader):
            self.batch = taken(data)["batch_size"]
        self.data, self.loss, self.metric, self.device = data, loss, metric, device
        self.differentiates = False  # whether the loss takes derivatives itself: found out in time
        if not len(self.reader):
            raise ConfigError("the test set is empty: leave test= out, or give it samples")

    def __call__(self, model: nn.Module, after: Callable[[], None] = lambda: None) -> Scores:
        """Mean loss, accuracy, and the user's metric; `after` is called after each batch."""
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total, right, labelled = 0.0, 0, 0
        for start in range(0, len(self.reader), self.batch):
            lease = Lease(0, start, min(start + self.batch, len(self.reader)))
            batch = self.device.batch(self.reader.read(lease))
            output, value = self._computed(model, batch)
            classes = None if output is None else _classes(output, batch[1])
            if classes is not None:
                right += int((output.argmax(classes) == batch[1]).sum())
                labelled += batch[1].numel()
            total += value.item() * lease.samples
            after()
        metric = None if self.metric is None else self._metric(self.metric, model)
        for module, mode in modes:
            module.training = mode
        loss = total / len(self.reader)
        return Scores(
            loss if math.isfinite(loss) else None, right / labelled if labelled else None, metric
        )

    @torch.no_grad()
    def has_classes(self, model: nn.Module) -> bool:
        """Whether there will be an accuracy, as the first test sample shows."""
        if isinstance(self.loss, BatchLoss):
            return False
        batch = self.reader.read(Lease(0, 0, 1))
        return _classes(model.eval()(batch[0]), batch[1]) is not None

    @torch.no_grad()
    def _metric(self, metric: Metric, model: nn.Module) -> float | None:
        found = metric.fn(model, self.data)
        try:
            value = float(found)
        except (TypeError, ValueError, RuntimeError):
            raise RunError(
                f"the metric {metric.name} returned {type(found).__name__}: "
                "return one number for the whole test set"
            ) from None
        return value if math.isfinite(value) else None

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
