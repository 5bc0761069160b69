"""How far a store is, how wide the way there, and whether this machine fits it."""

import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offbeat.engine.hosts.sketch import VERSIONS, versions
from offbeat.engine.local.doctor import Finding
from offbeat.report.tables import size
from offbeat.transport.dial import Dialer
from offbeat.transport.handshake import AskTerms, Echo, Echoed, Terms, ask

TRIPS, LOADS = 10, 40  # echoes with nothing in them, and with much
LOAD = 100_000  # bytes of those
SKEW = 60.0  # seconds between two clocks that make logs and certificates hard to read
SLOW = 1.0  # seconds of an exchange from which it is worth doing something
TIGHT = 0.8  # of the memory


@dataclass(frozen=True)
class Reached:
    """What was measured on the way to a store, and what that says of its run."""

    address: str
    encrypted: bool
    round_trip: float  # seconds
    bandwidth: float  # bytes a second, of the slower direction
    skew: float  # seconds by which the store's clock is ahead
    terms: Terms


def reach(dialer: Dialer) -> Reached:
    """Measure; raises OSError or Refused where nothing can be."""
    wire, _ = dialer.connect()
    with wire:
        terms = ask(wire, AskTerms())
        assert isinstance(terms, Terms)
        skew = terms.now - time.time()
        trip = min(_trip(wire) for _ in range(TRIPS))
        bandwidth = _bandwidth(wire, trip)
    return Reached(str(dialer.address), dialer.encrypts, trip, bandwidth, skew, terms)


def _trip(wire: socket.socket, filling: bytes = b"", wanted: int = 0) -> float:
    start = time.perf_counter()
    if not isinstance(ask(wire, Echo(filling, wanted)), Echoed):
        raise ConnectionError("the store does not echo")
    return time.perf_counter() - start


def _bandwidth(wire: socket.socket, trip: float) -> float:
    """Of the slower direction; one after the other, as an exchange uses them."""
    load, rates = secrets.token_bytes(LOAD), []
    for filling, wanted in ((load, 0), (b"", LOAD)):
        times = [_trip(wire, filling, wanted) - trip for _ in range(LOADS)]
        late = times[LOADS // 2 :]  # the first ones open the way: a connection begins slowly
        rates.append(len(late) * LOAD / max(1e-9, sum(late)))
    return min(rates)


def examine_way(found: Reached, memory: int | None) -> tuple[Finding, ...]:
    """Every finding; `memory` is what is free here."""
    return (
        _reached(found),
        _speed(found),
        *(_version(name, found.terms.sketch) for name in VERSIONS),
        _clock(found),
        _memory(found.terms.settings, memory),
    )


def _reached(found: Reached) -> Finding:
    how = "encrypted" if found.encrypted else "not encrypted"
    return Finding("store", "good", f"{found.address} answers and knows the token, {how}")


def _speed(found: Reached) -> Finding:
    nbytes = int(found.terms.settings.get("model_bytes", 0))
    seconds = 2 * nbytes / found.bandwidth + found.round_trip
    said = (
        f"round trip {1e3 * found.round_trip:.3g} ms, {size(int(found.bandwidth))}/s; an exchange "
        f"of this model ({size(nbytes)}) takes about {seconds:.2g} s"
    )
    if seconds < SLOW:
        return Finding("link", "good", said)
    remedy = "make it smaller (--codec int8 --pull-codec int8), or rarer (--sync local:16)"
    return Finding("link", "warn", said, remedy)


def _version(name: str, sketch: Mapping[str, Any]) -> Finding:
    mine, theirs = versions()[name], str(sketch.get(name))
    what = "CPU" if name == "instructions" else name
    if mine == theirs:
        return Finding(what, "good", f"{mine} on both sides")
    if name == "instructions" and {mine, theirs} <= {"AVX2", "AVX512"}:
        return Finding(what, "good", f"{mine} here, {theirs} there, which compute the same bits")
    if name == "instructions":
        remedy = "run replays where the workers ran: results may differ in their last bits"
        return Finding(what, "bad", f"{mine} here, {theirs} there", remedy)
    return Finding(what, "bad", f"{mine} here, {theirs} there", f"install {name} {theirs} here")


def _clock(found: Reached) -> Finding:
    said = f"{abs(found.skew):.1f} s between the clocks of both sides"
    if abs(found.skew) < SKEW:
        return Finding("clock", "good", said)
    return Finding("clock", "warn", said, "set both clocks by the network (NTP)")


def _memory(settings: Mapping[str, Any], free: int | None) -> Finding:
    needed = 4 * int(settings.get("model_bytes", 0))
    said = f"a worker holds about {size(needed)} of parameters and gradients"
    if free is None:
        return Finding("memory", "good", said)
    said += f", {size(free)} are free"
    if needed < TIGHT * free:
        return Finding("memory", "good", said)
    return Finding("memory", "bad", said, "use a smaller model, or a machine with more memory")
