"""Describe a simulated cluster: how fast each worker computes and talks, and when it fails."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

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
from offbeat.engine.sim.faults import F, Failure, Pause, in_order
from offbeat.engine.sim.hosts import GOODPUT, NOTHING, Host, Network, Region, StoreLink
from offbeat.engine.sim.tables import MOST_WORKERS, count, line_of, quoted, text, values_of
from offbeat.errors import ConfigError

# ---------------------------------------------------------------- machines


@dataclass(frozen=True)
class Machine:
    """One worker: its compute time, its link to the store, and its faults in order of time.

    `compute` is the time of a whole batch, and other batches take their share of it. What every
    step takes beside that, whatever its samples, is `overhead`.
    One that is on a `host` has no link of its own, but the one that all on that host share.
    """

    compute: Distribution
    bandwidth: float = math.inf
    latency: float = 0.0
    pauses: tuple[Pause, ...] = ()
    failures: tuple[Failure, ...] = ()
    joins_at: float = 0.0
    host: str = ""
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.compute, Distribution):
            raise ConfigError(
                f"a machine's compute time must be a distribution, got {self.compute!r}; "
                'write for example Constant(0.02), or distribution("20ms")'
            )
        object.__setattr__(self, "bandwidth", bandwidth(self.bandwidth))
        checked_seconds("the latency", self.latency)
        checked_seconds("the overhead", self.overhead)
        checked_seconds("the time at which a worker joins", self.joins_at)
        if self.host and (math.isfinite(self.bandwidth) or self.latency):
            raise ConfigError(
                f"a worker on host {self.host} talks over the link of that host; leave out its "
                "own bandwidth and latency, and write up, down and latency in [[host]]"
            )
        object.__setattr__(self, "pauses", self._in_order("pause", self.pauses))
        object.__setattr__(self, "failures", self._in_order("failure", self.failures))

    def _in_order(self, what: str, faults: tuple[F, ...]) -> tuple[F, ...]:
        first = min((fault.at for fault in faults), default=self.joins_at)
        if first < self.joins_at:
            raise ConfigError(
                f"the {what} at {show(first)} comes before the worker joins at "
                f"{show(self.joins_at)}; write a later time"
            )
        return in_order(what, faults)

    def to_toml(self, count: int = 1) -> str:
        lines = ["[[worker]]", f"compute = {self.compute.to_toml()}"]
        if count > 1:
            lines.append(f"count = {count}")
        if self.host:
            lines.append(f"host = {quoted(self.host)}")
        if math.isfinite(self.bandwidth):
            lines.append(f"bandwidth = {self.bandwidth!r}  # bytes a second")
        for name in ("overhead", "latency", "joins_at"):
            if value := getattr(self, name):
                lines.append(f'{name} = "{show(value)}"')
        for name in ("pauses", "failures"):
            lines += line_of(name, getattr(self, name))
        return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- the cluster


@dataclass(frozen=True)
class Cluster:
    """The machines by worker number, and what they share.

    `apply` is the time that the store needs for one contribution; `patience` is the time after
    which a silent worker counts as lost. Both are virtual seconds. `network` has the hosts that
    workers are on, and the links that they share.
    """

    machines: tuple[Machine, ...]
    apply: float = 0.0
    patience: float = 5.0
    network: Network = NOTHING

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
        if not isinstance(self.network, Network):
            raise ConfigError(f"{self.network!r} is no network; write Network(hosts=...)")
        used = {machine.host: number for number, machine in enumerate(self.machines)}
        for name, number in used.items():
            if name:
                self.network.known(f"worker {number} is on", name)
        self.network.check_used(used.keys())

    def with_machines(self, machines: Sequence[Machine]) -> Self:
        """The same with other machines; hosts that nobody is on any more are left out."""
        network = self.network.only({machine.host for machine in machines})
        return replace(self, machines=tuple(machines), network=network)

    def __len__(self) -> int:
        return len(self.machines)

    @classmethod
    def equal(cls, n: int, compute: str | float | Distribution = "20ms") -> Self:
        """`n` workers of the same speed."""
        return cls((Machine(distribution(compute)),) * count(n))

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
        return cls((Machine(usual),) * (count(n) - 1) + (Machine(usual.slowed(slower)),))

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
        known = {
            "apply": duration,
            "patience": duration,
            "worker": worker,
            "host": [lambda value: Host.read(value, folder)],
            "store": StoreLink.read,
            "region": [Region.read],
            "goodput": lambda value: value,
        }
        values = values_of(table, known)
        groups = values.pop("worker", ())
        names = ("host", "store", "region", "goodput")
        given = {key: values.pop(key) for key in names if key in values}
        given = {_PLURAL.get(key, key): value for key, value in given.items()}
        if sum(times for times, _ in groups) > MOST_WORKERS:
            raise ConfigError(f"a cluster has at most {MOST_WORKERS} workers; write smaller counts")
        machines = tuple(machine for times, machine in groups for _ in range(times))
        return cls(machines, **values, network=Network(**given))

    def to_toml(self) -> str:
        """TOML that `from_toml` reads back as an equal cluster; traces are written out in it."""
        head = f'apply = "{show(self.apply)}"\npatience = "{show(self.patience)}"\n'
        if self.network.goodput != GOODPUT:
            head += f"goodput = {self.network.goodput!r}\n"
        groups = [machine.to_toml(len(list(same))) for machine, same in groupby(self.machines)]
        return "\n".join([head, *self.network.to_toml(), *groups])


_PLURAL = {"host": "hosts", "region": "regions"}


def _machines(table: object, folder: Path | None) -> tuple[int, Machine]:
    """How many workers one `[[worker]]` table stands for, and what each of them is."""
    pause = {"at": duration, "lasting": duration}
    failure = {"at": duration, "returns_after": duration}
    known: dict[str, Any] = {
        "host": text,
        "compute": lambda value: distribution(value, folder),
        "count": count,
        "overhead": duration,
        "bandwidth": bandwidth,
        "latency": duration,
        "joins_at": duration,
        "pauses": [lambda value: Pause(**values_of(value, pause, ("at", "lasting")))],
        "failures": [lambda value: Failure(**values_of(value, failure, ("at",)))],
    }
    values = values_of(table, known, needed=("compute",))
    return values.pop("count", 1), Machine(**values)
