"""Describe where workers are: hosts and their links, the store's link, and regions."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from offbeat.config.text import nearest
from offbeat.config.units import bandwidth, checked_seconds, duration, placed, read_text, real, show
from offbeat.engine.sim.faults import Failure, Outage, in_order, united
from offbeat.engine.sim.tables import line_of, quoted, size, text, values_of
from offbeat.errors import ConfigError

GOODPUT = 0.95  # of a link's bandwidth: the rest is headers and acknowledgements


@dataclass(frozen=True)
class Share:
    """From `at` on, a host has that share of its bandwidth; with 0 it cannot be reached."""

    at: float
    share: float

    def __post_init__(self) -> None:
        checked_seconds("the time in a trace", self.at)
        remedy = "write a number from 0 to 1, such as 0.5"
        if not 0 <= real("a share", self.share, remedy) <= 1:
            raise ConfigError(f"a share must lie between 0 and 1, got {self.share!r}; {remedy}")


@dataclass(frozen=True)
class Host:
    """A machine with workers on it, which share its link.

    `latency` is one way. Each exchange gets at most `window` bytes a round trip and connection.
    """

    name: str
    up: float = math.inf
    down: float = math.inf
    latency: float = 0.0
    window: float = math.inf
    connections: int = 1
    outages: tuple[Outage, ...] = ()
    failures: tuple[Failure, ...] = ()
    trace: tuple[Share, ...] = ()

    def __post_init__(self) -> None:
        _check_name("a host", self.name, "lab0")
        for way in ("up", "down"):
            object.__setattr__(self, way, bandwidth(getattr(self, way)))
        checked_seconds("the latency", self.latency)
        remedy = 'write for example window = "4MB", or leave it out'
        if not real("a window", self.window, remedy) > 0:
            raise ConfigError(f"a window must be above zero, got {self.window!r}; {remedy}")
        whole = isinstance(self.connections, int) and not isinstance(self.connections, bool)
        if not whole or self.connections < 1:
            raise ConfigError(
                f"connections must be a whole number of at least 1, got {self.connections!r}; "
                "write for example connections = 4"
            )
        if math.isfinite(self.window) and not self.latency:
            raise ConfigError(
                f"the window of host {self.name} limits nothing, because its latency is 0: "
                "write a latency, or leave window out"
            )
        object.__setattr__(self, "outages", in_order("outage", self.outages))
        object.__setattr__(self, "failures", in_order("failure", self.failures))
        object.__setattr__(self, "trace", tuple(self.trace))
        self._check_trace()

    def _check_trace(self) -> None:
        for first, second in pairwise(self.trace):
            if second.at <= first.at:
                raise ConfigError(
                    f"the trace goes back from {show(first.at)} to {show(second.at)}; "
                    "write its times in order, each once"
                )
        if self.trace and self.trace[-1].share == 0:
            raise ConfigError(
                f"the trace ends at {show(self.trace[-1].at)} with share = 0, and the link never "
                "comes back; add a time from which it does, or write a failure instead"
            )
        parts = any(0 < step.share < 1 for step in self.trace)
        if parts and math.isinf(self.up) and math.isinf(self.down):
            raise ConfigError(
                f"host {self.name} has a share of an endless bandwidth; write up and down"
            )

    @property
    def most(self) -> float:
        """Bytes a second that one exchange can get, whatever the links have."""
        if math.isinf(self.window):
            return math.inf
        return self.window * self.connections / (2 * self.latency)

    @property
    def away(self) -> Iterable[tuple[float, float]]:
        """When the trace says that nothing gets through."""
        for here, after in pairwise(self.trace):
            if here.share == 0:
                yield here.at, after.at

    def to_toml(self) -> str:
        lines = ["[[host]]", f"name = {quoted(self.name)}"]
        for way in ("up", "down"):
            if math.isfinite(value := getattr(self, way)):
                lines.append(f"{way} = {value!r}  # bytes a second")
        if self.latency:
            lines.append(f'latency = "{show(self.latency)}"')
        if math.isfinite(self.window):
            lines.append(f"window = {self.window!r}  # bytes")
        if self.connections != 1:
            lines.append(f"connections = {self.connections}")
        for name in ("outages", "failures", "trace"):
            lines += line_of(name, getattr(self, name))
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, table: object, folder: Path | None) -> Self:
        known = {
            "name": text,
            "up": bandwidth,
            "down": bandwidth,
            "latency": duration,
            "window": size,
            "connections": lambda value: value,
            **_FAULTS,
            "trace": lambda value: _trace(value, folder),
        }
        return cls(**values_of(table, known, needed=("name",)))


@dataclass(frozen=True)
class StoreLink:
    """The store's own link, and the host that it is on; it takes `inward` what workers push."""

    inward: float = math.inf
    outward: float = math.inf
    host: str = ""

    def __post_init__(self) -> None:
        for way in ("inward", "outward"):
            object.__setattr__(self, way, bandwidth(getattr(self, way)))
        text(self.host)

    def to_toml(self) -> str:
        lines = ["[store]"]
        for key, value in (("in", self.inward), ("out", self.outward)):
            if math.isfinite(value):
                lines.append(f"{key} = {value!r}  # bytes a second")
        if self.host:
            lines.append(f"host = {quoted(self.host)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, table: object) -> Self:
        values = values_of(table, {"in": bandwidth, "out": bandwidth, "host": text})
        named = {"in": "inward", "out": "outward", "host": "host"}
        return cls(**{named[key]: value for key, value in values.items()})


OPEN = StoreLink()  # it limits nothing


@dataclass(frozen=True)
class Region:
    """Hosts that are cut off together, or fail together."""

    name: str
    hosts: tuple[str, ...]
    outages: tuple[Outage, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        _check_name("a region", self.name, "north")
        if isinstance(self.hosts, str):
            raise ConfigError(
                f'the hosts of region {self.name} are a list; write hosts = ["{self.hosts}"]'
            )
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts:
            raise ConfigError(
                f'region {self.name} has no hosts; write hosts = ["lab0", "lab1"], or leave it out'
            )
        object.__setattr__(self, "outages", in_order("outage", self.outages))
        object.__setattr__(self, "failures", in_order("failure", self.failures))

    def to_toml(self) -> str:
        hosts = ", ".join(map(quoted, self.hosts))
        lines = ["[[region]]", f"name = {quoted(self.name)}", f"hosts = [{hosts}]"]
        lines += line_of("outages", self.outages) + line_of("failures", self.failures)
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, table: object) -> Self:
        known = {"name": text, "hosts": [text], **_FAULTS}
        return cls(**values_of(table, known, needed=("name", "hosts")))


# ---------------------------------------------------------------- all of them together


@dataclass(frozen=True)
class Network:
    """The hosts of a cluster, what they share, and what befalls several of them at once."""

    hosts: tuple[Host, ...] = ()
    store: StoreLink = OPEN
    regions: tuple[Region, ...] = ()
    goodput: float = GOODPUT

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        object.__setattr__(self, "regions", tuple(self.regions))
        for what, values, kind in (
            ("host", self.hosts, Host),
            ("region", self.regions, Region),
        ):
            for value in values:
                if not isinstance(value, kind):
                    raise ConfigError(f"{value!r} is no {what}; write {kind.__name__}(...)")
            for name, times in Counter(value.name for value in values).items():
                if times > 1:
                    raise ConfigError(
                        f"there are {times} {what}s with the name {name}; give each one of its own"
                    )
        if not isinstance(self.store, StoreLink):
            raise ConfigError(f"{self.store!r} is no link of a store; write StoreLink(...)")
        remedy = f"write a number above 0 and at most 1, such as {GOODPUT}"
        if not 0 < real("goodput", self.goodput, remedy) <= 1:
            raise ConfigError(
                f"goodput must be above 0 and at most 1, got {self.goodput!r}; {remedy}"
            )
        self._check_names()

    def _check_names(self) -> None:
        for region in self.regions:
            for name in region.hosts:
                self.known(f"region {region.name} has", name)
            for name, times in Counter(region.hosts).items():
                if times > 1:
                    raise ConfigError(
                        f"region {region.name} names host {name} {times} times; name it once"
                    )
        if self.store.host:
            self.known("the store is on", self.store.host)
            if self.failures(self.named[self.store.host]):
                raise ConfigError(
                    f"the store is on host {self.store.host}, which fails, and the simulated store "
                    "does not: write outages there, or put the store on another host"
                )

    def known(self, who: str, name: str) -> None:
        """Refuse a name that no host has."""
        if name not in self.named:
            raise ConfigError(
                f'{who} host "{name}"{nearest(name, self.named)}, and there is no such host; '
                f"write a [[host]] table with name = {quoted(name)}"
            )

    @cached_property
    def named(self) -> Mapping[str, Host]:
        return {host.name: host for host in self.hosts}

    def __bool__(self) -> bool:
        """Whether there is anything to be shared."""
        return bool(self.hosts) or self.store != OPEN

    def check_used(self, used: AbstractSet[str]) -> None:
        """Refuse hosts that nobody is on."""
        for host in self.hosts:
            if host.name not in used and host.name != self.store.host:
                raise ConfigError(
                    f"nobody is on host {host.name}: give a worker host = {quoted(host.name)}, "
                    "or leave the host out"
                )
        if self.regions and not self.hosts:
            raise ConfigError("a region needs hosts; write [[host]] tables")

    def only(self, used: set[str]) -> "Network":
        """Without the hosts that nobody is on any more."""
        stay = used | {self.store.host}
        regions = [
            replace(region, hosts=there)
            for region in self.regions
            if (there := tuple(name for name in region.hosts if name in stay))
        ]
        hosts = tuple(host for host in self.hosts if host.name in stay)
        return replace(self, hosts=hosts, regions=tuple(regions))

    def outages(self, host: Host) -> tuple[tuple[float, float], ...]:
        """From when to when a host cannot reach the store, for whatever reason."""
        of = [host] if host.name == self.store.host else [host, *self._store_host]
        spans = [span for one in of for span in one.away]
        spans += [(fault.at, fault.until) for one in of for fault in self._of(one, "outages")]
        return united(spans)

    def failures(self, host: Host) -> tuple[tuple[float, float], ...]:
        """From when to when a host is dead."""
        return united((fault.at, fault.until) for fault in self._of(host, "failures"))

    def _of(self, host: Host, what: str) -> Iterable[Any]:
        yield from getattr(host, what)
        for region in self.regions:
            if host.name in region.hosts:
                yield from getattr(region, what)

    @property
    def _store_host(self) -> Sequence[Host]:
        return [self.named[self.store.host]] if self.store.host else []

    def to_toml(self) -> list[str]:
        """Its tables."""
        store = [self.store.to_toml()] if self.store != OPEN else []
        hosts = [host.to_toml() for host in self.hosts]
        return [*store, *hosts, *(region.to_toml() for region in self.regions)]


NOTHING = Network()  # workers with links of their own, and nothing shared


# ---------------------------------------------------------------- reading

_OUTAGE = {"at": duration, "lasting": duration}
_FAILURE = {"at": duration, "returns_after": duration}
_FAULTS: dict[str, Any] = {
    "outages": [lambda value: Outage(**values_of(value, _OUTAGE, ("at", "lasting")))],
    "failures": [lambda value: Failure(**values_of(value, _FAILURE, ("at",)))],
}


def _check_name(what: str, name: object, example: str) -> None:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(
            f'the name of {what} must be printable text, got {name!r}; write name = "{example}"'
        )


def _trace(value: object, folder: Path | None) -> tuple[Share, ...]:
    """Steps of a trace: a list of tables, or `trace:FILE` with a time and a share on each line."""
    if isinstance(value, str) and value.startswith("trace:"):
        return _trace_file((folder or Path()) / value.partition(":")[2].strip())
    if not isinstance(value, list):
        raise ConfigError(
            f"must be a list of tables or the name of a file, got {value!r}; "
            'write [{at = "20s", share = 0.5}], or "trace:FILE"'
        )
    known = {"at": duration, "share": lambda share: share}
    return tuple(
        Share(**placed(f"step {number}", values_of, step, known, ("at", "share")))
        for number, step in enumerate(value, 1)
    )


def _trace_file(path: Path) -> tuple[Share, ...]:
    lines = [line.partition("#")[0].split() for line in read_text(path).splitlines()]
    numbered = [(number, words) for number, words in enumerate(lines, 1) if words]
    return tuple(placed(f"{path}, line {number}", _step, words) for number, words in numbered)


def _step(words: Sequence[str]) -> Share:
    if len(words) != 2:
        raise ConfigError(f'"{" ".join(words)}" must be a time and a share; write "20s 0.5"')
    try:
        share = float(words[1])
    except ValueError:
        raise ConfigError(f'"{words[1]}" is no share; write a number such as 0.5') from None
    return Share(duration(words[0]), share)
