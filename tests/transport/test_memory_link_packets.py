"""How a packet is waited for: attentively at first, then asleep, and never in anybody's way."""

import socket

import pytest

from offbeat.transport import memory_link
from offbeat.transport.memory_link import Packets


@pytest.fixture
def wires():
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield pair
    for wire in pair:
        wire.close()


class Clock:
    """A clock that moves on only when others are given way to."""

    def __init__(self, monkeypatch, meanwhile=lambda turn: None):
        self.now, self.turns, self.meanwhile = 0.0, 0, meanwhile
        monkeypatch.setattr(memory_link.os, "sched_yield", self.give_way)
        monkeypatch.setattr(memory_link.time, "perf_counter", lambda: self.now)

    def give_way(self):
        self.turns += 1
        self.now += 0.25
        self.meanwhile(self.turns)


class Sleeper:
    """A wire on which a packet comes only to one who sleeps for it."""

    def __init__(self):
        self.asked = []

    def recv_into(self, view, size=0, flags=0):
        self.asked.append(flags)
        if flags & socket.MSG_DONTWAIT:
            raise BlockingIOError
        view[:2] = b"hi"
        return 2


def test_an_attentive_one_gives_way_until_the_packet_is_there(wires, monkeypatch):
    mine, theirs = wires
    clock = Clock(monkeypatch, lambda turn: turn == 3 and theirs.send(b"answer"))
    assert bytes(Packets().receive(mine, attention=10.0)) == b"answer"
    assert clock.turns == 3


def test_attention_does_not_last(monkeypatch):
    clock, wire = Clock(monkeypatch), Sleeper()
    assert bytes(Packets().receive(wire, attention=1.0)) == b"hi"
    assert wire.asked == [socket.MSG_DONTWAIT] * 4 + [0]
    assert clock.now == 1.0


def test_without_attention_one_sleeps_at_once(monkeypatch):
    clock, wire = Clock(monkeypatch), Sleeper()
    assert bytes(Packets().receive(wire)) == b"hi"
    assert wire.asked == [0]
    assert clock.turns == 0


@pytest.mark.parametrize("attention", [0.0, 10.0])
def test_a_closed_wire_is_an_empty_packet_however_one_waits(wires, attention):
    mine, theirs = wires
    theirs.close()
    assert bytes(Packets().receive(mine, attention)) == b""


@pytest.mark.parametrize("attention", [0.0, 10.0])
def test_so_is_one_that_breaks(attention):
    class Broken:
        def recv_into(self, view, size=0, flags=0):
            raise ConnectionResetError

    assert bytes(Packets().receive(Broken(), attention)) == b""
