"""When bytes over TCP are a sign of life: as they come, and not when somebody looks."""

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.store.board import new_board
from offbeat.transport import tcp_link, tcp_port
from offbeat.transport.cargo import Cargo, Packing
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import Enter
from offbeat.transport.link import StoreGone
from offbeat.transport.meter import Gauge
from offbeat.transport.tcp_link import DialedStore
from offbeat.transport.tcp_port import WorkerLink
from tests.transport.common import LONG, shared_memory

PATIENCE = 3.0


class Nobody:
    """Who is told what happens, and minds nothing."""

    def hear(self, worker: int, way: object) -> None: ...
    def interrupted(self, worker: int, way: object) -> None: ...
    def restored(self, worker: int, way: object) -> None: ...


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + LONG
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_bytes_are_a_sign_of_life_when_they_come_however_late_one_looks(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(tcp_port, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    cargo = Cargo(shared_memory().slots[0], Packing())
    link = WorkerLink(b"link", 1, cargo, [], Gauge(new_board(1), 0))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mine = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with mine:
        link.attach(0, theirs)
        link.begin(0, PATIENCE, Nobody())
        until(lambda: bool(link.frames.wires()))
        for moment in (150.0, 200.0):
            clock[0] = moment
            mine.sendall(b"\0")  # a part of a header
            until(lambda: link.read == link.frames.received and link.heard_at == clock[0])
            clock[0] = moment + PATIENCE * 0.85
            assert link.lives(PATIENCE)
            clock[0] = moment + PATIENCE
            assert not link.lives(PATIENCE)
        link.close()
        assert link.thread is not None
        link.thread.join(LONG)
        assert not link.thread.is_alive()


def test_a_store_that_is_out_of_reach_is_dialed_anew_before_the_system_gives_up(monkeypatch):
    """The system asks again after 1, 3, 7, ... seconds: what heals meanwhile would be seen late."""
    now = [0.0]
    tried: list[float] = []

    def connect(where: Any, seconds: float) -> socket.socket:
        tried.append(seconds)
        now[0] += seconds
        raise TimeoutError

    class Never(threading.Event):
        """Nobody stops it, and the time passes."""

        def wait(self, timeout: float | None = None) -> bool:
            now[0] += timeout or 0.0
            return False

    monkeypatch.setattr(socket, "create_connection", connect)
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(tcp_link, "time", clock)
    request = Enter(b"", 0, -1, False, False, b"", "", "", 0.0)
    dialer = Dialer(Address("127.0.0.1", 1), b"t" * 32)
    store = DialedStore(dialer, request, 8 * PATIENCE, stopped=Never())
    with pytest.raises(StoreGone):
        store.mend(b"link", 0, 0)
    assert [seconds / PATIENCE for seconds in tried] == [1, 2, 4, 8, 8, 8]
