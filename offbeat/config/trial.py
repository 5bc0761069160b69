"""One batch tried before a run begins, so that it leaves no trace."""

import io
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn

from offbeat.config.job import Job, Training
from offbeat.data.lease import Lease
from offbeat.data.prefetch import cannot_draw
from offbeat.data.reader import Reader
from offbeat.engine.local.process import fork, startable
from offbeat.engine.signals import children_kept
from offbeat.engine.spawn import where
from offbeat.errors import ConfigError, RunError
from offbeat.model.checks import made_of_torch
from offbeat.model.copies import same_chance
from offbeat.model.copies import tried as copied
from offbeat.model.device import CPU, Device, autograd_begun
from offbeat.model.objective import BatchLoss, Found, Loss, tried
from offbeat.model.table import total_bytes
from offbeat.split.part import pieces_of

T = TypeVar("T")
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
LARGE = 1 << 24  # bytes of a model whose trial may need more memory than there is


def try_batch(
    model: nn.Module, reader: Reader, loss: Loss, batch_size: int, device: Device = CPU
) -> Found:
    """Compute one step and tell what it showed; whatever does not fit becomes a clear error.

    Nobody knows what a user's own code does beside computing, so it gets a process of its own.
    What is made of PyTorch's parts alone leaves buffers, gradients and generators, which can be
    put back, and that is sooner done than forking. Not where PyTorch knows accelerators: with the
    first backward pass it starts threads for them, and nothing of that can be forked.
    """
    if device.in_use or autograd_begun():  # a child could do nothing of all that
        with copied(model) as own, device.entered():
            return tried(own, reader, loss, batch_size, device)
    known = made_of_torch(model, loss) and cannot_draw(reader)
    simple = known and torch.accelerator.current_accelerator() is None
    if simple and total_bytes(model.parameters()) < LARGE:
        return _tried_here(model, reader, loss, batch_size)
    with children_kept():
        return _tried(model, reader, loss, batch_size, device)


def _tried_here(model: nn.Module, reader: Reader, loss: Loss, batch_size: int) -> Found:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        with same_chance(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return tried(model, reader, loss, batch_size)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _tried(model: nn.Module, reader: Reader, loss: Loss, batch_size: int, device: Device) -> Found:
    def step() -> Found:
        device.enter()
        return tried(model, reader, loss, batch_size, device)

    return _in_child(step, Found)


def apart(what: Callable[[], T], kind: type[T]) -> T:
    """Do what makes a backward pass where nothing stays of it that could not be forked."""
    if autograd_begun() or torch.accelerator.current_accelerator() is None:
        return what()
    with children_kept():
        return _in_child(what, kind)


def _in_child(what: Callable[[], T], kind: type[T]) -> T:
    answer, telling = os.pipe()
    try:
        with startable("the process that tries the first batch"):
            child = fork("offbeat trial", partial(_tell, telling, what), torch.get_num_threads())
    except RunError:
        os.close(answer)
        raise
    finally:
        os.close(telling)
    with open(answer, "rb") as pipe:
        told = pipe.read()
    words = child.reap()
    if words is not None:
        raise ConfigError(words.message + where(words.trace))
    if not told:
        raise ConfigError(
            f"the process that tried the first batch ended with status {child.status}: is there "
            "memory enough for one step?"
        )
    return msgspec.json.decode(told, type=kind)


def _tell(telling: int, what: Callable[[], Any]) -> None:
    # What a step warns of and prints comes with the first real one.
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = what()
    with open(telling, "wb") as pipe:
        pipe.write(msgspec.json.encode(found))


# ---------------------------------------------------------------- samples that are alone


def check_single_samples(job: Job, loss: Loss | None) -> None:
    """Refuse a run in which one sample is computed alone and batch norm refuses that.

    It may be all of the last batch of an epoch, or a microbatch of any.

    A script computes its loss itself: there the model is tried on the first of what a batch has.
    """
    numbers = job.content
    if not any(isinstance(m, NORMS) and m.training for m in numbers.model.modules()):
        return
    found = _uneven_alone(job) if job.shares.uneven else _alone(job)
    if found is None:
        return
    first = Lease(0, 0, 1)
    with copied(numbers.model) as model, torch.no_grad():
        numbers.reader.reseed(first)
        error = _error(model, numbers.reader.read(first), loss)
    if error is not None:
        what, remedy = found
        raise ConfigError(
            f"{what}, and the model's batch norm refuses that ({error}): write {remedy}"
        )


def _alone(job: Job) -> tuple[str, str] | None:
    """Which samples are computed alone where leases are batches, and what to do about it."""
    numbers, rest = job.content, job.samples % job.batch_size
    if job.samples >= job.batch_size and _smallest(numbers, job.batch_size) == 1:
        what = f"of the {job.batch_size} samples of a batch, some are computed alone"
        return what, "fewer microbatches, or a larger batch_size"
    if not rest or _smallest(numbers, rest) > 1:
        return None
    what = "one sample" if rest == 1 else f"{rest} samples, of which one is computed alone"
    remedy = "drop_last=True to leave such samples out, or another batch_size"
    return f"the last batch of every epoch has {what}", remedy


def _uneven_alone(job: Job) -> tuple[str, str] | None:
    """The same where leases have any size from the least on."""
    fewest, most = job.lease_range
    if all(_smallest(job.content, samples) > 1 for samples in range(fewest, most + 1)):
        return None
    what = f"with shares={job.shares} a batch may have a sample that is computed alone"
    if job.content.accumulate > 1:
        return what, "accumulate=1, or leave shares out"
    return what, f"shares='{replace(job.shares, least=2 * job.unit)}'"  # type: ignore[type-var]


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
