"""Durations and bandwidths as a person writes them, and as numbers."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from offbeat.errors import ConfigError

_NUMBER = r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"


_DURATION = re.compile(rf"({_NUMBER})\s*(us|ms|s|m|)")


_BANDWIDTH = re.compile(rf"({_NUMBER})\s*(?:([kKMGT]?)(B|bit)/s)?")


_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


_LONGEST = 1e9  # seconds, some thirty years


T = TypeVar("T")


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


def emulated(value: Sequence[float | str] | str, workers: int) -> tuple[float, ...]:
    """Least seconds of each worker's step, from text such as `20ms,20ms,80ms` or a list.

    One value serves for all.
    """
    if not isinstance(value, str | Sequence):
        raise ConfigError(f"emulate must be one time for each worker, not {value!r}: write '20ms'")
    words = value.split(",") if isinstance(value, str) else list(value)
    seconds = tuple(duration(word) for word in words)
    return seconds * workers if len(seconds) == 1 else seconds


@dataclass(frozen=True)
class LeastTime:
    """What an emulated step takes at the least; a lease of other than `samples` takes its share."""

    seconds: float = 0.0
    samples: int = 0  # 0: every lease takes as long

    def of(self, samples: int) -> float:
        return self.seconds * samples / self.samples if self.samples else self.seconds


AS_FAST_AS_CAN_BE = LeastTime()
