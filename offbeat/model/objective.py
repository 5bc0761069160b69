"""What a batch costs: how model, batch and loss fit together, tried once before a run begins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError
from offbeat.model.checks import check_strangers, leaves, strangers
from offbeat.model.device import CPU, Device


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


class Found(msgspec.Struct):
    """What one step on the first batch has shown."""

    sparse: list[str] = []  # parameters with sparse gradients
    reads: bool = False  # whether the loss looks at the model's parameters itself


def tried(
    model: nn.Module, reader: Reader, loss: Loss, batch_size: int, device: Device = CPU
) -> Found:
    """Make one step on a batch without applying it; a misfit becomes a clear error.

    To be called where nothing else is done with model and data: it leaves its traces in both.
    """
    batch = device.batch(first_batch(reader, batch_size))
    device.move(model)
    before, statistics = dict(model.named_parameters()), _shapes(model)
    model.zero_grad()
    value = _try(model, batch, loss)
    _check_loss(value)
    _check_same(before, dict(model.named_parameters()), "parameters")
    _check_same(statistics, _shapes(model), "buffers")
    first = strangers(value, model)
    if first:
        check_strangers(first, strangers(_try(model, batch, loss), model))
    try:
        value.backward()
    except Exception as error:
        raise ConfigError(f"the loss has no gradient: {_say(error)}") from error
    trained = {name: p for name, p in before.items() if p.requires_grad and p.grad is not None}
    if not trained:
        raise ConfigError(
            "no parameter of the model gets a gradient from the loss: does something detach it?"
        )
    sparse = [name for name, p in trained.items() if p.grad is not None and p.grad.is_sparse]
    return Found(sparse, _reads(model, batch, loss))


def _shapes(model: nn.Module) -> dict[str, Any]:
    return {name: (buffer.shape, buffer.dtype) for name, buffer in model.named_buffers()}


def _check_same(before: Mapping[str, Any], after: Mapping[str, Any], kind: str) -> None:
    """The store holds what is there at the start, and nothing that comes later."""
    for name in [*before, *after]:
        one, other = before.get(name), after.get(name)
        same = one is other or (one == other and kind == "buffers")
        if not same:
            what = "made" if one is None else "removed" if other is None else "replaced"
            raise ConfigError(
                f"{name!r} is {what} while the model computes, and would not come back: make all "
                f"{kind} in __init__, or call the model once on a batch before training"
            )


def _reads(model: nn.Module, batch: Any, loss: Loss) -> bool:
    """Whether the loss of given outputs depends on the model all the same."""
    if isinstance(loss, BatchLoss):
        return True
    with torch.no_grad():
        output = model(batch[0])
    try:
        value = loss(output, batch[1])
    except Exception:  # it takes a derivative by what comes before the output
        return True
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(leaf) in own for leaf in leaves(value))


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
