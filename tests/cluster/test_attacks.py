"""Who does not know the token and comes all the same: none gets in, and the run ends right."""

import os
import resource
import selectors
import socket
import threading
from ast import literal_eval
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network.hosts import Host, until
from offbeat.log.records import Linked
from offbeat.transport.handshake import HELLO, MAGIC, NUMBER, Enter, Introduction, packet, prove
from tests.cluster.common import PORT, Offbeat, Site, site

pytestmark = pytest.mark.cluster

HALF_OPEN = 1000
SECONDS = 20.0  # after which a connection that is not closed is a fault
TLS = ["plain", "encrypted"]


class Intruder:
    """Runs on a host; what `attack` returns is told, and what it raises fails the test."""

    def __init__(self, host: Host, attack: Callable[[], object], folder: Path):
        self.out, self.complaints = folder / "intruder", folder / "intruder-err"
        self.process = host.fork(lambda: self._play(attack), self.out, self.complaints)

    def _play(self, attack: Callable[[], object]) -> int:
        print(attack())
        return 0

    def ended(self) -> str:
        assert self.process.wait() == 0, self.complaints.read_text()
        return self.out.read_text()


def dial(address: str) -> socket.socket:
    return socket.create_connection((address, PORT), SECONDS)


def answer_to(address: str, said: bytes) -> bytes:
    """All that comes back until the store ends the connection, which it has to."""
    with dial(address) as wire:
        with suppress(ConnectionError):  # it may have ended it in the middle
            wire.sendall(said)
        found = b""
        with suppress(ConnectionError):
            while some := wire.recv(1 << 16):
                found += some
        return found


def guesses() -> dict[str, bytes]:
    """What one may say who does not know the token."""
    hello = MAGIC + os.urandom(NUMBER)
    wrong = Introduction(b"a token that was guessed")
    wrong.hear(MAGIC + os.urandom(NUMBER))
    enter = packet(Enter(b"0" * 16, 1, -1, False, False, b"", "", "intruder", 0.0))
    return {
        "noise": os.urandom(HELLO * 100),
        "zeros": bytes(1 << 20),
        "a proof that is guessed": hello + os.urandom(NUMBER) + enter,
        "a proof of another token": hello + prove(b"guessed", b"worker", hello, hello, b"") + enter,
        "no proof at all": hello + enter,
        "a length of 2^62": hello + (1 << 62).to_bytes(8, "big") * 4 + enter,
        "a browser": b"GET / HTTP/1.1\r\nHost: store\r\n\r\n",
        "a record of TLS that cannot be": b"\x16\x03\x01\xff\xff" + os.urandom(1 << 16),
    }


@contextmanager
def attacked(folder: Path, tls: str) -> Iterator[tuple[Site, Host]]:
    """A run of two workers, and a host that has no business there; afterwards nobody else was in.

    A third worker comes while the attack lasts, if the test has it come.
    """
    with site(folder, 4) as here:
        *_, late, intruder = here.others
        safe = ["--no-tls"] if tls == "plain" else []
        here.serve("-n", "2:3", "--sync", "asp", *safe)
        for host in here.others[:2]:
            here.work(host, *safe)
        for host in here.others[:2]:
            here.contributes(host)
        yield here, intruder
        here.work(late, *safe)
        here.contributes(late)
        intruder.kill()
        summary = here.ends_right()
        assert summary["turned_away"] > 0
        assert summary["lost"] == summary["refused"] == 0
        came = {record.host for record in here.records() if isinstance(record, Linked)}
        assert came == {"lab2", "lab3", "lab4"}


@pytest.mark.parametrize("tls", TLS)
def test_who_does_not_know_the_token_is_told_nothing(tls, tmp_path):
    with attacked(tmp_path, tls) as (here, intruder):
        at = here.store_host.address

        def attack() -> dict[str, int]:
            said = guesses()
            with ThreadPoolExecutor(len(said)) as pool:  # the store gives each its time
                came = pool.map(lambda words: len(answer_to(at, words)), said.values())
                return dict(zip(said, came, strict=True))

        # Its random number and its proof, which prove nothing to one who does not know the token;
        # or four letters, or an alert of TLS.
        answers = literal_eval(Intruder(intruder, attack, tmp_path).ended())
        assert set(answers) == set(guesses())
        assert all(length <= 2 * NUMBER for length in answers.values()), answers


@pytest.mark.parametrize("tls", TLS)
def test_a_worker_with_another_token(tls, tmp_path):
    with attacked(tmp_path, tls) as (here, intruder):
        (intruder.folder / "offbeat.token").write_text("another token, which is long enough")
        refused = here.work(intruder, *(["--no-tls"] if tls == "plain" else []))
        here.workers.remove(refused)
        assert "does not know the token of this run" in refused.ended(2)
        (intruder.folder / "offbeat.token").unlink()
        refused = here.work(intruder, *(["--no-tls"] if tls == "plain" else []))
        here.workers.remove(refused)
        assert "the token of the run cannot be read" in refused.ended(2)


class Recorder:
    """Passes on what a worker and its store say to each other, and keeps what the worker says."""

    def __init__(self, store: str):
        self.store, self.said = store, bytearray()
        self.listening = socket.create_server(("", PORT))

    def pass_on(self) -> None:
        worker, _ = self.listening.accept()
        with worker, dial(self.store) as store:
            ways = {worker: store, store: worker}
            watch = selectors.DefaultSelector()
            for wire in ways:
                watch.register(wire, selectors.EVENT_READ)
            while True:
                for key, _ in watch.select():
                    wire: Any = key.fileobj
                    some = wire.recv(1 << 16)
                    if not some:
                        return
                    if wire is worker:
                        self.said += some
                    ways[wire].sendall(some)


def test_a_handshake_that_was_heard_and_is_said_again(tmp_path):
    """Without TLS one in between hears all of it, and cannot use it."""
    with attacked(tmp_path, "plain") as (here, intruder):
        at = here.store_host.address
        heard = tmp_path / "heard"

        def attack() -> int:
            recorder = Recorder(at)
            heard.touch()
            recorder.pass_on()
            said = bytes(recorder.said)
            assert said.startswith(MAGIC)
            assert len(said) > HELLO + NUMBER  # it was let in, and has asked something
            return max(len(answer_to(at, said)) for _ in range(3))

        listening = Intruder(intruder, attack, tmp_path)
        until(heard.exists, "it listens in")
        words = ["doctor", "--at", f"{intruder.address}:{PORT}", "--no-tls"]
        asked = Offbeat(here.others[2], *words)
        assert "answers and knows the token" in asked.ended()
        assert int(listening.ended()) == 2 * NUMBER  # the store's own number and proof, and its end


@pytest.mark.parametrize("tls", TLS)
def test_a_thousand_half_open_connections_and_slow_bytes(tls, tmp_path):
    """They are ended one after the other and made again; meanwhile a worker comes."""
    with attacked(tmp_path, tls) as (here, intruder):
        at = here.store_host.address
        ready = tmp_path / "ready"

        def attack() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            threading.Thread(target=dribble, args=(at,), daemon=True).start()
            watch = selectors.DefaultSelector()
            while True:
                while len(watch.get_map()) < HALF_OPEN:
                    watch.register(dial(at), selectors.EVENT_READ)
                ready.touch()
                for key, _ in watch.select():
                    wire: Any = key.fileobj
                    watch.unregister(wire)
                    wire.close()

        Intruder(intruder, attack, tmp_path)
        until(ready.exists, "a thousand connections are there")
        here.goes_on(but=here.others[2:])


def dribble(address: str) -> None:
    """A greeting byte by byte, over and over."""
    while True:
        with dial(address) as wire, suppress(OSError):
            for letter in MAGIC + os.urandom(NUMBER):
                wire.sendall(bytes([letter]))
                wire.settimeout(0.2)
                with suppress(TimeoutError):
                    wire.recv(1)


def test_one_that_says_nothing_is_ended(tmp_path):
    with attacked(tmp_path, "plain") as (here, intruder):
        at = here.store_host.address

        def attack() -> bytes:
            with dial(at) as silent, dial(at) as slow:
                slow.sendall(MAGIC[:1])
                return silent.recv(1) + slow.recv(1)

        assert Intruder(intruder, attack, tmp_path).ended() == "b''\n"
