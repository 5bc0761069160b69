"""Children end by themselves, leave last words, and have handles that tell of their end."""

import ctypes
import os
import select
import signal

import pytest
import torch

import offbeat as ob
from offbeat.engine.local import roles
from offbeat.engine.local.cpu import ATTENTION
from offbeat.engine.local.process import branch, compute_steadily, fork, in_fresh_thread
from offbeat.engine.local.worker_process import WorkerProcess
from offbeat.errors import RunError
from tests.contract.common import optimizer_for, problem
from tests.engine.local.common import children, me, nothing_left


def ended(child):
    """Wait for a child's end by its handle, as the launcher does."""
    assert select.select([child.handle], [], [], 60)[0]
    return child.reap()


def test_a_child_that_ends_well_leaves_no_words():
    with nothing_left():
        child = fork("offbeat x", lambda: None)
        assert ended(child) is None
        assert child.status == 0
        assert child.reap() is None  # once is enough


def test_a_failure_is_told_with_its_traceback():
    def main():
        raise ValueError("wrong")

    with nothing_left():
        words = ended(fork("offbeat x", main))
    assert words.message == "ValueError: wrong"
    assert f'File "{__file__}", line {main.__code__.co_firstlineno + 1}' in words.trace
    assert not words.ours


class _Heap(ctypes.Structure):
    """What glibc's mallinfo2 tells."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "o", "s", "mapped", "m", "u", "f", "used", "free", "k")
    )


def test_memory_that_was_freed_is_there_for_the_next_step():
    heap = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if heap is None:
        pytest.skip("another C library")
    heap.restype = _Heap

    def main():
        before = heap()
        block = torch.empty(40 << 20, dtype=torch.uint8)  # larger than what is kept untold
        if heap().mapped > before.mapped:
            raise RunError(f"{block.nbytes} bytes came from the system and will go back to it")

    # Not in a fresh thread: those of whoever runs the tests may have left it a heap of their own.
    child, inside = branch("offbeat x")
    if inside is not None:
        inside.finish(main)
    assert ended(child) is None


def test_our_own_errors_are_marked_and_speak_for_themselves():
    def main():
        raise RunError("do this instead")

    words = ended(fork("offbeat x", main))
    assert (words.message, words.ours) == ("do this instead", True)


@pytest.mark.parametrize("letter", ["x", "\x00", "é", "\U0001f600"])
def test_long_last_words_never_block_a_child(letter):
    def main():
        def deeper(left):
            if not left:
                raise ValueError(letter * 100_000)
            deeper(left - 1)

        deeper(300)

    words = ended(fork("offbeat x", main))
    assert words.message.startswith("ValueError: " + letter)
    assert len(words.message) <= 2000


def test_leaving_by_sys_exit_is_a_failure_too():
    def main():
        raise SystemExit(0)

    child = fork("offbeat x", main)
    assert ended(child).message == "SystemExit: 0"
    assert child.status == 1


def test_a_killed_child_says_nothing_and_its_status_says_how():
    with nothing_left():
        reading, writing = os.pipe()
        child = fork("offbeat x", lambda: os.read(reading, 1))
        child.kill()
        assert ended(child) is None
        assert child.status == -signal.SIGKILL
        child.kill()  # of no use and no harm
        os.close(reading)
        os.close(writing)


def test_a_child_has_its_name_and_does_not_hear_ctrl_c():
    reading, writing = os.pipe()
    ready, tell = os.pipe()

    def main():
        os.write(tell, b"!")
        os.read(reading, 1)

    child = fork("offbeat named", main)
    os.read(ready, 1)
    assert children() == {"offbeat named": child.pid}
    os.kill(child.pid, signal.SIGINT)
    os.write(writing, b"!")
    ended(child)
    assert child.status == 0
    for file in (reading, writing, ready, tell):
        os.close(file)


def test_a_child_dies_with_its_parent():
    """A grandchild's pipe closes when it is gone, although its parent was only killed."""
    alive, hold = os.pipe()
    ready, tell = os.pipe()
    stay, leave = os.pipe()  # whatever happens, nobody outlives the test

    def parent():
        os.close(alive)
        os.close(leave)

        def grandchild():
            os.write(tell, b"!")
            os.read(stay, 1)

        fork("offbeat below", grandchild)
        os.read(stay, 1)

    child = fork("offbeat above", lambda: parent())
    os.close(hold)
    os.read(ready, 1)
    child.kill()
    ended(child)
    # Readable at the end of the last one that could have written.
    found = select.select([alive], [], [], 20)[0]
    for file in (alive, ready, tell, stay, leave):
        os.close(file)
    assert found


def test_words_of_a_child_whose_own_child_lives_on_are_read_at_once():
    """The grandchild has the pipe open too; waiting for its end would be waiting for it."""
    reading, writing = os.pipe()

    def main():
        if os.fork() == 0:
            os.read(reading, 1)
            os._exit(0)
        raise ValueError("and yet")

    child = fork("offbeat x", main)
    assert ended(child).message == "ValueError: and yet"
    os.close(reading)
    os.write(writing, b"!")
    os.close(writing)


def test_a_fork_that_fails_leaves_nothing_open(monkeypatch):
    def refuse():
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(os, "fork", refuse)
    with nothing_left(), pytest.raises(BlockingIOError):
        branch("offbeat x")


def test_a_fresh_thread_passes_on_what_it_raises():
    def main():
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        in_fresh_thread(main, 1)


def test_one_that_computes_does_not_push_aside_who_wakes_it():
    def main():
        compute_steadily()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH | os.SCHED_RESET_ON_FORK

    with nothing_left():
        assert ended(fork("offbeat x", main)) is None


@pytest.mark.parametrize(("emulate", "policy"), [(None, os.SCHED_BATCH), ("1ms", os.SCHED_OTHER)])
def test_workers_compute_steadily_unless_they_mostly_sleep(emulate, policy):
    what = problem()

    def loss(output, target):
        if me() in ("offbeat 0", "offbeat 1"):
            raise ValueError(f"policy {os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK}")
        return what.loss(output, target)

    with nothing_left(), pytest.raises(RunError, match=f"policy {policy}"):
        ob.train(
            what.model, what.data, loss, discipline="asp", workers=2, batch_size=4, epochs=1,
            optimizer=optimizer_for("asp"), emulate=emulate,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "attention"),
    [({}, ATTENTION), ({"emulate": "1ms"}, 0.0), ({"via": "allreduce"}, 0.0)],
)
def test_workers_are_attentive_unless_that_gains_nothing(monkeypatch, how, attention):
    class Told(WorkerProcess):
        def __init__(self, client, *rest, **more):
            super().__init__(client, *rest, **more)
            raise RunError(f"attention {client.link.waiting.attention}.")

    monkeypatch.setattr(roles, "WorkerProcess", Told)
    what = problem()
    with nothing_left(), pytest.raises(RunError, match=f"attention {attention}[.]"):
        ob.train(
            what.model, what.data, what.loss, discipline="bsp", workers=2, batch_size=4, epochs=1,
            optimizer=optimizer_for("bsp"), **how,
        )  # fmt: skip
