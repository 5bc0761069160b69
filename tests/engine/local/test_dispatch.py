"""Threads that listen to the workers: one at a time, and nobody who has spoken is silent."""

import os
import socket
import threading
from types import SimpleNamespace

import pytest

from offbeat.engine.local.cpu import CpuPolicy
from offbeat.engine.local.dispatch import Around, Dispatcher, local_receivers
from offbeat.transport.memory_link import MemoryPort

LONG = 20.0
FOR_EVER = 3600.0  # one who is not woken waits longer than any test may take


class NotingServer:
    """A stand-in for the server: it notes what it hears, and can be held up within a packet."""

    def __init__(self, port):
        self.port = port
        self.protocol = SimpleNamespace(shortest=FOR_EVER, workers=2)
        self.packets: list[tuple[int, bytes]] = []
        self.inside = 0
        self.at_once = 0  # the most that were ever heard at the same time
        self.entered = threading.Semaphore(0)
        self.gate: threading.Event | None = None
        self.error: Exception | None = None
        self.looked = 0

    def connect(self, number):
        pass

    def hear(self, number):
        self.inside += 1
        self.at_once = max(self.at_once, self.inside)
        wire = self.port.wires[number]
        try:
            packet = wire.recv(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            self.inside -= 1
            raise
        self.entered.release()
        if self.gate is not None:
            assert self.gate.wait(LONG)
        self.packets.append((number, packet))
        self.inside -= 1
        if self.error is not None:
            raise self.error
        if not packet:
            self.port.disconnect(number)
        else:
            self.port.outbox.put(number, wire, b"answer to " + packet)

    def seconds_left(self):
        return None

    def look(self):
        self.looked += 1

    def dismiss(self):
        for number, wire in self.port.wires.items():
            self.port.outbox.put(number, wire, b"over")


class NotingCpu(CpuPolicy):
    """Notes whose receivers have dealt with something."""

    def __init__(self):
        self.seen: list[int] = []
        self.came = threading.Semaphore(0)

    def received(self, number):
        self.seen.append(number)
        self.came.release()


class Hooks:
    """What happens around messages, as a test wants it: `Around` is made of these."""

    def __init__(self):
        self.recorded = 0
        self.record = self.note
        self.dealt_with = lambda: False
        self.spare = lambda: None

    def note(self):
        self.recorded += 1

    def around(self):
        return Around(lambda: self.record(), lambda: self.dealt_with(), lambda: self.spare())


@pytest.fixture
def hooks():
    return Hooks()


@pytest.fixture
def dispatcher(hooks):
    port = MemoryPort([None, None], None)
    made = Dispatcher(NotingServer(port), port, NotingCpu(), hooks.around(), local_receivers)
    made.ends = []
    made.lock.acquire()  # as the thread of the server has it, except while it waits
    yield made
    made.server.gate = None
    made.receivers.close()
    made.lock.release()
    for receiver in made.receivers.threads.values():
        receiver.thread.join(LONG)
        assert not receiver.thread.is_alive()
        receiver.disconnect()
        receiver.epoll.close()
    for end in made.ends:
        end.close()
    os.close(made.receivers.wakeup)
    made.selector.close()
    os.close(made.wakeup)


def connect(dispatcher, number):
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mine.settimeout(LONG)
    dispatcher.ends.append(mine)
    dispatcher.connect(number, theirs)
    return mine


def test_what_a_worker_says_is_answered_while_the_other_waits(dispatcher, hooks):
    end = connect(dispatcher, 0)
    hooks.dealt_with = lambda: True
    end.send(b"one")
    dispatcher.wait(FOR_EVER)
    assert dispatcher.server.packets == [(0, b"one")]
    assert end.recv(100) == b"answer to one"


def test_nobody_is_heard_while_another_holds_the_lock(dispatcher):
    one, other = connect(dispatcher, 0), connect(dispatcher, 1)
    server = dispatcher.server
    server.gate = threading.Event()
    one.send(b"one")
    other.send(b"other")
    dispatcher.lock.release()
    assert server.entered.acquire(timeout=LONG)
    assert not dispatcher.lock.acquire(blocking=False)
    assert server.inside == 1
    server.gate.set()
    assert {one.recv(100), other.recv(100)} == {b"answer to one", b"answer to other"}
    assert server.at_once == 1
    dispatcher.lock.acquire()


def test_others_are_heard_while_an_answer_is_sent(dispatcher):
    one, other = connect(dispatcher, 0), connect(dispatcher, 1)
    dispatcher.port.outbox.sending[0].acquire()  # its answer will not get out for now
    one.send(b"one")
    dispatcher.lock.release()
    assert dispatcher.server.entered.acquire(timeout=LONG)
    other.send(b"other")
    assert other.recv(100) == b"answer to other"
    dispatcher.port.outbox.sending[0].release()
    assert one.recv(100) == b"answer to one"
    dispatcher.lock.acquire()


def test_what_comes_next_may_take_its_time_once_all_are_answered(dispatcher, hooks):
    end = connect(dispatcher, 0)
    end.send(b"one")
    hooks.dealt_with = lambda: (dispatcher.answer(), seen.append(end.recv(100)))[1]
    seen = []
    dispatcher.wait(0.0)
    while not seen:
        dispatcher.wait(0.01)
    assert seen == [b"answer to one"]


def test_there_is_spare_time_after_an_answer(dispatcher, hooks):
    end, spent = connect(dispatcher, 0), threading.Semaphore(0)
    free = []

    def spare():
        free.append(dispatcher.lock.acquire(blocking=False))
        spent.release()

    hooks.spare = spare
    dispatcher.lock.release()
    end.send(b"one")
    assert end.recv(100) == b"answer to one"
    assert spent.acquire(timeout=LONG)
    assert free == [False]  # it had the lock
    dispatcher.lock.acquire()


def test_a_packet_that_waits_for_its_turn_is_still_seen_in_the_wire(dispatcher, hooks):
    end = connect(dispatcher, 0)
    end.send(b"one")
    wire = dispatcher.port.wires[0]  # this thread has the lock, so it is not taken out
    assert wire.recv(1, socket.MSG_PEEK) == b"o"
    hooks.dealt_with = lambda: True
    dispatcher.wait(FOR_EVER)
    assert dispatcher.server.packets == [(0, b"one")]


def test_a_wire_that_the_server_has_given_up_is_closed(dispatcher):
    end = connect(dispatcher, 0)
    dispatcher.port.wires.pop(0).shutdown(socket.SHUT_RDWR)
    assert end.recv(100) == b""
    receiver = dispatcher.receivers.threads[0]
    while receiver.wire is not None:
        dispatcher.wait(0.01)
    assert dispatcher.server.packets == []


def test_a_new_wire_takes_the_place_of_an_old_one(dispatcher, hooks):
    old, new = connect(dispatcher, 0), connect(dispatcher, 0)
    assert old.recv(100) == b""
    new.send(b"new")
    hooks.dealt_with = lambda: True
    dispatcher.wait(FOR_EVER)
    assert dispatcher.server.packets == [(0, b"new")]


def test_what_a_receiver_found_before_a_change_is_left_alone(dispatcher):
    """It may have been woken by what another thread has dealt with, or by an earlier wire."""
    end = connect(dispatcher, 0)
    wire = dispatcher.port.wires[0]
    dispatcher.lock.release()
    dispatcher.hear(0, wire)  # nothing is there: it would wait for ever
    dispatcher.hear(0, end)  # not its wire
    assert dispatcher.failure is None
    end.send(b"one")
    assert end.recv(100) == b"answer to one"
    dispatcher.lock.acquire()
    assert dispatcher.server.packets == [(0, b"one")]


def test_what_is_answered_is_on_record_before(dispatcher, hooks):
    end = connect(dispatcher, 0)
    seen = []

    def record():
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(100)
        end.settimeout(LONG)
        seen.append(list(dispatcher.server.packets))

    hooks.record = record
    hooks.dealt_with = lambda: True
    end.send(b"one")
    dispatcher.wait(FOR_EVER)
    assert end.recv(100) == b"answer to one"
    assert seen == [[(0, b"one")]]


def test_a_receiver_looks_where_it_runs_when_all_is_said(dispatcher):
    one, other = connect(dispatcher, 0), connect(dispatcher, 1)
    dispatcher.lock.release()
    for number, end in ((1, other), (0, one)):
        end.send(b"one")
        assert end.recv(100) == b"answer to one"
        assert dispatcher.cpu.came.acquire(timeout=LONG)
        assert dispatcher.cpu.seen[-1] == number
    dispatcher.lock.acquire()


def test_what_goes_wrong_in_a_thread_is_raised_by_the_one_who_waits(dispatcher):
    end = connect(dispatcher, 0)
    dispatcher.server.error = ValueError("broken")
    end.send(b"one")
    with pytest.raises(ValueError, match="broken"):
        dispatcher.wait(FOR_EVER)


def test_what_goes_wrong_in_spare_time_is_raised_too(dispatcher, hooks):
    end = connect(dispatcher, 0)

    def broken():
        raise ValueError("broken")

    hooks.spare = broken
    end.send(b"one")
    with pytest.raises(ValueError, match="broken"):
        dispatcher.wait(FOR_EVER)
    assert end.recv(100) == b"answer to one"


def test_what_cannot_be_recorded_is_not_answered(dispatcher, hooks):
    end = connect(dispatcher, 0)

    def full():
        raise OSError(28, "No space left on device")

    hooks.record = full
    end.send(b"one")
    dispatcher.lock.release()
    assert dispatcher.server.entered.acquire(timeout=LONG)
    dispatcher.lock.acquire()
    assert isinstance(dispatcher.failure, OSError)
    end.setblocking(False)
    with pytest.raises(BlockingIOError):
        end.recv(100)


def test_other_calls_and_the_time_are_looked_after(dispatcher):
    order, wake = socket.socketpair()
    seen = []
    dispatcher.selector.register(order, 1, lambda: seen.append(order.recv(1)))
    wake.send(b"!")
    dispatcher.wait(FOR_EVER)
    assert seen == [b"!"]
    assert dispatcher.server.looked == 1
    dispatcher.wait(0.0)
    assert dispatcher.server.looked == 2
    order.close()
    wake.close()


def test_the_end_is_told_and_last_words_are_heard(dispatcher, hooks):
    end = connect(dispatcher, 0)
    hooks.dealt_with = lambda: not dispatcher.port.wires
    words = threading.Thread(target=lambda: (end.recv(100), end.close()))
    words.start()
    dispatcher.dismiss(LONG)
    words.join(LONG)
    assert dispatcher.server.packets == [(0, b"")]


def test_last_words_are_not_waited_for_for_ever(dispatcher):
    connect(dispatcher, 0)
    dispatcher.dismiss(0.0)
    assert 0 in dispatcher.port.wires
