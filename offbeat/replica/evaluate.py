"""How good the store's parameters are on a test set: mean loss, and accuracy for classifiers."""

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
        if not len(self.reader):
            raise ConfigError("the test set is empty: leave test= out, or give it samples")

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> tuple[float, float | None]:
        """Mean loss and accuracy; accuracy is None where outputs are not class scores."""
        model.eval()
        total, right, labelled = 0.0, 0, 0
        for start in range(0, len(self.reader), self.batch):
            rows = torch.arange(start, min(start + self.batch, len(self.reader)))
            batch = self.reader.fetch(rows)
            if isinstance(self.loss, BatchLoss):
                value = self.loss.fn(model, batch)
            else:
                output = model(batch[0])
                value = self.loss(output, batch[1])
                if _classifies(output, batch[1]):
                    right += int((output.argmax(1) == batch[1]).sum())
                    labelled += batch[1].numel()
            total += value.item() * len(rows)
        return total / len(self.reader), right / labelled if labelled else None


def _classifies(output: Any, target: Any) -> bool:
    """Class scores (N, C, ...) against whole-number labels (N, ...)."""
    if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
        return False
    whole = not target.is_floating_point() and not target.is_complex()
    fits = output.dim() == target.dim() + 1 and output.shape[:1] == target.shape[:1]
    return whole and fits and output.shape[2:] == target.shape[1:]
