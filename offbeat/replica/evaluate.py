"""How good the store's parameters are on a test set: mean loss, and accuracy for classifiers."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from offbeat.data import Collate, Reader
from offbeat.errors import ConfigError
from offbeat.replica.objective import BatchLoss, Loss


class Evaluator:
    """The test set, read in order; a model is put in evaluation mode for the while."""

    def __init__(
        self, data: Dataset[Any], loss: Loss, collate: Collate | None = None, batch: int = 512
    ):
        self.reader = Reader(data, shuffle=False, collate=collate)
        self.loss, self.batch = loss, batch
        self.differentiates = False  # whether the loss takes derivatives itself: found out in time
        if not len(self.reader):
            raise ConfigError("the test set is empty: leave test= out, or give it samples")

    def __call__(
        self, model: nn.Module, after: Callable[[], None] = lambda: None
    ) -> tuple[float | None, float | None]:
        """Mean loss and accuracy: None where the loss is no number, or outputs are no scores.

        `after` is called after each batch.
        """
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        total, right, labelled = 0.0, 0, 0
        for start in range(0, len(self.reader), self.batch):
            rows = torch.arange(start, min(start + self.batch, len(self.reader)))
            batch = self.reader.fetch(rows)
            output, value = self._computed(model, batch)
            classes = None if output is None else _classes(output, batch[1])
            if classes is not None:
                right += int((output.argmax(classes) == batch[1]).sum())
                labelled += batch[1].numel()
            total += value.item() * len(rows)
            after()
        for module, mode in modes:
            module.training = mode
        loss = total / len(self.reader)
        return loss if math.isfinite(loss) else None, right / labelled if labelled else None

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
