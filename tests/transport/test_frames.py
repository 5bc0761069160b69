"""Frames: whatever breaks, and wherever, all of it arrives, once and in order."""

import select
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.transport.frames import (
    HEADER,
    LARGEST,
    STRIPED,
    ConnectionLost,
    Frames,
    LinkEnded,
    Misbehaved,
)
from offbeat.transport.wakeup import Wakeup
from tests.transport.wires import FOR_EVER, End, MemoryWire, Pair, cuts, small_limits, wire

LONG = 20.0
Said = list[tuple[bytes, list[bytes]]]


def body(size: int, seed: int) -> bytes:
    """Bytes of which no two stretches are the same."""
    return bytes((seed + 7 * at + at // 251) % 256 for at in range(size))


def said(sizes: list[list[int]]) -> Said:
    return [
        (b"frame %d" % index, [body(size, index + which) for which, size in enumerate(one)])
        for index, one in enumerate(sizes)
    ]


def all_arrive(pair: Pair, there: Said, back: Said) -> None:
    """Each says all that it has, and hears all of the other's."""
    for end, words in zip(pair.ends, (there, back), strict=True):
        for word, buffers in words:
            end.say(word, buffers)
    mine, theirs = pair.ends
    pair.until(lambda: len(mine.heard) == len(back) and len(theirs.heard) == len(there))
    assert theirs.heard == there
    assert mine.heard == back


# ---------------------------------------------------------------- breaks


@pytest.mark.parametrize("connections", [1, 4])
def test_a_connection_may_break_at_every_byte(connections: int) -> None:
    there, back = said([[70, 0, 55], []]), said([[3]])
    with small_limits():
        whole = Pair(connections, lambda: FOR_EVER)
        all_arrive(whole, there, back)
        longest = max(one.sent + one.received for one in whole.ends[0].frames.connections)
        for broken in range(connections):  # each of them, at each of its bytes
            for at in range(1, longest + 1):
                lengths = [FOR_EVER] * connections
                lengths[broken] = at
                all_arrive(Pair(connections, cuts(lengths)), there, back)


@given(
    connections=st.sampled_from([1, 2, 4]),
    sizes=st.lists(st.lists(st.integers(0, 130), max_size=4), max_size=6),
    back=st.lists(st.lists(st.integers(0, 130), max_size=2), max_size=4),
    lengths=st.lists(st.integers(1, 400), max_size=30),
    capacity=st.integers(1, 200),
)
def test_connections_break_wherever_and_all_arrives(
    connections: int,
    sizes: list[list[int]],
    back: list[list[int]],
    lengths: list[int],
    capacity: int,
) -> None:
    with small_limits():
        all_arrive(Pair(connections, cuts(lengths), capacity), said(sizes), said(back))


def test_what_was_sent_is_kept_until_the_other_end_has_it() -> None:
    with small_limits():
        pair = Pair(4, lambda: FOR_EVER)
        mine, theirs = pair.ends
        for turn in range(1, 50):
            mine.say(b"there", [body(300, turn)])
            pair.until(lambda turn=turn: len(theirs.heard) == turn)
            assert 300 < mine.kept < 400  # this one, and none of those before
            theirs.say(b"back", [])
            pair.until(lambda turn=turn: len(mine.heard) == turn)
            assert mine.kept == 0
            assert theirs.kept < 100


def test_it_goes_on_with_the_real_limits_too() -> None:
    sizes = [[3 * STRIPED + 5, 0, 17], [STRIPED - 1], []]
    for connections in (1, 4):
        pair = Pair(connections, cuts([100_000, 1_000_000, 900_001] * 3), capacity=1 << 18)
        all_arrive(pair, said(sizes), said([[STRIPED]]))
        assert pair.made > connections


def test_one_who_says_to_have_what_never_was_is_cut_off() -> None:
    end = End(1)
    end.say(b"a", [])
    sound, _ = MemoryWire.pair(1000)
    connection = end.frames.connections[0]
    for received in (-1, connection.end + 1):
        first, _ = MemoryWire.pair(1000)
        with pytest.raises(Misbehaved):
            connection.attach(wire(first), received)
        assert not first.open  # nobody else would close it
        assert connection.wire is None
    connection.attach(wire(sound), connection.end)
    connection.forget(1)
    with pytest.raises(Misbehaved):  # what is known to have arrived is not there any more
        connection.attach(wire(sound), 0)


# ---------------------------------------------------------------- what cannot be


def hears(raw: bytes, queued: int = 0) -> End:
    """An end that is sent these bytes."""
    end = End(1)
    mine, theirs = MemoryWire.pair(1 << 22)
    end.frames.connections[0].attach(wire(mine))
    for _ in range(queued):
        end.say(b"word", [])
    theirs.send(memoryview(raw))
    end.turn()
    return end


def framed(sizes: list[int], nbytes: int, arrived: int = 0) -> bytes:
    told = msgspec.msgpack.encode((sizes, b"word"))
    return HEADER.pack(len(told), nbytes, arrived) + told


@pytest.mark.parametrize("length", [LARGEST + 1, 1 << 31, (1 << 32) - 1])
def test_a_message_that_is_too_long_is_refused_before_memory_is_taken(length: int) -> None:
    with pytest.raises(Misbehaved):
        hears(HEADER.pack(length, 0, 0) + b"x" * 100)


@pytest.mark.parametrize("nbytes", [1, 1 << 31, 1 << 62, (1 << 64) - 1])
def test_buffers_of_another_length_are_refused_before_memory_is_taken(nbytes: int) -> None:
    with pytest.raises(Misbehaved):
        hears(framed([], nbytes))
    with pytest.raises(Misbehaved):
        hears(framed([4], nbytes))


def test_one_cannot_have_received_what_was_not_sent() -> None:
    assert hears(framed([], 0, arrived=2), queued=2).heard == [(b"word", [])]
    for arrived in (3, 1 << 62):
        with pytest.raises(Misbehaved):
            hears(framed([], 0, arrived=arrived), queued=2)


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waited_for_and_takes_no_memory(raw: bytes) -> None:
    end = End(1)
    mine, theirs = MemoryWire.pair(1 << 20)
    end.frames.connections[0].attach(wire(mine))
    if raw:
        theirs.send(memoryview(raw))
    try:
        end.turn()
    except (Misbehaved, LinkEnded):
        return
    assert not end.heard  # the first bytes of a frame at most
    assert len(end.frames.told) <= LARGEST


def test_a_frame_of_nothing_at_all_is_the_end() -> None:
    with pytest.raises(LinkEnded):
        hears(HEADER.pack(0, 0, 0))
    pair = Pair(2, lambda: FOR_EVER)
    mine, theirs = pair.ends
    mine.say(b"last", [])
    mine.frames.end()
    with pytest.raises(LinkEnded):
        theirs.turn()
    assert theirs.heard == [(b"last", [])]
    assert all(one.wire is None for one in mine.frames.connections)


# ---------------------------------------------------------------- waiting


@pytest.fixture
def wires() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Two connections, each with both its ends."""
    made = [socket.socketpair() for _ in range(2)]
    for pair in made:
        for one in pair:
            one.setblocking(False)
    yield made
    for pair in made:
        for one in pair:
            one.close()


Wires = list[tuple[socket.socket, socket.socket]]


def waiting(wires: Wires) -> Frames:
    end = End(2)
    for connection, (mine, _) in zip(end.frames.connections, wires, strict=True):
        connection.attach(mine)
    return end.frames


def test_a_connection_that_breaks_while_nothing_is_wanted_of_it_is_noticed(wires: Wires) -> None:
    frames = waiting(wires)
    wires[1][1].close()
    with pytest.raises(ConnectionLost) as caught:
        frames.wait()
    assert caught.value.index == 1


def test_what_has_come_early_over_another_connection_is_no_reason_to_wake(wires: Wires) -> None:
    frames = waiting(wires)
    wires[1][1].send(b"the stretch of a frame whose header is on its way")
    look = select.poll()
    seen: list[list[tuple[int, int]]] = []

    class Looking:
        def register(self, what: object, events: int) -> None:
            look.register(what, events)

        def poll(self, most: int | None) -> list[tuple[int, int]]:
            seen.append(look.poll(0))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.transport.frames.select.poll", Looking)
        frames.wait()
        assert seen == [[]]  # it would go on waiting
        wires[0][1].send(b"!")
        frames.wait()
        assert [handle for handle, _ in seen[1]] == [wires[0][0].fileno()]


def test_one_with_nothing_to_send_does_not_wake_for_another_that_is_full(wires: Wires) -> None:
    frames = waiting(wires)
    frames.put(msgspec.msgpack.encode(([], b"word")), [memoryview(bytes(STRIPED // 2))])
    frames.flush()
    full, empty = frames.connections
    assert full.sent < full.end
    assert empty.sent == empty.end
    wakeup = Wakeup()
    wakeup.wake()
    events: dict[int, int] = {}

    class Noting:
        def __init__(self) -> None:
            self.look = real()

        def register(self, what: socket.socket, which: int) -> None:
            events[what.fileno()] = which
            self.look.register(what, which)

        def poll(self, most: int | None) -> list[tuple[int, int]]:
            return self.look.poll(most)  # type: ignore[no-any-return]

    real = select.poll
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.transport.frames.select.poll", Noting)
        frames.wait(wakeup)
    assert events[wires[0][0].fileno()] & select.POLLOUT
    assert not events[wires[1][0].fileno()] & select.POLLOUT
