"""Each worker has a thread of its own that listens to it."""

import os
import socket
import threading

import pytest

from offbeat.engine.local.dispatch import Receivers

LONG = 20.0


class Listening:
    """Receivers of three workers, and the names of the threads that received something."""

    def __init__(self):
        self.lock = threading.Lock()
        self.received: list[tuple[str, int, bytes]] = []
        self.came = threading.Semaphore(0)
        self.receivers = Receivers(self.receive)
        self.ends: dict[int, socket.socket] = {}
        for number in range(3):
            self.connect(number)

    def connect(self, number):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mine.settimeout(LONG)
        with self.lock:
            self.receivers.connect(number, theirs)
        self.ends[number] = mine

    def receive(self, number, wire):
        with self.lock:
            if not self.receivers.connected(number, wire):
                return
            try:
                packet = wire.recv(100, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return  # what woke this thread was meant for an earlier wire
            self.received.append((threading.current_thread().name, number, packet))
            if not packet:
                self.receivers.disconnect(number)
        self.came.release()

    def say(self, number, packet=b"!"):
        self.ends[number].send(packet)
        assert self.came.acquire(timeout=LONG)
        return self.received[-1]

    def close(self):
        with self.lock:
            self.receivers.close()
        for receiver in self.receivers.threads.values():
            receiver.thread.join(LONG)
            assert not receiver.thread.is_alive()
            receiver.disconnect()
            receiver.epoll.close()
        for end in self.ends.values():
            end.close()
        os.close(self.receivers.wakeup)


@pytest.fixture
def listening():
    made = Listening()
    yield made
    made.close()


def test_each_worker_has_a_thread_of_its_own(listening):
    for number in range(3):
        assert listening.say(number) == (f"receiver {number}", number, b"!")


def test_a_new_wire_takes_the_place_of_one_that_is_dead(listening):
    old = listening.ends[1]
    listening.connect(1)
    assert old.recv(100) == b""  # it is closed
    old.close()
    assert listening.say(1, b"new") == ("receiver 1", 1, b"new")
    assert len(listening.receivers.threads) == 3  # the same thread listens on


def test_an_end_is_received_too_and_nothing_after_it(listening):
    listening.ends.pop(2).close()
    assert listening.came.acquire(timeout=LONG)
    assert listening.received == [("receiver 2", 2, b"")]
    assert listening.say(0) == ("receiver 0", 0, b"!")


def test_a_wire_that_is_no_longer_the_workers_is_known(listening):
    with listening.lock:
        wire = listening.receivers.threads[0].wire
        assert listening.receivers.connected(0, wire)
        assert not listening.receivers.connected(1, wire)
        listening.receivers.disconnect(0)
        assert not listening.receivers.connected(0, wire)


def test_nobody_is_listened_to_after_the_end(listening):
    with listening.lock:
        wire = listening.receivers.threads[0].wire
        listening.receivers.close()
        assert not listening.receivers.connected(0, wire)
    for receiver in listening.receivers.threads.values():
        receiver.thread.join(LONG)
        assert not receiver.thread.is_alive()
    listening.ends[0].send(b"too late")
    assert listening.received == []


def test_nothing_is_lost_or_reordered_while_all_speak_at_once(listening):
    said = 200

    def talk(number):
        for i in range(said):
            listening.ends[number].send(b"%d" % i)

    talkers = [threading.Thread(target=talk, args=(n,)) for n in range(3)]
    for talker in talkers:
        talker.start()
    for _ in range(3 * said):
        assert listening.came.acquire(timeout=LONG)
    for talker in talkers:
        talker.join(LONG)
    for number in range(3):
        received = [packet for _, n, packet in listening.received if n == number]
        assert received == [b"%d" % i for i in range(said)]
