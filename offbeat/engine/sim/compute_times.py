"""Compute times: durations and bandwidths as text, distributions, and a worker's times by step."""

from abc import ABC, abstractmethod
from array import array
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from offbeat.config.text import nearest
from offbeat.config.units import _ratio, checked_seconds, duration, placed, read_text, real, show
from offbeat.errors import ConfigError

_BLOCK = 256
_WORD = 1 << 64


# ---------------------------------------------------------------- reading values


# ---------------------------------------------------------------- compute times


@dataclass(frozen=True)
class Distribution(ABC):
    """How long one step takes on one worker; every field but `sigma` is a time in seconds."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checked_seconds(
                f"the {name} of a compute time", value, positive=name not in ("std", "sigma")
            )

    @property
    def recorded(self) -> tuple[float, ...]:
        """The times themselves, where nothing is random; they repeat for ever."""
        return ()

    @abstractmethod
    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        """`count` independent compute times."""

    def slowed(self, factor: float) -> Self:
        """The same shape, with every time `factor` times as long."""
        times = {name: value for name, value in vars(self).items() if name != "sigma"}
        return replace(self, **{name: value * factor for name, value in times.items()})

    def __str__(self) -> str:
        """The string form, which `distribution` reads back."""
        words = [repr(float(v)) if name == "sigma" else show(v) for name, v in vars(self).items()]
        return f"{type(self).__name__.lower()}:{','.join(words)}"

    def to_toml(self) -> str:
        return f'"{self}"'


@dataclass(frozen=True)
class Constant(Distribution):
    """Every step takes `seconds`."""

    seconds: float

    @property
    def recorded(self) -> tuple[float, ...]:
        return (float(self.seconds),)

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.full(count, self.seconds, dtype=np.float64)

    def __str__(self) -> str:
        return show(self.seconds)


@dataclass(frozen=True)
class Normal(Distribution):
    """Steps scatter evenly around `mean`; none is shorter than a hundredth of it."""

    mean: float
    std: float

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.maximum(generator.normal(self.mean, self.std, count), self.mean / 100)


@dataclass(frozen=True)
class LogNormal(Distribution):
    """Steps take about `median`, now and then much more: the logarithm scatters by `sigma`."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        sigma = real("sigma", self.sigma, "write for example 0.3")
        if not 0 <= sigma <= 10:  # beyond, times outgrow what a float holds
            raise ConfigError(
                f"sigma must lie between 0 and 10, got {sigma}; write for example 0.3"
            )
        super().__post_init__()

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.median * generator.lognormal(0.0, self.sigma, count)


@dataclass(frozen=True)
class Exponential(Distribution):
    """Steps end at a constant rate, so that their lengths vary as much as their `mean`."""

    mean: float

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return generator.exponential(self.mean, count)


@dataclass(frozen=True)
class Trace(Distribution):
    """Recorded times, used in order and then from the start again."""

    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        times = [
            checked_seconds(f"time {i} of a trace", s, positive=True)
            for i, s in enumerate(self.seconds, 1)
        ]
        object.__setattr__(self, "seconds", tuple(times))
        if not times:
            raise ConfigError("a trace needs at least one compute time, got none; write [0.02]")

    @property
    def recorded(self) -> tuple[float, ...]:
        return self.seconds

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.resize(np.array(self.seconds), count)

    def slowed(self, factor: float) -> Self:
        return replace(self, seconds=tuple(value * factor for value in self.seconds))

    def __str__(self) -> str:
        """A label only: a trace holds its times, not the file that they came from."""
        return f"trace of {len(self.seconds)}"

    def to_toml(self) -> str:
        return f"[{', '.join(map(repr, self.seconds))}]"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The times in a text file, one on each line; empty lines and `#` comments are skipped."""
        lines = [line.partition("#")[0].strip() for line in read_text(path).splitlines()]
        numbered = [(number, line) for number, line in enumerate(lines, 1) if line]
        times = [placed(f"{path}, line {n}", duration, line) for n, line in numbered]
        return placed(str(path), cls, tuple(times))


NAMED: dict[str, type[Distribution]] = {
    "normal": Normal,
    "lognormal": LogNormal,
    "exponential": Exponential,
}
_EXAMPLES = {
    "normal": "normal:20ms,2ms",
    "lognormal": "lognormal:20ms,0.3",
    "exponential": "exponential:20ms",
    "trace": "trace:FILE",
}


def distribution(value: Any, folder: Path | None = None) -> Distribution:
    """A distribution from its string form, a number of seconds, or a list of recorded times.

    `trace:FILE` is looked up from `folder`, by default the current one.
    """
    if isinstance(value, Distribution):
        return value
    if isinstance(value, list | tuple):
        return Trace(tuple(duration(item) for item in value))
    if not isinstance(value, str) or ":" not in value:
        return Constant(duration(value))
    name, _, rest = (part.strip() for part in value.partition(":"))
    if name == "trace":
        return Trace.read((folder or Path()) / rest)
    if name not in NAMED:
        raise ConfigError(
            f'"{name}" is no distribution{nearest(name, _EXAMPLES)}; '
            f"write a duration such as 20ms, or {', '.join(_EXAMPLES.values())}"
        )
    words, names = rest.split(","), [field.name for field in fields(NAMED[name])]
    if len(words) != len(names):
        raise ConfigError(f'"{value}" must give {" and ".join(names)}; write "{_EXAMPLES[name]}"')
    reads = [_ratio if field == "sigma" else duration for field in names]
    return NAMED[name](*(read(word) for read, word in zip(reads, words, strict=True)))


class ComputeTimes:
    """One worker's compute times by step: `pace[k]` is the same whatever was asked before."""

    __slots__ = ("_block", "_distribution", "_key", "_recorded", "_times")

    def __init__(self, distribution: Distribution, seed: int, worker: int) -> None:
        for what, value in (("seed", seed), ("worker", worker)):
            if not isinstance(value, int) or not 0 <= value < _WORD:
                raise ConfigError(
                    f"the {what} of a pace must be a whole number from 0 to 2**64 - 1, "
                    f"got {value!r}; write for example {what}=0"
                )
        self._distribution = distribution
        self._recorded = distribution.recorded
        self._key = seed | worker << 64
        self._block = -1
        self._times = array("d")

    def __getitem__(self, step: int) -> float:
        if step < 0:
            raise IndexError(f"steps count from 0, got {step}")
        if self._recorded:
            return self._recorded[step % len(self._recorded)]
        block = step // _BLOCK
        if block != self._block:
            # Philox turns (key, counter) into bits without any state: the key says whose stream
            # it is, and the counter's high words say which block, 2**64 counts before the next.
            bits = np.random.Philox(key=self._key, counter=block << 64)
            drawn = self._distribution.draw(np.random.Generator(bits), _BLOCK)
            self._times = array("d", drawn.tobytes())
            self._block = block
        return self._times[step % _BLOCK]
