"""One thread hears everybody while steps are short, and otherwise each worker has its own."""

import os
import socket
import threading

import numpy as np
import pytest

from offbeat.board import Row, State, new_board
from offbeat.engine import ears as ears_module
from offbeat.engine.ears import LOOK, SHORT, Ears
from offbeat.link.cores import NOWHERE, Cores

LONG = 20.0


class Listeners:
    """Ears of three workers, and the names of the threads that heard something."""

    def __init__(self):
        self.cells = new_board(3)
        self.cells[Row.STATE] = State.ACTIVE
        self.floor = threading.Lock()
        self.heard: list[tuple[str, int, bytes]] = []
        self.came = threading.Semaphore(0)
        # An earlier server may have heard all on core 7.
        cores = Cores(np.full(3, NOWHERE), np.full(1, 7))
        self.ears = Ears(self.cells, cores, self.hear)
        self.ends = {}
        for number in range(3):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.ends[number] = mine
            self.ears.add(number, theirs)

    def hear(self, number, wire, changes):
        with self.floor:
            if changes != self.ears.changes or not self.ears.open:
                return
            packet = wire.recv(100)
            self.heard.append((threading.current_thread().name, number, packet))
        self.came.release()

    def say(self, number, packet=b"!"):
        self.ends[number].send(packet)
        assert self.came.acquire(timeout=LONG)
        return self.heard[-1][0]

    def steps(self, *microseconds):
        """The workers' steps last that long, and enough packets have come to find out."""
        self.cells[Row.STEP_US] = microseconds
        with self.floor:
            for _ in range(LOOK):
                self.ears.look()

    def close(self):
        self.ears.close()
        for ear in self.ears.ears.values():
            ear.thread.join(LONG)
            assert not ear.thread.is_alive()
        for end in (*self.ends.values(), *self.ears.wires.values()):
            end.close()
        os.close(self.ears.bell)


@pytest.fixture
def listeners():
    made = Listeners()
    yield made
    made.close()


def test_each_worker_has_its_own_ear_at_first(listeners):
    assert [listeners.say(n) for n in range(3)] == ["hears 0", "hears 1", "hears 2"]


def test_one_hears_all_while_steps_are_short_and_not_when_they_are_not(listeners):
    home = listeners.ears.cores.home
    assert home.tolist() == [NOWHERE]
    listeners.steps(100, 200, SHORT - 1)
    assert [listeners.say(n) for n in range(3)] == ["hears 0"] * 3
    thread = listeners.ears.ears[0].thread.native_id
    assert {home.item()} == os.sched_getaffinity(thread)  # others know where that is
    listeners.steps(100, 200, SHORT)
    assert [listeners.say(n) for n in range(3)] == ["hears 0", "hears 1", "hears 2"]
    assert home.tolist() == [NOWHERE]


def test_steps_that_are_not_known_are_not_short(listeners):
    listeners.steps(100, 0, 100)
    assert listeners.say(1) == "hears 1"


def test_it_is_not_asked_at_every_packet(listeners):
    listeners.cells[Row.STEP_US] = 100
    for _ in range(LOOK - 1):
        listeners.ears.look()
    assert not listeners.ears.together
    listeners.ears.look()
    assert listeners.ears.together


def test_the_one_who_hears_all_stays_on_one_core_and_pushes_nobody_aside(listeners):
    thread = listeners.ears.ears[0].thread.native_id
    allowed = os.sched_getaffinity(thread)
    listeners.steps(100, 100, 100)
    assert len(os.sched_getaffinity(thread)) == 1
    assert os.sched_getscheduler(thread) == os.SCHED_BATCH
    listeners.steps(SHORT, SHORT, SHORT)
    assert os.sched_getaffinity(thread) == allowed
    assert os.sched_getscheduler(thread) == os.SCHED_OTHER


def test_where_policies_are_not_to_be_had_it_goes_on_without(listeners, monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(ears_module.os, "sched_setscheduler", forbidden)
    listeners.steps(100, 100, 100)
    assert listeners.say(2) == "hears 0"


def test_one_who_comes_while_one_hears_all_is_heard_with_the_others(listeners):
    listeners.steps(100, 100, 100)
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listeners.floor:
        listeners.ears.add(1, theirs)
    assert listeners.ends[1].recv(100) == b""  # its old wire is closed
    listeners.ends[1].close()
    listeners.ends[1] = mine
    assert listeners.say(1, b"new") == "hears 0"
    assert listeners.heard[-1] == ("hears 0", 1, b"new")


def test_nothing_is_lost_when_ears_change_while_all_speak(listeners):
    said = 200

    def talk(number):
        for i in range(said):
            listeners.ends[number].send(b"%d" % i)

    talkers = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
    for talker in talkers:
        talker.start()
    for i in range(50):
        with listeners.floor:
            listeners.ears._change(i % 2 == 0)
    for _ in range(3 * said):
        assert listeners.came.acquire(timeout=LONG)
    for talker in talkers:
        talker.join(LONG)
    for number in range(3):
        heard = [packet for _, n, packet in listeners.heard if n == number]
        assert heard == [b"%d" % i for i in range(said)]
