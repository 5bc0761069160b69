"""What counts as a sign of life on a link: what has come, and what is known to have arrived."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.store.board import new_board
from offbeat.transport.frames import Frames, Misbehaved, tune
from offbeat.transport.meter import Gauge
from offbeat.transport.tcp_port import WorkerLink

LONG = 20.0


@pytest.fixture
def ends() -> Iterator[tuple[Frames, socket.socket]]:
    """Frames over a connection whose other end reads only what the test reads."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        mine = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    other.settimeout(LONG)
    tune(mine, LONG)

    def decode(told: bytes) -> tuple[bytes, list[memoryview]]:
        raise Misbehaved("nothing comes here")

    frames = Frames(1, decode)
    frames.connections[0].attach(mine)
    yield frames, other
    frames.close()
    other.close()


def test_what_only_this_system_has_taken_is_no_sign_of_life(ends):
    frames, other = ends
    while frames.flushed:
        frames.put(b"?", [memoryview(bytes(1 << 18))])
        frames.flush()
    while frames.heard != (last := frames.heard):  # confirmations may be on their way
        assert last >= 0
    assert frames.heard < frames.moved
    before = frames.heard
    left = frames.moved
    while left:
        left -= len(other.recv(1 << 16))
    frames.flush()
    assert frames.heard > before


def test_what_has_come_is_one(ends):
    frames, other = ends
    assert frames.heard == 0
    other.sendall(bytes(7))
    while frames.heard < 7:
        assert not frames.absorb()


def test_a_connection_that_breaks_is_no_sign_of_life(ends):
    """What was under way on it is not known to have arrived."""
    frames, _ = ends
    cargo: Any = None
    link = WorkerLink(b"a link", 1, cargo, [], Gauge(new_board(1), 0))
    link.frames = frames
    while frames.flushed:
        frames.put(b"?", [memoryview(bytes(1 << 18))])
        frames.flush()
    link.heard, link.heard_at, link.broken, link.large = 0, -1.0, True, True
    frames.connections[0].detach()
    link._note()
    assert link.heard_at == -1.0
    link.broken = False
    link._note()
    assert link.heard_at > 0
