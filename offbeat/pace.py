"""Compute times: durations and bandwidths as text, distributions, and a worker's times by step."""

import math
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConfigError
from offbeat.spelling import nearest

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_DURATION = re.compile(rf"({_NUMBER})\s*(us|ms|s|m|)")
_BANDWIDTH = re.compile(rf"({_NUMBER})\s*(?:([kKMGT]?)(B|bit)/s)?")
_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BLOCK = 256
_WORD = 1 << 64
_LONGEST = 1e9  # seconds, some thirty years
T = TypeVar("T")


# ---------------------------------------------------------------- reading values


def real(what: str, value: object, remedy: str) -> float:
    """`value` as a float; strings and booleans are no numbers, and no float holds 10**400."""
    if isinstance(value, int | float | np.floating) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise ConfigError(f"{what} must be a number, got {value!r}; {remedy}")


def checked_seconds(what: str, value: object, *, positive: bool = False) -> float:
    remedy = "write seconds, such as 0.02"
    seconds = real(what, value, remedy)
    if not math.isfinite(seconds):
        raise ConfigError(f"{what} must be finite, got {value!r}; {remedy}")
    if seconds < 0 or (positive and seconds == 0):
        bound = "above zero" if positive else "zero or more"
        raise ConfigError(f"{what} must be {bound}, got {value!r}; {remedy}")
    if seconds > _LONGEST:
        raise ConfigError(f"{what} must be at most {_LONGEST:g} seconds, got {value!r}; {remedy}")
    return seconds


def duration(value: str | float) -> float:
    """Seconds, from a number of seconds or text such as `250us`, `20ms`, `1.5s` or `2m`."""
    if not isinstance(value, str):
        return checked_seconds("a duration", value)
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise ConfigError(f'"{value}" is no duration; write for example "20ms", "1.5s" or 0.02')
    # Dividing, unlike multiplying by 1e-3, makes "20ms" the very float that 0.02 is.
    number = float(match[1]) / {"us": 1e6, "ms": 1e3}.get(match[2], 1.0)
    return checked_seconds(f'the duration "{value}"', number * 60 if match[2] == "m" else number)


def bandwidth(value: str | float) -> float:
    """Bytes a second, from a number or text such as `100MB/s`, `1GB/s`, `1Gbit/s` or `inf`."""
    remedy = 'write for example "100MB/s", "1Gbit/s", "inf" or a number of bytes a second'
    if not isinstance(value, str):
        rate = real("a bandwidth", value, remedy)
    elif value.strip() == "inf":
        rate = math.inf
    elif match := _BANDWIDTH.fullmatch(value.strip()):
        rate = float(match[1]) * _PREFIX[match[2] or ""] / (8 if match[3] == "bit" else 1)
    else:
        raise ConfigError(f'"{value}" is no bandwidth; {remedy}')
    if not rate > 0:
        raise ConfigError(f"a bandwidth must be above zero, got {value!r}; {remedy}")
    return rate


def _ratio(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f'"{text}" is no number; write for example 0.3') from None


def show(seconds: float) -> str:
    """A short duration text that reads back as exactly `seconds`."""
    unit, per = ("s", 1.0) if seconds >= 1 else ("ms", 1e3) if seconds >= 1e-3 else ("us", 1e6)
    text = f"{seconds * per:.12g}{unit}" if seconds else "0s"
    return text if duration(text) == seconds else f"{float(seconds)!r}s"


def placed(place: str, build: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What `build` makes; where it refuses, the error also says where the value was written."""
    try:
        return build(*arguments, **named)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def read_text(path: Path) -> str:
    # A device may have no end, and a pipe no beginning.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"cannot read {path}: it is no regular file; write the path of one")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        why = f"{error.strerror}; write the path of an existing file"
    except UnicodeDecodeError:
        why = "it is not text in UTF-8; save it as UTF-8"
    raise ConfigError(f"cannot read {path}: {why}")


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


class Pace:
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


def emulated(value: Sequence[float | str] | str, workers: int) -> tuple[float, ...]:
    """Least seconds of each worker's step, from text such as `20ms,20ms,80ms` or a list.

    One value serves for all.
    """
    if not isinstance(value, str | Sequence):
        raise ConfigError(f"emulate must be one time for each worker, not {value!r}: write '20ms'")
    words = value.split(",") if isinstance(value, str) else list(value)
    seconds = tuple(duration(word) for word in words)
    return seconds * workers if len(seconds) == 1 else seconds
