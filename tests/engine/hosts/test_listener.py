"""Who comes in from the network, and who does not: attacks, and what they leave."""

import os
import random
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from offbeat.engine.hosts import listener as module
from offbeat.engine.hosts.listener import PENDING, Listener, Security, listen
from offbeat.errors import ConfigError
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import (
    HELLO,
    LONGEST,
    MAGIC,
    NO_TLS,
    NUMBER,
    UNKNOWN,
    Answer,
    Attach,
    Echo,
    Echoed,
    NoSuchLink,
    Refused,
    Requests,
    ask,
    introduce,
    packet,
    prove,
    read,
)
from offbeat.transport.tls import store_context
from tests.engine.hosts.common import until
from tests.engine.local.common import nothing_left

TOKEN, OTHER = b"a token of these tests", b"another token than that"
LONG = 20.0


class Answers:
    """What a listener was asked, and the connections that it has passed on."""

    def __init__(self) -> None:
        self.asked: list[Requests] = []
        self.taken: list[socket.socket] = []

    def __call__(self, request: Requests, wire: socket.socket) -> Answer | None:
        self.asked.append(request)
        if isinstance(request, Echo):
            return Echoed(bytes(request.wanted))
        if isinstance(request, Attach) and request.index:
            self.taken.append(wire)
            return None
        return NoSuchLink()


class Open:
    """A listener, and what it has been asked."""

    def __init__(self, context: bool = False, patience: float = LONG):
        self.listening = listen(Address("127.0.0.1", 0))
        self.address = Address(*self.listening.getsockname()[:2])
        security = Security(TOKEN, *(store_context(None) if context else ()))
        answers = Answers()
        self.asked, self.taken = answers.asked, answers.taken
        self.listener = Listener(self.listening, security, answers, patience)
        self.stack = ExitStack()
        self.listener.start()

    def connected(self) -> socket.socket:
        """One that has said nothing yet."""
        where = (self.address.host, self.address.port)
        return self.stack.enter_context(socket.create_connection(where, LONG))

    def dialled(self, token: bytes = TOKEN, tls: bool = False) -> socket.socket:
        """One that has proved itself."""
        wire, _ = Dialer(self.address, token, tls).connect(LONG)
        return self.stack.enter_context(wire)

    @property
    def refused(self) -> dict[str, int]:
        return dict(self.listener.refused)

    def refuses(self, why: str, count: int = 1) -> None:
        until(lambda: self.listener.refused[why] >= count, f"refusing who {why}")
        assert self.refused == {why: count}

    def still_works(self, tls: bool = False) -> None:
        assert isinstance(ask(self.dialled(tls=tls), Echo(b"", 3)), Echoed)

    def close(self) -> None:
        self.listener.close()
        self.listening.close()
        for wire in self.taken:
            wire.close()
        self.stack.close()


@pytest.fixture
def opened() -> Iterator[Callable[..., Open]]:
    made: list[Open] = []

    def make(**how: Any) -> Open:
        made.append(Open(**how))
        return made[-1]

    with nothing_left():
        yield make
        while made:
            made.pop().close()


Make = Callable[..., Open]


def closed(wire: socket.socket) -> bytes:
    """What it is told before it is shown the door."""
    said = b""
    with suppress(ConnectionResetError):
        while some := wire.recv(4096):
            said += some
    return said


# ---------------------------------------------------------------- who may come in


@pytest.mark.parametrize("tls", [False, True])
def test_one_who_knows_the_token_is_heard(opened: Make, tls: bool) -> None:
    one = opened(context=tls)
    wire = one.dialled(tls=tls)
    for wanted in (0, 5, 100_000):
        found = ask(wire, Echo(b"", wanted))
        assert isinstance(found, Echoed)
        assert len(found.filling) == wanted
    assert len(one.asked) == 3
    assert one.refused == {}


def test_a_connection_that_becomes_anothers_is_not_the_listeners_any_more(opened: Make) -> None:
    one = opened()
    wire = one.dialled()
    wire.sendall(packet(Attach(b"link", 1, 0)))
    until(lambda: bool(one.taken))
    one.taken[0].settimeout(LONG)
    wire.sendall(b"this is the link's")
    assert read(one.taken[0], 18) == b"this is the link's"
    assert not one.listener.candidates


def test_one_that_nobody_takes_is_told_so_and_let_go(opened: Make) -> None:
    one = opened()
    wire = one.dialled()
    assert isinstance(ask(wire, Attach(b"link", 0, 0)), NoSuchLink)
    assert wire.recv(1) == b""
    assert one.refused == {}


def test_one_who_leaves_after_it_was_heard_is_no_stranger(opened: Make) -> None:
    one = opened()
    wire = one.dialled()
    ask(wire, Echo(b""))
    wire.close()
    until(lambda: not one.listener.candidates)
    assert one.refused == {}


# ---------------------------------------------------------------- who may not


def test_no_token_at_all(opened: Make) -> None:
    one = opened()
    wire = one.connected()
    wire.sendall(MAGIC + bytes(NUMBER) + bytes(NUMBER))
    assert len(closed(wire)) == 2 * NUMBER  # its number and proof, which serve nobody else
    one.refuses("did not know the token")
    assert not one.asked


def test_another_token(opened: Make) -> None:
    one = opened()
    for _ in range(3):
        with pytest.raises(Refused, match="does not know the token of this run"):
            one.dialled(OTHER)
    one.refuses("broke off", 3)
    one.still_works()


class Recorded(socket.socket):
    """A socket that keeps what goes either way."""

    def __init__(self, wire: socket.socket):
        super().__init__(fileno=wire.detach())
        self.said: list[bytes] = []

    def sendall(self, data: Any, *flags: int) -> None:
        self.said.append(bytes(data))
        super().sendall(data)


def test_a_recorded_handshake_played_again(opened: Make) -> None:
    one = opened()
    recorded = one.stack.enter_context(Recorded(one.connected()))
    recorded.settimeout(LONG)
    introduce(recorded, TOKEN)
    ask(recorded, Echo(b"", 7))
    heard = len(one.asked)
    again = one.connected()
    again.sendall(b"".join(recorded.said))
    closed(again)
    one.refuses("did not know the token")
    slowly = one.connected()  # and as it went at the time
    for said in recorded.said:
        with suppress(OSError):
            slowly.sendall(said)
    closed(slowly)
    one.refuses("did not know the token", 2)
    assert len(one.asked) == heard


GARBAGE = {
    "web": b"GET / HTTP/1.1\r\n\r\n" * 4,
    "zeros": bytes(4096),
    "nearly": b"o" + bytes(HELLO),
    "noise": random.Random(0).randbytes(300),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE)
def test_garbage(opened: Make, said: bytes) -> None:
    one = opened()
    wire = one.connected()
    with suppress(OSError):
        wire.sendall(said)
    assert closed(wire) in (UNKNOWN, NO_TLS, b"")
    until(lambda: one.listener.refused.total() == 1)
    assert not one.asked
    one.still_works()


@pytest.mark.parametrize("most", [0, 1, len(MAGIC), HELLO - 1])
def test_half_a_header_and_gone(opened: Make, most: int) -> None:
    one = opened()
    wire = one.connected()
    wire.sendall((MAGIC + bytes(NUMBER))[:most])
    wire.shutdown(socket.SHUT_WR)
    assert closed(wire) == b""
    one.refuses("broke off" if most else "said nothing")


@pytest.mark.parametrize("said", [b"", MAGIC[:3], MAGIC + bytes(NUMBER)])
def test_a_peer_that_says_nothing_more_has_its_time(opened: Make, said: bytes) -> None:
    one = opened(patience=0.1)
    wire = one.connected()
    wire.sendall(said)
    closed(wire)
    one.refuses("said nothing for too long")


def test_slow_bytes_get_no_more_time(opened: Make) -> None:
    """A byte now and then is no reason to wait for the next."""
    one = opened(patience=0.2)
    wire = one.connected()
    begun = threading.Event()

    def drip() -> None:
        begun.set()
        with suppress(OSError):
            for byte in MAGIC + bytes(NUMBER):
                wire.sendall(bytes([byte]))
                threading.Event().wait(0.02)

    dripping = threading.Thread(target=drip, daemon=True)
    dripping.start()
    one.refuses("said nothing for too long")
    dripping.join(LONG)
    assert not dripping.is_alive()


def test_one_that_has_proved_itself_may_say_nothing_wrong_either(opened: Make) -> None:
    one = opened()
    wrong = (
        struct.pack("!I", LONGEST + 1),
        struct.pack("!I", 0),
        struct.pack("!I", 3) + b"\xc1" * 3,
    )
    for count, said in enumerate(wrong, 1):
        wire = one.dialled()
        wire.sendall(said)
        assert closed(wire) == b""
        one.refuses("sent garbage", count)
    assert not one.asked


# ---------------------------------------------------------------- encryption


def test_who_does_not_encrypt_is_told_to(opened: Make) -> None:
    one = opened(context=True)
    with pytest.raises(Refused, match="speaks TLS alone"):
        one.dialled()
    one.refuses("spoke otherwise")
    one.still_works(tls=True)


def test_who_encrypts_where_nobody_does_is_told_so(opened: Make) -> None:
    one = opened()
    with pytest.raises(Refused, match="does not speak TLS as offbeat does"):
        one.dialled(tls=True)
    one.refuses("spoke otherwise")
    one.still_works()


def test_tls_that_is_never_finished_has_its_time(opened: Make) -> None:
    one = opened(context=True, patience=0.2)
    for said in (b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"):
        one.connected().sendall(said)
    one.refuses("said nothing for too long", 2)


def test_one_in_the_middle_with_another_certificate(opened: Make) -> None:
    """It has no token, ends both encryptions, and passes on all that it reads."""
    one = opened(context=True)
    context, _ = store_context(None)
    with socket.create_server(("127.0.0.1", 0)) as between:
        between.settimeout(LONG)

        def meet() -> None:
            plain, _ = between.accept()
            blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
            with plain, blind.wrap_socket(one.connected()) as there, suppress(OSError):
                plain.settimeout(LONG)
                with context.wrap_socket(plain, server_side=True) as here:
                    there.sendall(read(here, HELLO))
                    here.sendall(read(there, 2 * NUMBER))
                    there.sendall(read(here, NUMBER))

        meeting = threading.Thread(target=meet, daemon=True)
        meeting.start()
        address = Address(*between.getsockname()[:2])
        with pytest.raises(Refused, match="somebody sits between"):
            Dialer(address, TOKEN, True).connect(LONG)
        meeting.join(LONG)
        assert not meeting.is_alive()
    until(lambda: one.listener.refused.total() == 1)
    assert not one.asked


# ---------------------------------------------------------------- very many


def test_a_thousand_half_open_connections(opened: Make) -> None:
    one = opened()
    handles = len(os.listdir("/proc/self/fd"))
    said = (b"", MAGIC, MAGIC + bytes(NUMBER), MAGIC + bytes(NUMBER - 1))
    known = one.dialled()  # one who was there before
    for turn in range(1000):
        wire = one.connected()
        wire.sendall(said[turn % len(said)])
        if turn % 100 == 99:
            assert isinstance(ask(known, Echo(b"", 3)), Echoed)
        if turn >= PENDING:  # the test may not have so many open files either
            assert len(one.listener.candidates) <= PENDING
    until(lambda: one.listener.refused.total() >= 1001 - PENDING)
    one.still_works()
    assert isinstance(ask(known, Echo(b"", 3)), Echoed)  # it was not pushed out
    assert len(one.listener.candidates) <= PENDING
    one.stack.close()
    until(lambda: not one.listener.candidates)
    until(lambda: len(os.listdir("/proc/self/fd")) == handles)
    assert one.listener.refused.total() == 1000


def test_when_there_are_no_more_handles_the_oldest_stranger_goes(
    opened: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = opened()
    stranger = one.connected()
    until(lambda: len(one.listener.candidates) == 1)
    accept, failed = socket.socket.accept, threading.Event()

    def none_left(self: socket.socket) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", none_left)
    one.still_works()
    assert failed.is_set()
    assert closed(stranger) == b""
    assert one.refused == {"many": 1}


# ---------------------------------------------------------------- where it listens


def test_an_address_that_is_not_this_machines() -> None:
    with (
        nothing_left(),
        pytest.raises(ConfigError, match=r"nobody can listen at 192\.0\.2\.1:7077"),
    ):
        listen(Address("192.0.2.1", 7077))


def test_a_name_that_nobody_knows() -> None:
    with nothing_left(), pytest.raises(ConfigError, match="name an address of this machine"):
        listen(Address("no.such.host.invalid", 7077))


def test_a_port_in_use() -> None:
    with nothing_left(), socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"in use.*and a port that is free"):
            listen(Address("127.0.0.1", port))


def test_it_listens_at_that_address_alone() -> None:
    with listen(Address("127.0.0.1", 0)) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
        where = ("127.0.0.2", listening.getsockname()[1])
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(where, LONG)


def test_it_ends_while_somebody_is_half_in(opened: Make) -> None:
    one = opened()
    wire = one.connected()
    wire.sendall(MAGIC)
    until(lambda: len(one.listener.candidates) == 1)
    one.listener.close()
    assert not one.listener.thread.is_alive()
    assert closed(wire) == b""
    assert module.PENDING == PENDING


def test_proofs_are_of_fixed_length() -> None:
    assert len(prove(TOKEN, b"worker", b"a", b"b")) == NUMBER
