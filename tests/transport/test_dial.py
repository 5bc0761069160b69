"""Addresses, and what a worker is told where nothing, or something else, listens."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.transport.dial import PORT, Address, Dialer
from offbeat.transport.handshake import NO_TLS, Refused

TOKEN = b"a token of these tests"
LONG = 20.0


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("192.168.1.5:7078", "192.168.1.5", 7078),
        ("192.168.1.5", "192.168.1.5", PORT),
        ("store.example", "store.example", PORT),
        ("[::1]:80", "::1", 80),
        ("[::1]", "::1", PORT),
        ("::1", "::1", PORT),
        ("localhost:0", "localhost", 0),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int) -> None:
    found = Address.read(text)
    assert (found.host, found.port) == (host, port)
    assert Address.read(str(found)) == found


WRONG = ["", ":7077", "host:", "host:port", "host:65536", "host:-1", "host:²", "[::1]x", "a..b:1"]


@pytest.mark.parametrize("text", [*WRONG, "x" * 300])
def test_what_is_no_address_is_a_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="is no address: write a host and a port"):
        Address.read(text)


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.1.5", False),
        ("example.org", False),
    ],
)
def test_links_that_leave_the_machine_are_encrypted(host: str, here: bool) -> None:
    address = Address(host, 1)
    assert address.stays_here is here
    assert Dialer(address, TOKEN).encrypts is not here
    assert Dialer(address, TOKEN, tls=True).encrypts
    assert not Dialer(address, TOKEN, tls=False).encrypts


Serve = Callable[[Callable[[socket.socket], None]], Address]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Something that listens, and does this with whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(LONG)
        threads: list[threading.Thread] = []

        def begin(act: Callable[[socket.socket], None]) -> Address:
            def work() -> None:
                wire, _ = listening.accept()
                with wire, suppress(OSError):
                    wire.settimeout(LONG)
                    act(wire)

            threads.append(threading.Thread(target=work, daemon=True))
            threads[-1].start()
            return Address(*listening.getsockname()[:2])

        yield begin
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()


@pytest.mark.parametrize("said", [NO_TLS, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_one_that_speaks_no_tls_is_named(serve: Serve, said: bytes) -> None:
    def speaks(wire: socket.socket) -> None:
        wire.recv(1 << 14)
        wire.send(said)

    with pytest.raises(Refused, match=r"does not speak TLS as offbeat does.*--no-tls"):
        Dialer(serve(speaks), TOKEN, tls=True).connect()


@pytest.mark.parametrize("tls", [False, True])
def test_one_that_breaks_off_may_be_tried_again(serve: Serve, tls: bool) -> None:
    with pytest.raises(ConnectionError):
        Dialer(serve(lambda wire: None), TOKEN, tls=tls).connect()


@pytest.mark.parametrize("tls", [False, True])
def test_one_that_breaks_off_in_the_middle_may_be_tried_again(serve: Serve, tls: bool) -> None:
    def reads_and_leaves(wire: socket.socket) -> None:
        wire.recv(4096)

    with pytest.raises(ConnectionError):
        Dialer(serve(reads_and_leaves), TOKEN, tls=tls).connect()


def waits(done: threading.Event) -> None:
    done.wait(LONG)


@pytest.mark.parametrize("tls", [False, True])
def test_one_that_says_nothing_is_not_waited_for_for_ever(serve: Serve, tls: bool) -> None:
    done = threading.Event()
    address = serve(lambda wire: waits(done))
    try:
        with pytest.raises(TimeoutError):
            Dialer(address, TOKEN, tls=tls).connect(0.05)
    finally:
        done.set()


def test_nobody_there_is_an_error_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        Dialer(Address("127.0.0.1", port), TOKEN).connect()


def test_an_authority_that_is_none_is_a_clear_error(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "authority.pem"
    for content in (None, "no certificate"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(ConfigError, match="is no certificate to check others with"):
            Dialer(serve(lambda wire: None), TOKEN, tls=True, authority=file).connect()
