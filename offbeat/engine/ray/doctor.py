"""Whether the hosts of a Ray cluster fit a run: each one is read, and measures its way to here."""

import math
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from offbeat.config.limits import memory_left
from offbeat.engine.hosts.doctor import SKEW, SLOW, TIGHT, reach
from offbeat.engine.hosts.listener import Listener, Security, listen
from offbeat.engine.hosts.sketch import VERSIONS, versions
from offbeat.engine.local.doctor import DoctorPlan, Finding
from offbeat.engine.ray.cluster import Node, RayCluster, last_line, needed, room_in
from offbeat.report.tables import size
from offbeat.report.words import counted
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import (
    LONGEST,
    Answer,
    AskTerms,
    Echo,
    Echoed,
    Requests,
    Terms,
    TurnedAway,
)
from offbeat.transport.tls import store_context

ANSWER = 60.0  # seconds in which a host has to start a process that imports offbeat, and to measure
SAME_BITS = {"AVX2", "AVX512"}  # of which every operation has the same ones
NEED = {"CPU": 1}  # of a worker, unless more is asked for
HELD = 4  # sizes of the model that a worker holds: parameters, gradients, what comes and goes
NAMED = 3  # hosts in a sentence


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What Ray says of a host, what was read there, and its way to the store's host."""

    name: str
    address: str
    of_store: bool = False  # whether the store would be there
    free: Mapping[str, float] = field(default_factory=dict)
    whole: Mapping[str, float] = field(default_factory=dict)
    silent: str = ""  # why nothing could be read; what follows is not known then
    versions: Mapping[str, str] = field(default_factory=dict)
    cuda: bool = False  # whether its torch was built for that
    memory: int | None = None  # bytes that are free
    unreached: str = ""  # why it has no way to the store's host
    round_trip: float | None = None  # seconds
    bandwidth: float | None = None  # bytes a second, of the slower direction
    skew: float | None = None  # seconds by which the clock of the store's host is ahead

    @property
    def gpus(self) -> int:
        return int(self.whole.get("GPU", 0))


# ---------------------------------------------------------------- the visit


class Visitor:
    """An actor that reads its host, and measures from there."""

    def read(self) -> dict[str, Any]:
        return {
            "versions": here(),
            "cuda": torch.version.cuda is not None,
            "memory": memory_left(),
        }

    def measure(self, dialer: Dialer) -> dict[str, float]:
        found = reach(dialer)
        return {
            "round_trip": found.round_trip,
            "bandwidth": found.bandwidth,
            "skew": found.skew,
        }


def here() -> dict[str, str]:
    """The versions of this process, which those of all hosts have to be."""
    return {**versions(), "ray": needed().__version__}


def visit(cluster: RayCluster, tls: bool | None = None) -> list[HostFacts]:
    """Every host of a cluster, the store's first; `tls` None is as a run has it."""
    ray, home = cluster.ray, cluster.home
    nodes = sorted(cluster.nodes(), key=lambda node: (node.address != home, node.name, node.id))
    kind = ray.remote(Visitor)
    at = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    visitors = [
        kind.options(num_cpus=0, scheduling_strategy=at(node.id, soft=False)).remote()
        for node in nodes
    ]
    try:
        asked = [visitor.read.remote() for visitor in visitors]
        ray.wait(asked, num_returns=len(asked), timeout=ANSWER)
        found = [_heard(ray, node, one, home) for node, one in zip(nodes, asked, strict=True)]
        with echoing(home, tls) as dialer:
            # One after the other, because they would share the way to this host.
            return [
                host if host.silent else _measured(ray, host, visitor, dialer)
                for host, visitor in zip(found, visitors, strict=True)
            ]
    finally:
        for visitor in visitors:
            ray.kill(visitor)


def _heard(ray: Any, node: Node, asked: Any, home: str) -> HostFacts:
    host = HostFacts(
        name=node.name,
        address=node.address,
        of_store=node.address == home,
        free=node.free,
        whole=node.whole,
    )
    try:
        return replace(host, **ray.get(asked, timeout=0))
    except ray.exceptions.GetTimeoutError:
        return replace(host, silent=f"no answer within {ANSWER:g} s")
    except ray.exceptions.RayError as error:
        return replace(host, silent=last_line(error))


def _measured(ray: Any, host: HostFacts, visitor: Any, dialer: Dialer) -> HostFacts:
    try:
        return replace(host, **ray.get(visitor.measure.remote(dialer), timeout=ANSWER))
    except ray.exceptions.GetTimeoutError:
        return replace(host, unreached=f"not done within {ANSWER:g} s")
    except ray.exceptions.RayError as error:
        return replace(host, unreached=last_line(error))


@contextmanager
def echoing(home: str, tls: bool | None) -> Iterator[Dialer]:
    """A listener as a store has it, which has nothing but echoes, and the way to dial it."""
    with listen(Address(home, 0)) as listening:
        address = Address(home, listening.getsockname()[1])
        dialer = Dialer(address, secrets.token_bytes(32), tls)
        tls_of_store = store_context(None) if dialer.encrypts else ()
        listener = Listener(listening, Security(dialer.token, *tls_of_store), _echo, ANSWER)
        listener.start()
        try:
            yield dialer
        finally:
            listener.close()


def _echo(request: Requests, wire: socket.socket) -> Answer:
    if isinstance(request, AskTerms):
        return Terms({}, {}, time.time())
    if isinstance(request, Echo):
        return Echoed(bytes(max(0, min(request.wanted, LONGEST // 2))))
    return TurnedAway("a doctor listens here, and no store")


# ---------------------------------------------------------------- the checks


def examine_hosts(
    hosts: Sequence[HostFacts], plan: DoctorPlan, mine: Mapping[str, str]
) -> tuple[Finding, ...]:
    """Every finding; `mine` are the versions of the program that would be the launcher."""
    known = [host for host in hosts if not host.silent]
    return (
        _hosts(hosts),
        *(_version(name, known, mine[name]) for name in (*VERSIONS, "ray")),
        _links(known, plan),
        _clocks(known),
        _room(hosts, plan),
        _memory(known, plan),
        _gpus(known),
    )


def _hosts(hosts: Sequence[HostFacts]) -> Finding:
    silent = [host for host in hosts if host.silent]
    if not silent:
        return Finding("hosts", "good", f"{counted(len(hosts), 'host')} in the cluster")
    found = "; ".join(f"{host.name} does not answer: {host.silent}" for host in silent)
    remedy = (
        "install offbeat[ray] there, for the Python that ray start was called with; "
        "ray status says how busy it is"
    )
    return Finding("hosts", "bad", found, remedy)


def _version(name: str, known: Sequence[HostFacts], mine: str) -> Finding:
    what = "CPU" if name == "instructions" else name
    odd = [host for host in known if host.versions[name] != mine]
    if not odd:
        return Finding(what, "good", f"{mine} on every host")
    kinds = {host.versions[name] for host in odd}
    found = f"{' and '.join(sorted(kinds))} on {_names(odd)}, {mine} here"
    if name != "instructions":
        return Finding(what, "bad", found, f"install {name} {mine} on {_names(odd)}")
    if kinds | {mine} <= SAME_BITS:
        return Finding(what, "good", f"{found}, which compute the same bits")
    remedy = (
        f"leave {_names(odd)} out, where results would differ in their last bits: give the others "
        'a resource of their own and ask for it (--worker-resources \'{"CPU": 1, "same": 1}\')'
    )
    return Finding(what, "bad", found, remedy)


def _links(known: Sequence[HostFacts], plan: DoctorPlan) -> Finding:
    cut = [host for host in known if host.unreached]
    if cut:
        found = "; ".join(f"{host.name} does not reach this host: {host.unreached}" for host in cut)
        remedy = "let the hosts of the cluster through to all ports of this one (a firewall?)"
        return Finding("links", "bad", found, remedy)
    others = [host for host in known if not host.of_store]
    if not others:
        return Finding("links", "good", "no host but this one")
    slowest = min(others, key=lambda host: host.bandwidth or 0.0)
    farthest = max(others, key=lambda host: host.round_trip or 0.0)
    found = (
        f"{size(slowest.bandwidth or 0)}/s on the slowest ({slowest.name}), round trips up to "
        f"{1e3 * (farthest.round_trip or 0):.3g} ms ({farthest.name})"
    )
    if plan.model_bytes is None:
        return Finding("links", "good", found)
    seconds = max(_exchange(host, plan.model_bytes) for host in others)
    found += f"; an exchange of {size(plan.model_bytes)} takes up to {seconds:.2g} s"
    if seconds < SLOW:
        return Finding("links", "good", found)
    remedy = "make it smaller (--codec int8 --pull-codec int8), or rarer (--sync local:16)"
    return Finding("links", "warn", found, remedy)


def _exchange(host: HostFacts, nbytes: int) -> float:
    assert host.bandwidth is not None
    assert host.round_trip is not None
    return 2 * nbytes / host.bandwidth + host.round_trip


def _clocks(known: Sequence[HostFacts]) -> Finding:
    skews = [abs(host.skew) for host in known if host.skew is not None]
    found = f"up to {max(skews, default=0.0):.1f} s from the clock of the store's host"
    odd = [host for host in known if host.skew is not None and abs(host.skew) >= SKEW]
    if not odd:
        return Finding("clocks", "good", found)
    return Finding("clocks", "warn", found, f"set the clock of {_names(odd)} by the network (NTP)")


def _room(hosts: Sequence[HostFacts], plan: DoctorPlan) -> Finding:
    free, whole = (
        sum(room_in(there, NEED) for there in maps)
        for maps in ([host.free for host in hosts], [host.whole for host in hosts])
    )
    found = f"for {counted(free, 'worker')} of one CPU now, {whole} if nobody else is there"
    if free >= plan.workers:
        return Finding("room", "good", found)
    fewer = f"-n {free}, " if free else ""
    if whole >= plan.workers:
        return Finding("room", "warn", found, f"{fewer}or wait for the others with --wait 600")
    remedy = f"{fewer}ask for less (--worker-resources '{{\"CPU\": 0.5}}'), or add hosts"
    return Finding("room", "bad", found, remedy)


def _memory(known: Sequence[HostFacts], plan: DoctorPlan) -> Finding:
    places = [host for host in known if _most(host) and host.memory is not None]
    if not places:
        return Finding("memory", "good", "no host says what is free")
    least = min(places, key=lambda host: host.memory or 0)
    found = f"{size(least.memory or 0)} free where there is least of it ({least.name})"
    if plan.model_bytes is None:
        return Finding("memory", "good", found)
    each = HELD * plan.model_bytes
    found += f"; a worker holds about {size(each)} of parameters and gradients"

    def fit(host: HostFacts) -> int:
        return math.floor(TIGHT * (host.memory or 0) / each)

    none = [host for host in places if not fit(host)]
    if none:
        remedy = f"use a smaller model, or hosts with more memory than {_names(none)}"
        return Finding("memory", "bad", found, remedy)
    tight = [host for host in places if fit(host) < min(_most(host), plan.workers)]
    if tight:
        few = ", ".join(f"{fit(host)} on {host.name}" for host in tight[:NAMED])
        remedy = f"no more workers than fit: {few} (ray start --num-cpus)"
        return Finding("memory", "warn", found, remedy)
    return Finding("memory", "good", found)


def _most(host: HostFacts) -> int:
    return room_in(host.whole, NEED)


def _gpus(known: Sequence[HostFacts]) -> Finding:
    having = [host for host in known if host.gpus]
    if not having:
        return Finding("GPUs", "good", "none")
    found = f"{sum(host.gpus for host in having)} on {_names(having)}"
    blind = [host for host in having if not host.cuda]
    if not blind:
        return Finding("GPUs", "good", found)
    found += f"; torch on {_names(blind)} is built without CUDA"
    return Finding("GPUs", "warn", found, f"install torch with CUDA on {_names(blind)}")


def _names(hosts: Sequence[HostFacts]) -> str:
    """Which hosts, in a sentence."""
    names = [host.name for host in hosts]
    if len(names) > NAMED:
        names = [*names[: NAMED - 1], f"{len(names) - NAMED + 1} more hosts"]
    return ", ".join(names[:-1]) + (" and " if names[1:] else "") + names[-1]
