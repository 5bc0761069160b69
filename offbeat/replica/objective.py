"""What a batch costs: how model, batch and loss fit together, checked once before a run begins."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.data import Reader
from offbeat.errors import ConfigError
from offbeat.lease import Lease


@dataclass(frozen=True)
class BatchLoss:
    """A loss over a whole batch, `fn(model, batch)`, for batches that are not (inputs, target)."""

    fn: Callable[[nn.Module, Any], Tensor]


Loss = Callable[..., Tensor] | BatchLoss


def cost(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of `batch`: `loss(model(inputs), target)`, or a BatchLoss's own way."""
    if isinstance(loss, BatchLoss):
        return loss.fn(model, batch)
    inputs, target = batch
    return loss(model(inputs), target)


# What `backward` hands over to when all its questions are answered; should a PyTorch not have it
# by this name, the questions are asked.
_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)


def backward(loss: Tensor) -> None:
    """As `loss.backward()`; for a plain number without its questions, 6 µs of a small step."""
    plain = type(loss) is Tensor and not loss.dim() and loss.requires_grad
    if not plain or _ENGINE is None:
        loss.backward()  # type: ignore[no-untyped-call]
        return
    _ENGINE.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def check(model: nn.Module, reader: Reader, loss: Loss, batch_size: int) -> None:
    """Try one batch without touching model or random state; a misfit becomes a clear error."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        batch = first_batch(reader, batch_size)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        try:
            _check_loss(_try(model, batch, loss))
        finally:
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])


def first_batch(reader: Reader, batch_size: int) -> Any:
    """A batch as a worker would read it, to try things on."""
    try:
        return reader.read(Lease(0, 0, min(batch_size, len(reader))))
    except Exception as error:
        raise ConfigError(
            f"the first batch cannot be read from the dataset ({_say(error)}): "
            "make samples of equal shape, or pass collate="
        ) from error


def _try(model: nn.Module, batch: Any, loss: Loss) -> Any:
    if isinstance(loss, BatchLoss):
        return loss.fn(model, batch)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError(
            f"a batch is {_shape(batch)}, not (inputs, target): "
            "pass loss=ob.BatchLoss(fn) with fn(model, batch)"
        )
    try:
        output = model(batch[0])
    except Exception as error:
        raise ConfigError(
            f"the model does not take inputs of {_shape(batch[0])}: {_say(error)}"
        ) from error
    try:
        return loss(output, batch[1])
    except Exception as error:
        raise ConfigError(
            f"the model's output of {_shape(output)} does not fit the loss with targets of "
            f"{_shape(batch[1])}: {_say(error)}"
        ) from error


def _check_loss(value: Any) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise ConfigError(
            f"the loss must be one number, but it is {_shape(value)}: "
            "reduce it, for example with .mean()"
        )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} items"
    return f"type {type(value).__name__}"


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip()
