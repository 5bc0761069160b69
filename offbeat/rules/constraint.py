"""What holds for parameters after every update: elements within bounds, rows of limited norm."""

import fnmatch
import math
import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.config.text import nearest, split_arguments
from offbeat.errors import ConfigError

_SMALL = 1e-7  # against a norm that rounding leaves above its limit; torch.renorm has the same


@dataclass(frozen=True)
class Constraint:
    """A limit on parameters, by patterns of their names; without patterns, on all of them.

    It looks at one tensor at a time, so it is the same however the store is sharded.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.names:
            if not isinstance(name, str) or not name or set(name) & set(",=() "):
                raise ConfigError(
                    f"{self} takes patterns of parameter names such as 'critic.*', not {name!r}"
                )

    def among(self, names: Iterable[str]) -> list[str]:
        """Those that are meant."""
        patterns = self.names or ("*",)
        return [n for n in names if any(fnmatch.fnmatchcase(n, pattern) for pattern in patterns)]

    @abstractmethod
    def apply(self, tensor: Tensor) -> None:
        """Change `tensor` as little as it takes."""

    def _text(self, *words: str) -> str:
        return f"{type(self).__name__.lower()}({','.join([*words, *self.names])})"


@dataclass(frozen=True, init=False)
class Clamp(Constraint):
    """Every element lies between `low` and `high`; `math.inf` leaves a side open."""

    low: float
    high: float

    def __init__(self, low: float, high: float, *names: str):
        for key, value in (("low", low), ("high", high)):
            object.__setattr__(self, key, _number(f"the {key} of ob.Clamp", value))
        object.__setattr__(self, "names", names)
        if not self.low <= self.high:
            raise ConfigError(f"ob.Clamp({low!r}, {high!r}): the lower bound comes first")
        self.__post_init__()

    def apply(self, tensor: Tensor) -> None:
        tensor.clamp_(self.low, self.high)

    def __str__(self) -> str:
        return self._text(repr(self.low), repr(self.high))


@dataclass(frozen=True, init=False)
class MaxNorm(Constraint):
    """The norm of each row (slice along `dim`) is at most `limit`; of a vector, its own norm.

    `dim=None` limits the norm of each whole tensor.
    """

    limit: float
    dim: int | None

    def __init__(self, limit: float, *names: str, dim: int | None = 0):
        object.__setattr__(self, "limit", _number("the limit of ob.MaxNorm", limit))
        object.__setattr__(self, "dim", dim)
        object.__setattr__(self, "names", names)
        if not self.limit > 0:
            raise ConfigError(f"the limit of ob.MaxNorm must be above 0, not {limit!r}")
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise ConfigError(f"dim of ob.MaxNorm is 0, 1, ... or None, not {dim!r}")
        self.__post_init__()

    def apply(self, tensor: Tensor) -> None:
        others = None
        if self.dim is not None and tensor.dim() > max(1, self.dim):
            others = [d for d in range(tensor.dim()) if d != self.dim]
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        wide = torch.float32 if narrow else tensor.dtype
        norm = torch.linalg.vector_norm(tensor, dim=others, keepdim=True, dtype=wide)
        scale = torch.where(norm > self.limit, self.limit / (norm + _SMALL), torch.ones_like(norm))
        tensor.mul_(scale.to(tensor.dtype))

    def __str__(self) -> str:
        return self._text(repr(self.limit), f"dim={self.dim}")


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ConfigError(f"{what} must be a number, not {value!r}")
    return float(value)


def parse(text: str) -> Constraint:
    """Read what `str` writes: `clamp(-0.01,0.01,critic.*)`, `maxnorm(3.0,dim=0)`."""
    found = re.fullmatch(r"(clamp|maxnorm)\((.*)\)", text.strip())
    if found is None:
        raise ConfigError(
            f"{text!r} is no constraint: write clamp(-0.01,0.01,critic.*) or maxnorm(3.0,head.*)"
        )
    words, named = split_arguments(found[2], text)
    try:
        if found[1] == "clamp" and not named:
            low, high, *names = words
            return Clamp(float(low), float(high), *names)
        limit, *names = words
        dim = named.pop("dim", "0")
        if found[1] == "maxnorm" and not named:
            return MaxNorm(float(limit), *names, dim=None if dim == "None" else int(dim))
    except ValueError:
        pass
    raise ConfigError(f"{text!r}: write clamp(low,high,names...) or maxnorm(limit,dim=0,names...)")


def constraints_of(value: Any, model: nn.Module) -> tuple[Constraint, ...]:
    """What `constrain=` was given, each checked against the parameters that are trained."""
    if value is None:
        return ()
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    found = tuple(parse(one) if isinstance(one, str) else one for one in several)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for one in found:
        if not isinstance(one, Constraint):
            raise ConfigError(
                "constrain takes ob.Clamp(-0.01, 0.01, 'critic.*'), ob.MaxNorm(3.0) or a list of "
                f"such, not {one!r}"
            )
        for pattern in one.names:
            if not fnmatch.filter(trained, pattern):
                raise ConfigError(
                    f"{one}: the model has no trainable parameter {pattern!r}"
                    f"{nearest(pattern, trained)}"
                )
    return found


def refuse_rows(limits: Sequence[Constraint], discipline: str, layout: str) -> None:
    """At a worker with local steps a norm needs whole rows, which `layout` splits."""
    if any(isinstance(limit, MaxNorm) for limit in limits):
        raise ConfigError(
            f"{discipline} makes local steps, and with {layout} no process has a whole row: use "
            "ob.Clamp, or a discipline that sends gradients, or tp=1"
        )
