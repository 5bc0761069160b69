"""Who proves what to whom, before anything else is looked at."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConfigError
from offbeat.transport import handshake as module
from offbeat.transport.handshake import (
    HELLO,
    LARGEST,
    LONGEST,
    MAGIC,
    NUMBER,
    TLS_ONLY,
    UNKNOWN,
    AskTerms,
    Attach,
    Echo,
    Echoed,
    Enter,
    Introduction,
    Refused,
    Terms,
    TurnedAway,
    ask,
    check_token,
    introduce,
    length_of,
    new_token,
    packet,
    prove,
    read,
    request_in,
)

TOKEN, OTHER = b"a token of these tests", b"another token than that"
LONG = 20.0


@pytest.fixture
def wires() -> Iterator[tuple[socket.socket, socket.socket]]:
    mine, theirs = socket.socketpair()
    for one in (mine, theirs):
        one.settimeout(LONG)
    with mine, theirs:
        yield mine, theirs


Wires = tuple[socket.socket, socket.socket]


def store_side(wire: socket.socket, introduction: Introduction) -> None:
    """As a store that waits for each part."""
    while introduction.wanted:
        answer = introduction.hear(read(wire, introduction.wanted))
        if answer is None:
            return
        wire.sendall(answer)


def with_a_store(act: Callable[[], None], serve: Callable[[], None]) -> BaseException | None:
    """What `act` ends with, while a thread serves it."""
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        act()
    except Exception as error:
        return error
    finally:
        thread.join(LONG)
        assert not thread.is_alive()
    return None


def played(mine: bytes, theirs: bytes, seen: bytes = b"", shown: bytes = b"") -> Introduction:
    """One whole introduction in memory: a worker with `mine`, a store with `theirs`."""
    store = Introduction(theirs, shown)
    number = bytes(range(NUMBER))
    answer = store.hear(MAGIC + number)
    assert answer is not None
    assert len(answer) == 2 * NUMBER
    store.hear(prove(mine, b"worker", number, answer[:NUMBER], seen))
    return store


# ---------------------------------------------------------------- tokens


def test_both_sides_are_let_in_with_the_same_token(wires: Wires) -> None:
    store = Introduction(TOKEN)
    found = with_a_store(lambda: introduce(wires[0], TOKEN), lambda: store_side(wires[1], store))
    assert found is None
    assert store.proven


def test_a_worker_with_another_token_is_not_let_in_and_does_not_believe_the_store(
    wires: Wires,
) -> None:
    store = Introduction(TOKEN)

    def serve() -> None:
        store_side(wires[1], store)

    def act() -> None:
        try:
            introduce(wires[0], OTHER)
        finally:
            wires[0].shutdown(socket.SHUT_WR)

    def served() -> None:
        with pytest.raises(ConnectionResetError):  # it says nothing more
            serve()

    found = with_a_store(act, served)
    assert isinstance(found, Refused)
    assert "compare the token files" in str(found)
    assert not store.proven
    assert not played(OTHER, TOKEN).proven
    assert played(TOKEN, TOKEN).proven


def test_a_proof_holds_for_one_certificate_alone() -> None:
    assert played(TOKEN, TOKEN, b"certificate", b"certificate").proven
    assert not played(TOKEN, TOKEN, b"of one in the middle", b"certificate").proven


def test_a_handshake_that_was_recorded_serves_nobody_again() -> None:
    first, number = Introduction(TOKEN), b"n" * NUMBER
    answer = first.hear(MAGIC + number)
    assert answer is not None
    proof = prove(TOKEN, b"worker", number, answer[:NUMBER], b"")
    assert first.hear(proof) == b""
    assert first.proven
    again = Introduction(TOKEN)
    fresh = again.hear(MAGIC + number)
    assert fresh is not None
    assert fresh != answer
    assert again.hear(proof) is None
    assert not again.proven


def test_a_recorded_store_convinces_nobody(wires: Wires) -> None:
    store = Introduction(TOKEN)
    recorded = store.hear(MAGIC + b"n" * NUMBER)
    assert recorded is not None

    def play() -> None:
        read(wires[1], HELLO)
        wires[1].sendall(recorded)

    assert isinstance(with_a_store(lambda: introduce(wires[0], TOKEN), play), Refused)


def test_what_the_store_has_proved_is_no_proof_of_a_worker() -> None:
    """Sent back to where it came from, and from one store to another."""
    store, number = Introduction(TOKEN), b"n" * NUMBER
    answer = store.hear(MAGIC + number)
    assert answer is not None
    assert store.hear(answer[NUMBER:]) is None
    second = Introduction(TOKEN)
    second.hear(MAGIC + answer[:NUMBER])
    assert second.hear(answer[NUMBER:]) is None
    assert not store.proven
    assert not second.proven


def test_numbers_are_fresh_every_time() -> None:
    assert len({Introduction(TOKEN).mine for _ in range(100)}) == 100


@given(st.binary(min_size=HELLO, max_size=HELLO), st.binary(min_size=NUMBER, max_size=NUMBER))
def test_garbage_proves_nothing(first: bytes, second: bytes) -> None:
    store = Introduction(TOKEN)
    if store.hear(first) is None:
        assert not first.startswith(MAGIC)
        store = Introduction(TOKEN)
        store.hear(MAGIC + first[len(MAGIC) :])
    assert store.hear(second) is None
    assert not store.proven


def test_tokens_that_can_be_guessed_are_refused_with_the_remedy() -> None:
    assert check_token(b"  0123456789abcdef\n", "here") == b"0123456789abcdef"
    with pytest.raises(ConfigError, match=r"in here has 15 letters.*offbeat token prints"):
        check_token(b"0123456789abcde \n", "here")
    tokens = {new_token() for _ in range(20)}
    assert len(tokens) == 20
    assert min(map(len, tokens)) >= 40


# ---------------------------------------------------------------- wrong answers


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (TLS_ONLY, "leave tls=False"),
        (UNKNOWN, "another version"),
        (b"x" * 2 * NUMBER, "does not know the token"),
    ],
)
def test_a_worker_is_told_what_to_change(wires: Wires, said: bytes, remedy: str) -> None:
    def serve() -> None:
        read(wires[1], HELLO)
        wires[1].sendall(said)

    found = with_a_store(lambda: introduce(wires[0], TOKEN), serve)
    assert isinstance(found, Refused)
    assert remedy in str(found)


@pytest.mark.parametrize("said", [b"", b"x", b"x" * (2 * NUMBER - 1)])
def test_a_store_that_breaks_off_may_be_tried_again(wires: Wires, said: bytes) -> None:
    def serve() -> None:
        read(wires[1], HELLO)
        wires[1].sendall(said)
        wires[1].shutdown(socket.SHUT_WR)

    found = with_a_store(lambda: introduce(wires[0], TOKEN), serve)
    assert isinstance(found, ConnectionResetError)


def test_a_store_that_says_nothing_is_not_waited_for_for_ever(wires: Wires) -> None:
    wires[0].settimeout(0.01)
    with pytest.raises(TimeoutError):
        introduce(wires[0], TOKEN)


# ---------------------------------------------------------------- messages


def test_requests_travel_whole() -> None:
    entering = Enter(b"link", 2, 3, True, False, b"hash", "difference", "host", 0.25)
    for request in (AskTerms(), entering, Attach(b"link", 1, 77), Echo(b"filling", 9)):
        told = packet(request)
        assert length_of(told[:4]) == len(told) - 4
        assert request_in(told[4:]) == request


@given(st.binary(max_size=100))
def test_what_is_no_request_is_none(told: bytes) -> None:
    found = request_in(told)
    assert found is None or request_in(packet(found)[4:]) == found


def test_lengths_are_bounded() -> None:
    assert length_of(struct.pack("!I", LONGEST)) == LONGEST
    assert length_of(struct.pack("!I", LONGEST + 1)) == 0
    assert length_of(struct.pack("!I", (1 << 32) - 1), LARGEST) == 0


def answered(wires: Wires, raw: bytes) -> BaseException | None:
    wires[1].sendall(raw)
    return with_a_store(lambda: check_answer(ask(wires[0], AskTerms())), lambda: None)


def check_answer(found: object) -> None:
    assert isinstance(found, Terms | Echoed)


def test_an_answer_that_is_none_is_a_clear_error(wires: Wires) -> None:
    found = answered(wires, struct.pack("!I", (1 << 32) - 1))
    assert isinstance(found, Refused)
    found = answered(wires, struct.pack("!I", 3) + b"\xc1\xc1\xc1")
    assert isinstance(found, Refused)
    assert "something else" in str(found)


def test_the_reason_is_told_to_one_that_is_turned_away(wires: Wires) -> None:
    found = answered(wires, packet(TurnedAway("all places are taken")))
    assert isinstance(found, Refused)
    assert str(found) == "all places are taken"


def test_a_model_of_very_many_tensors_can_be_described(wires: Wires) -> None:
    sketch = {"model": [f"layers.{n}.weight (1024, 1024) float32" for n in range(20_000)]}
    told = packet(Terms({}, sketch, 0.0))
    assert len(told) > LONGEST
    sending = threading.Thread(target=wires[1].sendall, args=(told,), daemon=True)
    sending.start()
    found = ask(wires[0], AskTerms())
    sending.join(LONG)
    assert isinstance(found, Terms)
    assert found.sketch == sketch


def test_everything_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def digest(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        return one == other

    monkeypatch.setattr(module.hmac, "compare_digest", digest)
    assert played(TOKEN, TOKEN).proven
    assert compared == [len(MAGIC), NUMBER]


def test_the_encoding_of_requests_is_no_pickle() -> None:
    assert msgspec.msgpack.decode(packet(Attach(b"link", 1, 77))[4:]) == ["Attach", b"link", 1, 77]
