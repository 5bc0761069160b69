"""Batches that are computed one sample at a time: whether the model takes them is tried before."""

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
    """Refuse a run in which one sample is computed alone and batch norm refuses that.

    It may be all of the last batch of an epoch, or a microbatch of any.

    A script computes its loss itself: there the model is tried on the first of what a batch has.
    """
    numbers = job.content
    rest = job.samples % job.batch_size
    always = job.samples >= job.batch_size and _smallest(numbers, job.batch_size) == 1
    if not always and (not rest or _smallest(numbers, rest) > 1):
        return
    if not any(isinstance(m, NORMS) and m.training for m in numbers.model.modules()):
        return
    first = Lease(0, 0, 1)
    with tried(numbers.model) as model, torch.no_grad():
        numbers.reader.reseed(first)
        error = _error(model, numbers.reader.read(first), loss)
    if error is not None and always:
        raise ConfigError(
            f"of the {job.batch_size} samples of a batch, some are computed alone, and the model's "
            f"batch norm refuses that ({error}): write fewer microbatches, or a larger batch_size"
        )
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
