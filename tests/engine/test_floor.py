"""Threads that hear the workers: one at a time, and nobody who has spoken counts as silent."""

import os
import socket
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from offbeat.board import new_board
from offbeat.engine.answers import Answers
from offbeat.engine.floor import Floor
from offbeat.link.cores import NOWHERE, Cores

LONG = 20.0
FOR_EVER = 3600.0  # one who is not woken waits longer than any test may take


class Hearer:
    """A stand-in for the server: it notes what it hears, and can be held up within a packet."""

    def __init__(self):
        self.wires: dict[int, socket.socket] = {}
        self.shortest = FOR_EVER
        self.shared = SimpleNamespace(cores=Cores(np.full(2, NOWHERE)))
        self.store = SimpleNamespace(cells=new_board(2))
        self.answers = Answers(2)
        self.packets: list[tuple[int, bytes]] = []
        self.inside = 0
        self.at_once = 0  # the most that were ever heard at the same time
        self.entered = threading.Semaphore(0)
        self.gate: threading.Event | None = None
        self.error: Exception | None = None
        self.looked = 0

    def connect(self, number, wire):
        self.wires[number] = wire

    def hear(self, number):
        self.inside += 1
        self.at_once = max(self.at_once, self.inside)
        packet = self.wires[number].recv(100)
        self.entered.release()
        if self.gate is not None:
            assert self.gate.wait(LONG)
        self.packets.append((number, packet))
        self.inside -= 1
        if self.error is not None:
            raise self.error
        if not packet:
            del self.wires[number]
        else:
            self.answers.put(number, self.wires[number], b"answer to " + packet)

    def unsaid(self):
        return self.answers.take()

    def patience_left(self, now):
        return None

    def give_up_the_silent(self, now):
        self.looked += 1

    def dismiss(self):
        for number, wire in self.wires.items():
            self.answers.put(number, wire, b"over")


@pytest.fixture
def floor():
    made = Floor(Hearer())
    made.ends = []
    made.take()
    yield made
    made.server.gate = None
    made.ears.close()
    made.taken.release()
    for thread in threading.enumerate():
        if thread.name.startswith("hears"):
            thread.join(LONG)
            assert not thread.is_alive()
    for end in (*made.ends, *made.ears.wires.values()):
        end.close()
    os.close(made.ears.bell)
    made.selector.close()
    os.close(made.bell)


def connect(floor, number):
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(LONG)
    floor.ends.append(mine)
    floor.connect(number, theirs)
    return mine


def test_what_a_worker_says_is_answered_while_the_other_waits(floor):
    end = connect(floor, 0)
    floor.heard = lambda: True
    end.send(b"one")
    floor.wait(None)
    assert floor.server.packets == [(0, b"one")]
    assert end.recv(100) == b"answer to one"


def test_nobody_is_heard_while_another_has_the_floor(floor):
    one, other = connect(floor, 0), connect(floor, 1)
    server = floor.server
    server.gate = threading.Event()
    one.send(b"one")
    other.send(b"other")
    floor.taken.release()
    assert server.entered.acquire(timeout=LONG)
    assert not floor.taken.acquire(blocking=False)
    assert server.inside == 1
    server.gate.set()
    assert {one.recv(100), other.recv(100)} == {b"answer to one", b"answer to other"}
    assert server.at_once == 1
    floor.taken.acquire()


def test_others_are_heard_while_an_answer_is_sent(floor):
    one, other = connect(floor, 0), connect(floor, 1)
    floor.server.answers.sending[0].acquire()  # its answer will not get out for now
    one.send(b"one")
    floor.taken.release()
    assert floor.server.entered.acquire(timeout=LONG)
    other.send(b"other")
    assert other.recv(100) == b"answer to other"
    floor.server.answers.sending[0].release()
    assert one.recv(100) == b"answer to one"
    floor.taken.acquire()


def test_what_comes_next_may_take_its_time_once_all_are_answered(floor):
    end = connect(floor, 0)
    end.send(b"one")
    floor.heard = lambda: (floor.answer(), seen.append(end.recv(100)))[1]
    seen = []
    floor.wait(0.0)
    while not seen:
        floor.wait(0.01)
    assert seen == [b"answer to one"]


def test_there_is_spare_time_after_an_answer(floor):
    end, spent = connect(floor, 0), threading.Semaphore(0)
    free = []

    def spare():
        free.append(floor.taken.acquire(blocking=False))
        spent.release()

    floor.spare = spare
    floor.taken.release()
    end.send(b"one")
    assert end.recv(100) == b"answer to one"
    assert spent.acquire(timeout=LONG)
    assert free == [False]  # it had the floor
    floor.taken.acquire()


def test_a_packet_that_waits_for_its_turn_is_still_seen_in_the_wire(floor):
    end = connect(floor, 0)
    end.send(b"one")
    wire = floor.server.wires[0]  # this thread has the floor, so it is not taken out
    assert wire.recv(1, socket.MSG_PEEK) == b"o"
    floor.heard = lambda: True
    floor.wait(None)
    assert floor.server.packets == [(0, b"one")]


def test_a_wire_that_the_server_has_given_up_is_closed(floor):
    end = connect(floor, 0)
    floor.server.wires.pop(0).shutdown(socket.SHUT_RDWR)
    assert end.recv(100) == b""
    while floor.ears.wires:
        floor.wait(0.01)
    assert floor.server.packets == []


def test_a_new_wire_takes_the_place_of_an_old_one(floor):
    old, new = connect(floor, 0), connect(floor, 0)
    assert old.recv(100) == b""
    new.send(b"new")
    floor.heard = lambda: True
    floor.wait(None)
    assert floor.server.packets == [(0, b"new")]


def test_what_an_ear_found_before_a_change_is_left_to_whoever_hears_it_now(floor):
    end = connect(floor, 0)
    wire = floor.server.wires[0]
    floor.taken.release()
    floor._hear(0, wire, floor.ears.changes - 1)  # nothing is there: it would wait for ever
    end.send(b"one")
    assert end.recv(100) == b"answer to one"
    floor.taken.acquire()
    assert floor.server.packets == [(0, b"one")]


def test_what_goes_wrong_in_a_thread_is_raised_by_the_one_who_waits(floor):
    end = connect(floor, 0)
    floor.server.error = ValueError("broken")
    end.send(b"one")
    with pytest.raises(ValueError, match="broken"):
        floor.wait(None)


def test_what_goes_wrong_in_spare_time_is_raised_too(floor):
    end = connect(floor, 0)

    def broken():
        raise ValueError("broken")

    floor.spare = broken
    end.send(b"one")
    with pytest.raises(ValueError, match="broken"):
        floor.wait(None)
    assert end.recv(100) == b"answer to one"


def test_what_cannot_be_recorded_is_not_answered(floor):
    end = connect(floor, 0)

    def full():
        raise OSError(28, "No space left on device")

    floor.server.unsaid = full
    end.send(b"one")
    floor.taken.release()
    assert floor.server.entered.acquire(timeout=LONG)
    floor.taken.acquire()
    assert isinstance(floor.failure, OSError)
    end.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.recv(100)


def test_other_calls_and_the_time_are_looked_after(floor):
    order, wake = socket.socketpair()
    seen = []
    floor.selector.register(order, 1, lambda: seen.append(order.recv(1)))
    wake.send(b"!")
    floor.wait(None)
    assert seen == [b"!"]
    assert floor.server.looked == 1
    floor.wait(0.0)
    assert floor.server.looked == 2
    order.close()
    wake.close()


def test_the_end_is_told_and_last_words_are_heard(floor):
    end = connect(floor, 0)
    floor.heard = lambda: not floor.server.wires
    words = threading.Thread(target=lambda: (end.recv(100), end.close()))
    words.start()
    floor.dismiss(time.monotonic() + LONG)
    words.join(LONG)
    assert floor.server.packets == [(0, b"")]


def test_last_words_are_not_waited_for_for_ever(floor):
    connect(floor, 0)
    floor.dismiss(time.monotonic())
    assert 0 in floor.server.wires
