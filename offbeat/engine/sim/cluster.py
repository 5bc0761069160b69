"""Describe a simulated cluster: how fast each worker computes and talks, and when it fails."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Self, TypeVar

from offbeat.config.text import nearest
from offbeat.config.units import (
    bandwidth,
    checked_seconds,
    duration,
    placed,
    read_text,
    real,
    show,
)
from offbeat.engine.sim.compute_times import NAMED, Constant, Distribution, distribution
from offbeat.errors import ConfigError

_MOST_WORKERS = 1_000_000


# ---------------------------------------------------------------- faults and machines


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


F = TypeVar("F", Pause, Failure)


@dataclass(frozen=True)
class Machine:
    """One worker: its compute time, its link to the store, and its faults in order of time."""

    compute: Distribution
    bandwidth: float = math.inf
    latency: float = 0.0
    pauses: tuple[Pause, ...] = ()
    failures: tuple[Failure, ...] = ()
    joins_at: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.compute, Distribution):
            raise ConfigError(
                f"a machine's compute time must be a distribution, got {self.compute!r}; "
                'write for example Constant(0.02), or distribution("20ms")'
            )
        object.__setattr__(self, "bandwidth", bandwidth(self.bandwidth))
        checked_seconds("the latency", self.latency)
        checked_seconds("the time at which a worker joins", self.joins_at)
        object.__setattr__(self, "pauses", self._in_order("pause", self.pauses))
        object.__setattr__(self, "failures", self._in_order("failure", self.failures))

    def _in_order(self, what: str, faults: tuple[F, ...]) -> tuple[F, ...]:
        faults = tuple(sorted(faults, key=lambda fault: fault.at))
        if faults and faults[0].at < self.joins_at:
            raise ConfigError(
                f"the {what} at {show(faults[0].at)} comes before the worker joins at "
                f"{show(self.joins_at)}; write a later time"
            )
        for first, second in pairwise(faults):
            if second.at <= first.until:
                raise ConfigError(
                    f"the {what} at {show(second.at)} begins before the one at "
                    f"{show(first.at)} is over; leave out or move one of them"
                )
        return faults

    def to_toml(self, count: int = 1) -> str:
        lines = ["[[worker]]", f"compute = {self.compute.to_toml()}"]
        if count > 1:
            lines.append(f"count = {count}")
        if math.isfinite(self.bandwidth):
            lines.append(f"bandwidth = {self.bandwidth!r}  # bytes a second")
        for name in ("latency", "joins_at"):
            if value := getattr(self, name):
                lines.append(f'{name} = "{show(value)}"')
        for name in ("pauses", "failures"):
            tables = []
            for fault in getattr(self, name):
                given = {key: value for key, value in vars(fault).items() if value is not None}
                pairs = ", ".join(f'{key} = "{show(value)}"' for key, value in given.items())
                tables.append(f"{{{pairs}}}")
            if tables:
                lines.append(f"{name} = [{', '.join(tables)}]")
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the cluster


@dataclass(frozen=True)
class Cluster:
    """The machines by worker number, and what they share.

    `apply` is the time that the store needs for one contribution; `patience` is the time after
    which a silent worker counts as lost. Both are virtual seconds.
    """

    machines: tuple[Machine, ...]
    apply: float = 0.0
    patience: float = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", tuple(self.machines))
        if not self.machines:
            raise ConfigError("a cluster needs at least one worker; write a [[worker]] table")
        for number, machine in enumerate(self.machines):
            if not isinstance(machine, Machine):
                raise ConfigError(
                    f"machine {number} of the cluster is {machine!r}; "
                    "write Machine(Constant(0.02)), or Cluster.parse for text"
                )
        checked_seconds("the time to apply a contribution", self.apply)
        checked_seconds("patience", self.patience, positive=True)

    def __len__(self) -> int:
        return len(self.machines)

    @classmethod
    def equal(cls, n: int, compute: str | float | Distribution = "20ms") -> Self:
        """`n` workers of the same speed."""
        return cls((Machine(distribution(compute)),) * _count(n))

    @classmethod
    def with_straggler(
        cls, n: int, slower: float = 4, compute: str | float | Distribution = "20ms"
    ) -> Self:
        """`n` workers, of which the last takes `slower` times as long for a step."""
        if not 1 <= real("slower", slower, "write slower=4") < math.inf:
            raise ConfigError(
                f"slower must be 1 or more and finite, got {slower!r}; write slower=4"
            )
        usual = distribution(compute)
        return cls((Machine(usual),) * (_count(n) - 1) + (Machine(usual.slowed(slower)),))

    @classmethod
    def parse(cls, text: str) -> Self:
        """One worker for each compute time in a list such as `20ms,20ms,normal:80ms,8ms`."""
        words = text.split(",")
        machines: list[Machine] = []
        while words:
            kind = NAMED.get(words[0].partition(":")[0].strip(), Constant)
            taken = len(fields(kind))  # a distribution with two numbers has a comma of its own
            place = f'worker {len(machines) + 1} of "{text}"'
            machines.append(Machine(placed(place, distribution, ",".join(words[:taken]))))
            del words[:taken]
        return cls(tuple(machines))

    @classmethod
    def read(cls, text: str) -> Self:
        """A cluster from a TOML file (`lab.toml`) or from compute times (`20ms,80ms`)."""
        return cls.from_toml(text) if text.endswith(".toml") else cls.parse(text)

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """The cluster that a TOML file describes."""
        text = read_text(Path(path))
        return placed(str(path), cls.from_toml_text, text, Path(path).parent)

    @classmethod
    def from_toml_text(cls, text: str, folder: Path | None = None) -> Self:
        """The cluster in TOML text; `trace:FILE` is looked up from `folder`."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not valid TOML: {error}; correct that line") from None
        worker = [lambda value: _machines(value, folder)]
        values = _values(table, {"apply": duration, "patience": duration, "worker": worker})
        groups = values.pop("worker", ())
        if sum(count for count, _ in groups) > _MOST_WORKERS:
            raise ConfigError(
                f"a cluster has at most {_MOST_WORKERS} workers; write smaller counts"
            )
        return cls(tuple(machine for count, machine in groups for _ in range(count)), **values)

    def to_toml(self) -> str:
        """TOML that `from_toml` reads back as an equal cluster; traces are written out in it."""
        head = f'apply = "{show(self.apply)}"\npatience = "{show(self.patience)}"\n'
        groups = [machine.to_toml(len(list(same))) for machine, same in groupby(self.machines)]
        return "\n".join([head, *groups])


def _machines(table: object, folder: Path | None) -> tuple[int, Machine]:
    """How many workers one `[[worker]]` table stands for, and what each of them is."""
    pause = {"at": duration, "lasting": duration}
    failure = {"at": duration, "returns_after": duration}
    known: dict[str, Any] = {
        "compute": lambda value: distribution(value, folder),
        "count": _count,
        "bandwidth": bandwidth,
        "latency": duration,
        "joins_at": duration,
        "pauses": [lambda value: Pause(**_values(value, pause, ("at", "lasting")))],
        "failures": [lambda value: Failure(**_values(value, failure, ("at",)))],
    }
    values = _values(table, known, needed=("compute",))
    return values.pop("count", 1), Machine(**values)


def _values(
    table: object, known: Mapping[str, Any], needed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The table's values, each read by its key's reader; `[reader]` reads each item of a list."""
    if not isinstance(table, dict):
        raise ConfigError(f"must be a table with the keys {', '.join(known)}, got {table!r}")
    for key in table:
        if key not in known:
            there = ", ".join(known)
            raise ConfigError(f'unknown key "{key}"{nearest(key, known)}; there are {there}')
    for key in needed:
        if key not in table:
            raise ConfigError(f'the key "{key}" is missing; write {key} = "20ms"')
    values: dict[str, Any] = {}
    for key, value in table.items():
        read = known[key]
        if not isinstance(read, list):
            values[key] = placed(key, read, value)
        elif isinstance(value, list):
            items = enumerate(value, 1)
            values[key] = tuple(placed(f"{key} {number}", read[0], item) for number, item in items)
        else:
            raise ConfigError(f"{key}: must be a list of tables, got {value!r}; write [{{...}}]")
    return values


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_WORKERS:
        raise ConfigError(
            f"the number of workers must be a whole number from 1 to {_MOST_WORKERS}, "
            f"got {value!r}; write for example 4"
        )
    return value
