"""The last batch of an epoch: whether the model takes it is found out before the first step."""

from typing import Any

import torch
from torch import nn

from offbeat.config.job import Job, Training
from offbeat.data.lease import Lease
from offbeat.errors import ConfigError
from offbeat.model.copies import tried
from offbeat.model.objective import BatchLoss, Loss
from offbeat.split.part import pieces_of

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check(job: Job, loss: Loss | None) -> None:
    """Refuse a run in which the last batch of an epoch has one sample and batch norm refuses it.

    A script computes its loss itself: there the model is tried on the first of what a batch has.
    """
    numbers = job.content
    rest = job.samples % job.batch_size
    if not rest or _smallest(numbers, rest) > 1:
        return
    if not any(isinstance(m, NORMS) and m.training for m in numbers.model.modules()):
        return
    first = Lease(0, 0, 1)
    with tried(numbers.model) as model, torch.no_grad():
        numbers.reader.reseed(first)
        error = _error(model, numbers.reader.read(first), loss)
    if error is not None:
        what = "" if rest == 1 else f" {rest} samples, of which one is computed alone,"
        what = what or " one sample,"
        raise ConfigError(
            f"the last batch of every epoch has{what} and the model's batch norm refuses that "
            f"({error}): write drop_last=True to leave such samples out, or another batch_size"
        )


def _smallest(numbers: Training, samples: int) -> int:
    """Of the pieces in which a batch of so many samples is computed."""
    if numbers.cut is not None:
        return min(stop - start for start, stop in pieces_of(samples, numbers.cut.layout.pieces))
    size = -(-samples // numbers.accumulate)
    return samples % size or size


def _error(model: nn.Module, batch: Any, loss: Loss | None) -> Exception | None:
    try:
        if isinstance(loss, BatchLoss):
            loss.fn(model, batch)
        elif isinstance(batch, tuple | list) and batch:
            model(batch[0])
    except ValueError as error:  # as batch norm does; whatever else a script's model takes
        return error
    except Exception:
        return None
    return None
