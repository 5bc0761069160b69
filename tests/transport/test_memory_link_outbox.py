"""What the server says goes out in order, and without keeping anybody waiting."""

import socket
import threading

import pytest

from offbeat.transport.memory_link import Outbox

LONG = 20.0


@pytest.fixture
def ends():
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for mine, _ in pairs:
        mine.settimeout(LONG)
    yield pairs
    for pair in pairs:
        for end in pair:
            end.close()


def test_nothing_leaves_before_it_is_sent(ends):
    answers = Outbox(3)
    (mine, theirs), mine2 = ends[0], ends[2][0]
    answers.put(0, theirs, b"one")
    answers.put(2, ends[2][1], b"two")
    mine.setblocking(False)
    with pytest.raises(BlockingIOError):
        mine.recv(10)
    due = answers.take()
    assert due == [0, 2]
    assert answers.take() == []
    answers.send(due)
    assert (mine.recv(10), mine2.recv(10)) == (b"one", b"two")


def test_the_one_whose_core_this_is_comes_last(ends):
    answers, sent = Outbox(3), []

    class Wire:
        def __init__(self, number):
            self.number = number

        def send(self, packet):
            sent.append(self.number)

    for number in range(3):
        answers.put(number, Wire(number), b"go")
    answers.send(answers.take(), last=1)
    assert sent == [0, 2, 1]


def test_no_packet_overtakes_an_earlier_one_to_the_same_worker(ends):
    answers = Outbox(1)
    mine, theirs = ends[0]
    answers.put(0, theirs, b"first")
    pushed_aside = answers.take()  # whoever put this here has not come to sending it
    answers.put(0, theirs, b"second")
    answers.send(answers.take())
    assert (mine.recv(10), mine.recv(10)) == (b"first", b"second")
    answers.send(pushed_aside)
    mine.setblocking(False)
    with pytest.raises(BlockingIOError):
        mine.recv(10)


def test_one_who_is_slow_to_send_holds_up_nobody_else(ends):
    answers = Outbox(2)
    answers.put(0, ends[0][1], b"slow")
    answers.put(1, ends[1][1], b"quick")
    answers.sending[0].acquire()  # by a thread that was pushed aside
    due = answers.take()
    thread = threading.Thread(target=answers.send, args=(due, 0))
    thread.start()
    assert ends[1][0].recv(10) == b"quick"
    answers.sending[0].release()
    assert ends[0][0].recv(10) == b"slow"
    thread.join(LONG)


def test_the_dead_are_told_nothing(ends):
    answers = Outbox(2)
    ends[0][0].close()
    answers.put(0, ends[0][1], b"gone")
    answers.put(1, ends[1][1], b"there")
    answers.send(answers.take())
    assert ends[1][0].recv(10) == b"there"
