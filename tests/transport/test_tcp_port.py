"""The server's end: what breaks, who misbehaves, and what its threads leave behind."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from offbeat import codec as codecs
from offbeat.data.lease import Lease
from offbeat.engine.hosts.admission import OFFENCES
from offbeat.log.records import Joined, Lost, Part
from offbeat.protocol.messages import Join, Push, Rejoin, Stop, encode
from offbeat.store.board import new_board
from offbeat.transport.cargo import Cargo, Packing
from offbeat.transport.dial import Dialer
from offbeat.transport.frames import HEADER
from offbeat.transport.handshake import (
    Attach,
    Attached,
    Entered,
    NoSuchLink,
    NotYet,
    Refused,
    ask,
    read,
)
from offbeat.transport.meter import Gauge
from offbeat.transport.tcp_port import WorkerLink
from tests.engine.hosts.proxy import Fate, Proxy
from tests.transport.common import shared_memory
from tests.transport.tcp import LONG, TOKEN, TcpStore, tcp_store


@pytest.fixture
def store() -> Iterator[TcpStore]:
    with tcp_store() as made:
        yield made


class Raw:
    """A worker that is let in and then says what it likes."""

    def __init__(self, store: TcpStore):
        self.store, self.name = store, b"raw"
        self.wire = self.connected()
        asked = store.request()
        asked.link, asked.connections = self.name, 1
        answer = ask(self.wire, asked)
        assert isinstance(answer, Entered)
        self.number = answer.number
        self.way = store.way(self.number)

    def connected(self) -> socket.socket:
        wire, _ = Dialer(self.store.address, TOKEN).connect(LONG)
        self.store.wires.append(wire)
        return wire

    def say(self, message: Any, nbytes: int = 0) -> None:
        told = encode(message)
        self.wire.sendall(HEADER.pack(len(told), nbytes, 0) + told)

    def is_shown_the_door(self) -> None:
        """Its thread ends, and its connection is closed."""
        thread = self.way.thread
        assert thread is not None
        thread.join(LONG)
        assert not thread.is_alive()
        with self.wire:
            try:
                while self.wire.recv(1 << 16):
                    continue
            except ConnectionResetError:
                pass
        self.store.until(lambda: self.store.port.way(self.number) is None)


def push_of(worker: int, **more: Any) -> Push:
    return Push(Part(worker, 1, 0, 0, [Lease(0, 0, 4)], 4), True, **more)


# ---------------------------------------------------------------- who misbehaves


@pytest.mark.parametrize(
    "said",
    [
        b"\xff" * 64,
        HEADER.pack(3, 0, 0) + b"\xc1\xc1\xc1",
        HEADER.pack(1 << 31, 0, 0),
        HEADER.pack(len(encode(Join())), 1 << 62, 0) + encode(Join()),
        HEADER.pack(len(encode(Join())), 0, 9) + encode(Join()),
        HEADER.pack(0, 0, 0),
    ],
    ids=["noise", "no message", "too long", "2^62 bytes", "never sent", "the end"],
)
def test_one_that_breaks_the_rules_is_as_good_as_gone(store: TcpStore, said: bytes) -> None:
    one = Raw(store)
    one.wire.sendall(said)
    one.is_shown_the_door()
    assert store.client().join() >= 1  # others come, and its place is free


def test_one_that_keeps_breaking_the_rules_is_not_let_in_again(store: TcpStore) -> None:
    for _ in range(OFFENCES):
        one = Raw(store)
        one.wire.sendall(b"\xff" * 64)
        one.is_shown_the_door()
    refused = store.acceptor.refused
    with pytest.raises(
        Refused, match=r"3 links from 127\.0\.0\.1 have ended.*start the store again"
    ):
        store.client()
    assert store.acceptor.refused == refused + 1


def test_one_that_leaves_or_breaks_off_has_broken_no_rule(store: TcpStore) -> None:
    for _ in range(OFFENCES + 1):
        one = Raw(store)
        one.wire.sendall(HEADER.pack(0, 0, 0))
        one.is_shown_the_door()
    assert store.client().join() >= 1


@pytest.mark.parametrize(
    "push", [push_of(0, place=7), push_of(0, place=-2), push_of(0, place=1 << 40)], ids=str
)
def test_a_place_that_there_is_not(store: TcpStore, push: Push) -> None:
    one = Raw(store)
    one.say(push)
    one.is_shown_the_door()


def test_one_that_speaks_for_another_is_as_good_as_gone(store: TcpStore) -> None:
    honest = store.client(1)
    honest.join()
    one = Raw(store)
    assert one.number == 0
    one.say(Join())
    store.until(lambda: len(list(store.records.of(Joined))) == 2)
    one.say(push_of(1), 0)
    one.is_shown_the_door()
    assert [r.worker for r in store.records.of(Lost)] == [0]
    assert honest.step() == 1


def test_a_payload_that_makes_no_sense_ends_its_link_and_not_its_thread_alone() -> None:
    memory, codec = shared_memory(), codecs.parse("topk:0.5")
    link = WorkerLink(
        b"link", 1, Cargo(memory.slots[0], Packing(codec)), [], Gauge(new_board(1), 0)
    )
    heard = threading.Event()

    class LinkEvents:
        def hear(self, worker: int, way: object) -> None:
            heard.set()

        def interrupted(self, worker: int, way: object) -> None:
            raise AssertionError

        restored = interrupted

    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname(), LONG)
        mine, _ = listening.accept()
    with theirs:
        link.attach(0, mine)
        link.begin(0, LONG, LinkEvents())
        header = theirs.recv(4)
        assert len(read(theirs, int.from_bytes(header, "big"))) > 0
        push = push_of(0, place=0)
        views = link.cargo.of_push(push)
        garbage = b"\x7f" * sum(map(len, views))  # rows far behind the last
        told = encode(push)
        theirs.sendall(HEADER.pack(len(told), len(garbage), 0) + told + garbage)
        assert heard.wait(LONG)
        assert link.ended
        assert not link.arrived
        assert link.thread is not None
        link.thread.join(LONG)
    memory.arena.close()


# ---------------------------------------------------------------- breaks


def test_a_connection_that_breaks_while_nothing_moves_is_noticed_and_made_again(
    store: TcpStore,
) -> None:
    """One that carries stretches of large buffers only, and none are under way."""
    proxy = Proxy()
    proxy.target = store.address.port
    proxy.start()
    try:
        one = store.client(connections=4, port=proxy.port)
        one.join()
        way = store.way(one.number)
        third = way.frames.connections[2].wire
        for between in proxy.ways[2:3]:
            between.fate = Fate(lasts=0)
        proxy.wakeup.wake()
        store.until(lambda: way.broken)
        assert one.step() == 1  # which mends it
        assert one.step() == 2
        store.until(lambda: not way.broken)
        assert way.frames.connections[2].wire is not third
        assert [r.incarnation for r in store.records.of(Joined)] == [1]
    finally:
        proxy.close()


def test_a_connection_that_comes_after_the_end_is_closed(store: TcpStore) -> None:
    one = Raw(store)
    one.wire.sendall(b"\xff" * 64)
    one.is_shown_the_door()
    mine, theirs = socket.socketpair()
    with theirs:
        one.way.attach(0, mine)
        assert mine.fileno() == -1
        theirs.settimeout(LONG)
        assert theirs.recv(1) == b""


def test_a_link_that_is_not_there_is_not_gone_on_with(store: TcpStore) -> None:
    one = Raw(store)
    for asked in (Attach(b"none", 0, 0), Attach(b"raw", 1, 0), Attach(b"raw", 0, -1)):
        with one.connected() as wire:
            assert isinstance(ask(wire, asked), NoSuchLink)


def test_one_that_claims_to_have_what_was_never_sent_ends_its_link(store: TcpStore) -> None:
    one = Raw(store)
    with one.connected() as wire:
        assert isinstance(ask(wire, Attach(b"raw", 0, 1 << 40)), Attached)
        one.is_shown_the_door()


def test_half_a_frame_is_gone_on_with_over_another_connection(store: TcpStore) -> None:
    one = Raw(store)
    told = encode(Join())
    whole = HEADER.pack(len(told), 0, 0) + told
    for at in range(1, len(whole)):
        one.wire.sendall(whole[at - 1 : at])
        one.wire.shutdown(socket.SHUT_WR)
        store.until(lambda: one.way.broken)
        one.wire.close()
        one.wire = one.connected()
        answer = ask(one.wire, Attach(b"raw", 0, 0))
        assert isinstance(answer, Attached)
        assert answer.received == at
        store.until(lambda: not one.way.broken)
    one.wire.sendall(whole[-1:])
    store.until(lambda: len(list(store.records.of(Joined))) == 1)
    one.wire.close()


# ---------------------------------------------------------------- who comes in its place


def test_the_thread_of_a_new_link_waits_for_that_of_the_one_before(store: TcpStore) -> None:
    """Both would write the same slot."""
    one = Raw(store)
    one.say(Join())
    store.until(lambda: len(list(store.records.of(Joined))) == 1)
    go_on, at = threading.Event(), threading.Event()
    absorb = one.way.frames.absorb

    def slowly() -> bool:
        at.set()
        assert go_on.wait(LONG)
        return absorb()

    one.way.frames.absorb = slowly  # type: ignore[method-assign]
    one.wire.sendall(HEADER.pack(1, 0, 0))
    assert at.wait(LONG)
    one.wire.close()  # its process is killed, and another is there at once
    maker = store.maker(one.number, instead=True)
    entered = threading.Event()

    def enter() -> None:
        store.link(maker)
        entered.set()

    coming = threading.Thread(target=enter, daemon=True)
    coming.start()
    store.until(lambda: store.port.way(one.number) is not one.way)
    new = store.way(one.number)
    assert new.thread is not None
    assert new.thread.is_alive()
    assert new.coming  # nobody has taken its connection yet
    assert not entered.is_set()
    go_on.set()
    assert entered.wait(LONG)
    coming.join(LONG)


def test_one_whose_process_is_gone_is_known_by_its_closed_connections(store: TcpStore) -> None:
    one = Raw(store)
    store.until(lambda: not one.way.abandoned)  # its link has the connection by now
    one.wire.close()
    store.until(lambda: one.way.abandoned)
    one.way.frames.close()  # as its thread may do at any moment
    assert one.way.abandoned


def test_who_may_get_the_place_of_one_out_of_reach_waits_for_it() -> None:
    """As a machine that was started again does, before its first connection counts as lost."""
    with tcp_store(workers=1) as store:
        one = Raw(store)
        one.say(Join())
        store.until(lambda: len(list(store.records.of(Joined))) == 1)
        one.wire.close()
        store.until(lambda: one.way.broken)
        asked = store.request()
        asked.link, asked.connections = b"another", 1
        wire, _ = store.maker().dialer.connect(LONG)
        with wire:
            assert isinstance(ask(wire, asked), NotYet)
        found: list[int] = []
        coming = threading.Thread(target=lambda: found.append(store.client().number), daemon=True)
        coming.start()
        with store.lock:
            store.protocol.gone(0, time.monotonic())
        coming.join(LONG)
        assert found == [0]


# ---------------------------------------------------------------- the end


def test_a_store_that_ends_does_not_wait_for_who_comes_in(store: TcpStore) -> None:
    """Who ends it has the lock, and so has to wait whoever lets somebody in."""
    wire, _ = Dialer(store.address, TOKEN).connect(LONG)
    with wire, store.lock:
        asked = store.request()
        asked.link, asked.connections = b"late", 1
        waiting = threading.Event()
        respond = store.acceptor.listener.respond

        def responds(*what: Any) -> Any:
            waiting.set()
            return respond(*what)

        store.acceptor.listener.respond = responds
        said: list[BaseException] = []

        def ask_it() -> None:
            try:
                ask(wire, asked)
            except Exception as error:
                said.append(error)

        asking = threading.Thread(target=ask_it, daemon=True)
        asking.start()
        assert waiting.wait(LONG)
        store.acceptor.close()
        asking.join(LONG)
        assert "the run is over" in str(said[0])
        assert store.port.links == {}


def test_what_goes_wrong_at_the_door_is_the_runs_failure(
    store: TcpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*what: Any) -> None:
        raise RuntimeError("of the acceptor")

    monkeypatch.setattr(store.port, "link", breaks)
    with pytest.raises(Exception, match="the run is over"):
        store.client()
    assert str(store.dispatcher.failure) == "of the acceptor"
    store.dispatcher.failure = None


def test_the_end_is_heard_with_the_final_parameters(store: TcpStore) -> None:
    one = store.client()
    one.join()
    assert one.step() == 1
    with store.lock:
        store.protocol.ended_by = 0
        store.dispatcher.server.dismiss()
        due = store.port.take()
    store.port.send(due)
    found = one.link.receive()
    assert isinstance(found, Stop)
    assert found.version == 1
    for mine, theirs in zip(one.link.slot.incoming[0:1], [store.shared.parameters], strict=True):
        for flat, other in zip(mine, theirs, strict=True):
            assert torch.equal(flat.buffer, other.buffer)


def test_one_that_was_given_up_hears_so_when_it_is_back() -> None:
    with tcp_store(patience=0.3) as store:
        proxy = Proxy()
        proxy.target = store.address.port
        proxy.start()
        try:
            one = store.client(port=proxy.port)
            one.join()
            way = store.way(one.number)
            proxy.tear()
            store.until(lambda: way.broken)

            def given_up() -> bool:
                store.dispatcher.server.look()
                return bool(list(store.records.of(Lost)))

            store.until(given_up)
            assert isinstance(one.link.receive(), Rejoin)
            assert one.join() == 2
            assert one.step() == 1
        finally:
            proxy.close()


def test_messages_are_no_pickle() -> None:
    assert msgspec.msgpack.decode(encode(Join())) == ["Join", ""]
