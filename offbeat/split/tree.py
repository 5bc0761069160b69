"""What travels between blocks: tensors, alone or in tuples, lists and dicts of any depth."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from offbeat.errors import ConfigError


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in `value`, in a fixed order; what is no tensor is left out."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors(item)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value` with every tensor changed and the rest as it was."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return type(value)((key, mapped(change, item)) for key, item in value.items())
    if isinstance(value, tuple | list):
        items = [mapped(change, item) for item in value]
        # A named tuple takes its fields one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def size(value: Any) -> int:
    """Bytes of all tensors in `value`."""
    return sum(tensor.nbytes for tensor in tensors(value))


def trained_size(value: Any) -> int:
    """Bytes of the gradients that come back for `value`."""
    return sum(tensor.nbytes for tensor in tensors(value) if tensor.requires_grad)


def batch_size(sample: Any) -> int:
    """Samples in a batch: the common first dimension of its tensors."""
    found = list(tensors(sample))
    if not found or any(tensor.dim() == 0 for tensor in found):
        raise ConfigError(
            "the sample must be what the model takes for one batch: a tensor, or a tuple, list or "
            "dict of tensors, each with a first dimension of samples"
        )
    sizes = {len(tensor) for tensor in found}
    if len(sizes) > 1:
        raise ConfigError(
            f"the tensors of the sample have {' and '.join(map(str, sorted(sizes)))} samples: "
            "give all the same first dimension"
        )
    return sizes.pop()


def head(sample: Any, count: int) -> Any:
    """The first `count` samples of a batch."""
    return mapped(lambda tensor: tensor[:count], sample)
