"""A worker's end: it dials, is let in once, and takes broken connections up again."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from offbeat.log.records import Joined, Linked, Updated
from offbeat.protocol.messages import Goodbye, Rejoin
from offbeat.transport import tcp_link as module
from offbeat.transport.frames import MOST
from offbeat.transport.handshake import Enter, Refused, ask
from offbeat.transport.link import RunOver, StoreGone
from offbeat.transport.tcp_link import FAR, connections_for
from tests.engine.hosts.proxy import Fate, Proxy
from tests.transport.tcp import LONG, Client, TcpStore, tcp_store


@pytest.fixture
def store() -> Iterator[TcpStore]:
    with tcp_store() as made:
        yield made


@pytest.fixture
def proxy(store: TcpStore) -> Iterator[Proxy]:
    made = Proxy()
    made.target = store.address.port
    made.start()
    yield made
    made.close()


def incarnations(store: TcpStore) -> list[int]:
    return [record.incarnation for record in store.records.of(Joined)]


# ---------------------------------------------------------------- coming in


def test_one_connection_is_enough_where_it_is_not_far() -> None:
    assert connections_for(FAR / 2) == 1
    assert connections_for(FAR) == MOST


@pytest.mark.parametrize("connections", [1, 4])
def test_a_link_has_as_many_connections_as_it_asks_for(store: TcpStore, connections: int) -> None:
    one = store.client(connections=connections)
    assert one.join() == 1
    assert len(store.way(one.number).frames.wires()) == connections
    (linked,) = store.records.of(Linked)
    assert (linked.worker, linked.connections) == (one.number, connections)
    assert one.step() == 1


@pytest.mark.parametrize("at", [0, 1, 40, 104, 136, 150, 250, 500])
@pytest.mark.parametrize("which", [0, 1])
def test_one_that_does_not_hear_that_it_is_in_comes_again_as_the_same(
    store: TcpStore, proxy: Proxy, at: int, which: int
) -> None:
    """However far the first attempt has come: there are two places, and the other stays free."""
    proxy.next = [*([Fate()] * which), Fate(lasts=at)]
    one = store.client(connections=2, port=proxy.port)
    other = store.client(connections=1)
    assert {one.number, other.number} == {0, 1}
    assert one.join() == 1
    assert [one.step(), one.step()] == [1, 2]
    assert len(list(store.records.of(Linked))) == 2


def test_who_takes_part_insists_on_a_place_and_gets_it_in_spite_of_tears(
    store: TcpStore, proxy: Proxy
) -> None:
    proxy.next = [Fate(lasts=at) for at in (100, 140, 200, 300, 420, 430)]
    one = store.client(1, connections=4, port=proxy.port)
    assert one.number == 1
    assert one.join() == 1
    assert proxy.torn >= 4


def test_nobody_there_is_looked_for_within_patience_and_not_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with tcp_store(patience=0.05) as store, pytest.raises(StoreGone):
        store.client(port=port)


# ---------------------------------------------------------------- breaks


@pytest.mark.parametrize("connections", [1, 4])
def test_a_torn_link_goes_on_as_the_same_incarnation(
    store: TcpStore, proxy: Proxy, connections: int
) -> None:
    one = store.client(connections=connections, port=proxy.port)
    one.join()
    for version in range(1, 7):
        assert one.step(float(version)) == version
        proxy.tear()
    assert incarnations(store) == [1]
    assert len(list(store.records.of(Linked))) == 1
    updates = list(store.records.of(Updated))
    assert [record.version for record in updates] == [1, 2, 3, 4, 5, 6]
    assert proxy.torn >= 6


def test_what_the_store_no_longer_knows_is_begun_anew(store: TcpStore) -> None:
    """As after its server process was killed: another incarnation over another link."""
    one = store.client()
    one.join()
    assert one.step() == 1
    with store.lock:
        store.port.disconnect(one.number)
        store.protocol.gone(one.number, 0.0)
    assert isinstance(one.link.receive(), Rejoin)
    assert one.join() == 2
    assert one.step() == 2
    assert len(list(store.records.of(Linked))) == 2


def test_a_store_that_was_through_is_not_looked_for(store: TcpStore) -> None:
    """One that has slept through the end has been told, and says goodbye to nobody at once."""
    one = store.client()
    one.join()
    with store.lock:
        store.protocol.ended_by = 0
        store.dispatcher.server.dismiss()
        due = store.port.take()
    store.port.send(due)
    pump = one.link.pump
    assert isinstance(pump, module.Pump)
    wire = pump.frames.wires()[0]
    assert socket_has(wire)
    store.acceptor.close()
    store.listening.close()
    with store.lock:
        store.port.disconnect(0)
    end = time.monotonic() + LONG
    while not pump.over:
        one.link.send(Goodbye({}))  # until the system has noticed that nobody is there
        assert time.monotonic() < end
    with pytest.raises(RunOver) as caught:
        one.client.pull([])
    assert not isinstance(caught.value, StoreGone)


def socket_has(wire: socket.socket) -> bool:
    """Whether something has come that nobody has read."""
    wire.settimeout(LONG)
    try:
        return bool(wire.recv(1, socket.MSG_PEEK))
    finally:
        wire.setblocking(False)


# ---------------------------------------------------------------- a thread of its own


def test_leaving_does_not_wait_for_a_store_that_is_gone() -> None:
    """Ctrl-C in a worker, whose thread is looking for the store."""
    with tcp_store(patience=3600.0) as store, ExitStack() as stack:
        proxy = Proxy()
        proxy.target = store.address.port
        proxy.start()
        stack.callback(proxy.close)
        maker = store.maker(port=proxy.port)
        link = store.link(maker, overlap=True)
        looking = threading.Event()
        connect = maker.dialer.connect

        class Gone:
            def connect(self, *seconds: float) -> Any:
                looking.set()
                raise ConnectionRefusedError

        maker.dialer = Gone()  # type: ignore[assignment]
        proxy.tear()
        assert looking.wait(LONG)
        link.close()
        with pytest.raises(StoreGone):
            link.receive()
        assert connect


# ---------------------------------------------------------------- being turned away


def test_a_difference_is_named(store: TcpStore) -> None:
    words = "the model has w (4,) float32 where the run has w (5,) float32"
    with pytest.raises(Refused, match=r"this-host runs another script than the store: the model"):
        store.client(difference=words, host="this-host")
    assert store.port.links == {}


def test_one_too_many_is_told_what_to_do(store: TcpStore) -> None:
    clients = [store.client() for _ in range(2)]
    assert [one.number for one in clients] == [0, 1]
    with pytest.raises(Refused, match=r"all 2 places of this run are taken.*larger -n"):
        store.client()
    with pytest.raises(Refused, match="worker 1 is there already"):
        store.client(1)


@pytest.mark.parametrize("connections", [0, 5, 1 << 40])
def test_only_so_many_connections(store: TcpStore, connections: int) -> None:
    wire, _ = store.maker().dialer.connect(LONG)
    asked: Enter = store.request()
    asked.connections, asked.link = connections, b"link"
    with wire, pytest.raises(Refused, match="one to four"):
        ask(wire, asked)


def test_gradients_arrive_bit_for_bit_through_every_tear(store: TcpStore, proxy: Proxy) -> None:
    lasts = iter([37, 110, 133, 61, 12])
    one = Client(store, store.maker(port=proxy.port))
    one.join()
    begun = {n: v.clone() for f in store.store.parameters.flats for n, v in f.views.items()}
    moved = momentum = 0.0
    for turn in range(1, 6):
        for way in proxy.ways:
            way.fate = Fate(lasts=way.moved + next(lasts))
        one.step(float(turn))
        momentum = 0.5 * momentum + turn
        moved += 0.05 * momentum
    assert proxy.torn >= 5
    with store.lock:
        now = {n: v.clone() for f in store.store.parameters.flats for n, v in f.views.items()}
    assert one.snapshot is not None
    pulled = {n: v for f in one.snapshot.parameters for n, v in f.views.items()}
    assert all(torch.equal(now[name], pulled[name]) for name in now)
    for name, value in begun.items():
        assert torch.allclose(value - now[name], torch.full_like(value, moved))
