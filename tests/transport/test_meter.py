"""What links measure: frames timed where they arrive, probes, and records that stay few."""

import socket
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.log.records import Part
from offbeat.protocol.messages import (
    Probe,
    Probed,
    Pull,
    Push,
    Rejoin,
    encode,
    to_store,
    to_worker,
)
from offbeat.store.board import LinkState, Row, new_board
from offbeat.transport import frames as frames_module
from offbeat.transport import tcp_link
from offbeat.transport.frames import ALL, Frames
from offbeat.transport.meter import EVERY, LARGE, LATEST, SOONEST, Gauge, Meter, Transfers
from offbeat.transport.tcp_link import Pump

HALF = 3 * LARGE


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (frames_module, tcp_link):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    for wire in pair:
        wire.setblocking(False)
    yield pair
    for wire in pair:
        wire.close()


def end(wire: socket.socket, decode: Any) -> Frames:
    made = Frames(1, decode)
    made.connections[0].attach(wire)
    return made


# ---------------------------------------------------------------- the end that receives


def ends(wires: Any, nbytes: int) -> tuple[Frames, Frames]:
    """One that sends, and one that has a place for so many bytes beside every message."""
    place = memoryview(bytearray(nbytes))
    return end(wires[0], lambda told: (told, [])), end(wires[1], lambda told: (told, [place]))


def test_a_large_frame_is_timed_from_its_head_to_its_last_byte(wires: Any, clock: Clock) -> None:
    sender, receiver = ends(wires, 2 * HALF)
    sender.put(b"m", [memoryview(bytes(HALF)), memoryview(bytes(HALF))])
    sender.flush(HALF)  # some of it, and no more than was allowed
    assert not sender.flushed
    clock.now += 5.0  # nobody has seen its head yet
    assert not receiver.absorb()
    assert receiver.coming
    before = receiver.received
    clock.now += 0.5
    sender.flush(ALL)
    while not sender.flushed:
        assert not receiver.absorb()
        sender.flush(ALL)
    assert receiver.absorb()
    assert not receiver.coming
    assert receiver.incoming.seconds == pytest.approx(0.5)
    # What came together with its head has taken no time.
    assert 0 < receiver.incoming.nbytes <= receiver.received - before + HALF
    assert receiver.incoming.nbytes < 2 * HALF


def test_what_is_small_is_not_timed(wires: Any, clock: Clock) -> None:
    sender, receiver = ends(wires, LARGE - 1)
    sender.put(b"m", [memoryview(bytes(LARGE - 1))])
    sender.flush()
    assert receiver.absorb()
    assert receiver.incoming == Transfers()


def test_a_break_in_the_middle_says_nothing_of_the_link(wires: Any, clock: Clock) -> None:
    sender, receiver = ends(wires, 2 * HALF)
    sender.put(b"m", [memoryview(bytes(2 * HALF))])
    sender.flush(HALF)
    assert not receiver.absorb()
    had = receiver.received
    receiver.lose(0)
    sender.connections[0].detach()
    clock.now += 60.0
    again = socket.socketpair()  # over which both go on
    for wire in again:
        wire.setblocking(False)
    sender.connections[0].attach(again[0], had)
    receiver.connections[0].attach(again[1])
    sender.flush()
    assert receiver.absorb()
    assert receiver.incoming == Transfers()
    sender.close()
    receiver.close()


# ---------------------------------------------------------------- probes


class Store:
    """The other end of a worker's pump, which the test holds."""

    def __init__(self, wire: socket.socket):
        self.frames = end(wire, lambda told: (to_store(told), []))

    def heard(self) -> list[Any]:
        found = []
        while self.frames.absorb():
            found.append(self.frames.message)
        return found

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.frames.put(encode(message))
        self.frames.flush()
        assert self.frames.flushed


@pytest.fixture
def pump(wires: Any, clock: Clock) -> Pump:
    maker: Any = SimpleNamespace(enter=lambda: (b"link", [wires[0]]), mend=None)
    return Pump(maker, lambda told: (to_worker(told), []))


@pytest.fixture
def store(wires: Any) -> Store:
    return Store(wires[1])


def push() -> Push:
    return Push(Part(0, 1, 0, 0, [], 4), True)


def kinds(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]


def test_a_probe_goes_before_a_contribution_now_and_then(
    pump: Pump, store: Store, clock: Clock
) -> None:
    pump.put(push())
    assert kinds(store.heard()) == [Probe, Push]
    store.say(Probed())
    assert pump.turn(None) is None
    clock.now += 0.9 * EVERY
    pump.put(push())
    assert kinds(store.heard()) == [Push]
    clock.now += 0.2 * EVERY
    pump.put(Pull([]))
    assert kinds(store.heard()) == [Pull]
    pump.put(push())
    assert kinds(store.heard()) == [Probe, Push]


def test_the_next_probe_tells_what_the_last_one_took(
    pump: Pump, store: Store, clock: Clock
) -> None:
    pump.put(push())
    assert store.heard()[0] == Probe(0.0, 0, 0.0)  # nothing is known yet
    clock.now += 0.03
    store.say(Probed())
    assert pump.turn(None) is None  # it is the link's, and the worker does not hear of it
    pump.frames.incoming.add(1000, 0.5)
    clock.now += EVERY
    pump.put(push())
    found = store.heard()[0]
    assert found.round_trip == pytest.approx(0.03)
    assert (found.nbytes, found.seconds) == (1000, 0.5)
    clock.now += EVERY  # not answered: nothing is told twice
    pump.put(push())
    assert store.heard()[0] == Probe(0.0, 0, 0.0)


def test_an_answer_that_something_else_was_before_says_nothing(
    pump: Pump, store: Store, clock: Clock
) -> None:
    pump.put(push())
    store.heard()
    clock.now += 3.0
    store.say(Rejoin(), Probed())
    assert pump.turn(None) == Rejoin()
    assert pump.turn(None) is None
    clock.now += EVERY
    pump.put(push())
    assert store.heard()[0].round_trip == 0.0


# ---------------------------------------------------------------- the store's count


def meter(round_trip: float = 0.0) -> tuple[Meter, Any, Transfers]:
    cells, up = new_board(2), Transfers()
    return Meter(Gauge(cells, 1), up, round_trip, 0.0), cells, up


def test_records_tell_what_has_come_since_the_last_one() -> None:
    one, _, up = meter(0.02)
    up.add(4000, 2.0)
    one.probed(0.01, 6000, 1.0)
    one.probed(0.03, 0, 0.0)
    first = one.take(1.5, 1, 5000, 7000)
    assert first is not None
    assert (first.time, first.worker, first.round_trip) == (1.5, 1, 0.01)
    assert (first.sent, first.received) == (5000, 7000)
    assert (first.large_sent, first.sent_in) == (4000, 2.0)
    assert (first.large_received, first.received_in) == (6000, 1.0)
    one.probed(0.05, 1000, 0.5)
    second = one.take(3.0, 1, 5500, 9000)
    assert second is not None
    assert (second.round_trip, second.sent, second.received) == (0.05, 500, 2000)
    assert (second.large_sent, second.large_received, second.received_in) == (0, 1000, 0.5)
    assert one.take(4.0, 1, 5500, 9000) is None


def test_the_board_shows_the_latest_figures_and_keeps_what_is_known() -> None:
    one, cells, up = meter(0.02)
    assert cells[Row.ROUND_TRIP_US].tolist() == [0, 20_000]
    up.add(4000, 2.0)
    one.probed(0.01, 9000, 3.0)
    assert [cells[row, 1] for row in (Row.ROUND_TRIP_US, Row.UP, Row.DOWN)] == [10_000, 2000, 3000]
    one.probed(0.0, 0, 0.0)
    assert [cells[row, 1] for row in (Row.ROUND_TRIP_US, Row.UP, Row.DOWN)] == [10_000, 2000, 3000]
    one.gauge.show(LinkState.SENDING)
    assert cells[Row.LINK].tolist() == [0, LinkState.SENDING]


def test_however_long_a_run_its_records_stay_few() -> None:
    one, _, _ = meter()
    times, now, day = [], 0.0, 24 * 3600.0
    while now < day:
        now += SOONEST / 4
        one.probed(0.01, 0, 0.0)
        if one.is_due(now):
            times.append(now)
            one.take(now, 1, len(times), 0)
    gaps = [late - early for early, late in pairwise(times)]
    assert min(gaps) >= SOONEST
    assert max(gaps) <= 1.02 * LATEST
    assert gaps[0] == SOONEST
    assert len(times) < 1.3 * day / LATEST


def test_nothing_is_recorded_of_a_link_that_has_measured_nothing() -> None:
    one, _, _ = meter()
    assert not one.is_due(1e6)
    one.probed(0.01, 0, 0.0)
    assert one.is_due(1e6)
