"""What an exchange over TCP costs, beside raw sends of the same bytes over the same wire."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figure import Figure, Peer
from benchmarks.network.hosts import Host, Hosts, why_not
from benchmarks.peers.launch import ROOT, PeerFailed
from benchmarks.scale import Scale

SMALL = 9_610  # parameters of the digits MLP
TRIP = 0.02  # seconds there and back
RATES = {"1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
WIRE = 1.05  # times what the bytes alone take
PROGRAM = "benchmarks.network.exchange_process"
WARM_UP = 2  # exchanges that are not counted, where memory and not the wire decides
LONG = 600.0  # seconds after which an exchange has failed


@dataclass(frozen=True)
class Wire:
    """What lies between the two hosts."""

    bits: float | None = None  # a second, each way
    delay: float = 0.0  # seconds, one way


UNSHAPED = Wire()


def exchange(scale: Scale) -> list[Figure]:
    """Push, apply and pull between two hosts: without limits, on slow wires, and on long ones."""
    size = f"exchange of {scale.floats / 1e6:.1f} M floats over TCP"
    reason = why_not()
    if reason:
        return [Figure(size, None, "x", at_most=1.25, beside=reason)]
    plain = measure(UNSHAPED, scale.floats, scale.exchanges)
    encrypted = measure(UNSHAPED, scale.floats, scale.exchanges, tls=True)
    small = measure(UNSHAPED, SMALL, 20 * scale.exchanges)
    more = [a - b for a, b in zip(small["exchange"], small["raw"], strict=True)]
    figures = [
        Figure(
            f"{size}, over sendall, recv_into and axpy",
            _ratio(plain["exchange"], plain["raw"]),
            "x",
            at_most=1.25,
            peers=_peers(plain, "ms"),
        ),
        Figure(
            f"{size}, TLS 1.3, over the same in the clear",
            median(encrypted["exchange"]) / median(plain["exchange"]),
            "x",
            peers=_peers(encrypted, "ms"),
        ),
        Figure(
            f"exchange of {SMALL:,} floats over TCP, more than a raw round trip",
            1e6 * median(more),
            "us",
            at_most=150,
            peers=_peers(small, "us"),
        ),
    ]
    for name, bits in RATES.items():
        # The slower the wire, the longer one takes, and the less it depends on anything else.
        repeats = max(1, round(scale.exchanges / 5 * bits / max(RATES.values())))
        found = measure(Wire(bits), scale.floats, repeats)
        wire = 2 * 4 * 8 * scale.floats / bits
        figures.append(
            Figure(
                f"{size} at {name}, over bytes / rate",
                median(found["exchange"]) / wire,
                "x",
                at_most=WIRE,
                peers=(Peer("bytes / rate", wire, "s"), *_peers(found, "s")),
            )
        )
    return [*figures, _connections(scale, size)]


def _connections(scale: Scale, size: str) -> Figure:
    what = f"{size}, {1e3 * TRIP:.0f} ms round trip, 1 connection over 4"
    reason = why_not(delay=True)
    if reason:
        return Figure(what, None, "x", at_least=2.5, beside=reason)
    wire, repeats = Wire(delay=TRIP / 2), max(1, scale.exchanges // 3)
    one, four = (
        median(measure(wire, scale.floats, repeats, connections=count)["exchange"])
        for count in (1, 4)
    )
    peers = (Peer("4 connections", four, "s"), Peer("1 connection", one, "s"))
    return Figure(what, one / four, "x", at_least=2.5, peers=peers)


def _peers(found: dict[str, list[float]], unit: str) -> tuple[Peer, ...]:
    factor = {"s": 1.0, "ms": 1e3, "us": 1e6}[unit]
    names = {"exchange": "offbeat", "raw": "raw"}
    return tuple(Peer(told, factor * median(found[name]), unit) for name, told in names.items())


def _ratio(mine: Sequence[float], limit: Sequence[float]) -> float:
    return median(a / b for a, b in zip(mine, limit, strict=True))


def measure(
    wire: Wire, floats: int, repeats: int, tls: bool = False, connections: int = 1
) -> dict[str, list[float]]:
    """Seconds of so many exchanges between two hosts, and of the raw one before each."""
    with tempfile.TemporaryDirectory() as folder, Hosts(2, Path(folder), [wire.delay]) as hosts:
        for host in hosts:
            host.limit(wire.bits)
        what = {"host": hosts[1].address, "floats": floats, "tls": tls}
        serving = _start(hosts[1], "serve", what)
        assert serving.stdout is not None
        if serving.stdout.readline() != "ready\n":
            raise PeerFailed(f"no store for the exchange: {_last(serving)}")
        warm_up = WARM_UP if wire.bits is None else 0
        what |= {"repeats": repeats, "warm_up": warm_up, "connections": connections}
        working = _start(hosts[2], "rounds", what)
        said, complaints = working.communicate(timeout=LONG)
        if working.returncode:
            raise PeerFailed(complaints.strip().splitlines()[-1])
        found: dict[str, list[float]] = json.loads(said)
        return found


def _start(host: Host, what: str, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    return host.run(
        *(sys.executable, "-m", PROGRAM, what, json.dumps(arguments)),
        environment={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _last(process: subprocess.Popen[str]) -> str:
    process.kill()
    lines = process.communicate()[1].strip().splitlines()
    return lines[-1] if lines else "nothing said"
