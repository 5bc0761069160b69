"""What befalls a worker, a host or a link at a moment of virtual time, and for how long."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from offbeat.config.units import checked_seconds, show
from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Pause:
    """The worker stands still from `at`, for `lasting` seconds, and then goes on."""

    at: float
    lasting: float

    def __post_init__(self) -> None:
        checked_seconds("the start of a pause", self.at)
        checked_seconds("the length of a pause", self.lasting, positive=True)

    @property
    def until(self) -> float:
        return self.at + self.lasting


@dataclass(frozen=True)
class Failure:
    """The worker dies at `at`; it returns that many seconds later, or with None never."""

    at: float
    returns_after: float | None = None

    def __post_init__(self) -> None:
        checked_seconds("the time of a failure", self.at)
        if self.returns_after is not None:
            checked_seconds(
                "the time until a failed worker returns", self.returns_after, positive=True
            )

    @property
    def until(self) -> float:
        return math.inf if self.returns_after is None else self.at + self.returns_after


@dataclass(frozen=True)
class Outage:
    """Nothing gets through from `at`, for `lasting` seconds; then what was under way goes on."""

    at: float
    lasting: float

    def __post_init__(self) -> None:
        checked_seconds("the start of an outage", self.at)
        checked_seconds("the length of an outage", self.lasting, positive=True)

    @property
    def until(self) -> float:
        return self.at + self.lasting


Fault = Pause | Failure | Outage
F = TypeVar("F", Pause, Failure, Outage)


def in_order(what: str, faults: Iterable[F]) -> tuple[F, ...]:
    """The faults by their times; none may begin before the one before it is over."""
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    for first, second in pairwise(ordered):
        if second.at <= first.until:
            raise ConfigError(
                f"the {what} at {show(second.at)} begins before the one at "
                f"{show(first.at)} is over; leave out or move one of them"
            )
    return ordered


def united(spans: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Spans of time as few as possible, in order: those that overlap or touch are one."""
    made: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((start, end))
    return tuple(made)
