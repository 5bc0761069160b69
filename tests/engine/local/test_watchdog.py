"""Server, shard processes and tester are watched: one that stands still is replaced."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import offbeat as ob
from offbeat.engine.local import watchdog
from offbeat.engine.local.watchdog import (
    FIELDS,
    FILES,
    IDLE,
    LOOKS,
    WORKING,
    Heartbeat,
    Vitals,
    Watchdog,
    vitals,
)
from offbeat.folder import checkpoint
from offbeat.log.records import EpochDone, Evaluated, Joined
from tests.contract.common import problem, run
from tests.engine.local.common import (
    PATIENCE,
    Script,
    Step,
    after,
    assert_exact,
    assert_replays,
    children,
    faulty,
    hit,
    me,
    message_of,
    nothing_left,
    seen,
    shard_processes,
)

# ---------------------------------------------------------------- by itself


class Patient:
    """A process that is looked at, and what the system would say of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.sign, self.vitals = Heartbeat(np.zeros(FIELDS, dtype=np.int64)), Vitals()
        self.dog, self.now = Watchdog(4.0, {7: self.sign}), 100.0
        self.dog.watch(7, 1234)
        monkeypatch.setattr(watchdog, "vitals", lambda pid: self.vitals)

    def looks(self, times: int) -> bool:
        """Whether it is silent after so many looks."""
        found: list[int] = []
        for _ in range(times):
            self.now += self.dog.every
            found = self.dog.silent(self.now)
        return bool(found)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Patient:
    made = Patient(monkeypatch)
    made.sign.about = WORKING
    assert not made.looks(2)  # it is new, and then its time on a core is
    return made


def test_one_that_does_nothing_is_silent_after_patience(patient):
    assert not patient.looks(LOOKS)
    assert patient.looks(1)


@pytest.mark.parametrize("about", [IDLE, FILES])
def test_one_that_waits_for_files_or_for_work_is_not(patient, about):
    patient.sign.about = about
    assert not patient.looks(5 * LOOKS)


def test_but_one_that_is_stopped_is_silent_over_its_files_too(patient):
    patient.sign.about, patient.vitals.stopped = FILES, True
    assert patient.looks(LOOKS + 1)


def test_one_that_is_stopped_is_silent_whatever_its_children_do(patient):
    patient.vitals.stopped = patient.vitals.running = True
    assert patient.looks(LOOKS + 1)


@pytest.mark.parametrize("how", ["turn", "spent", "running"])
def test_any_sign_of_life_counts(patient, how):
    for _ in range(5):
        assert not patient.looks(LOOKS)
        if how == "turn":
            patient.sign.turn()
        elif how == "spent":
            patient.vitals.spent += 1
        else:
            patient.vitals.running = True
        assert not patient.looks(1)
        patient.vitals.running = False


def test_time_in_which_nobody_looked_does_not_count(patient):
    """The launcher was stopped, with all others or alone."""
    for _ in range(LOOKS):
        patient.now += 3600.0
        assert not patient.dog.silent(patient.now)
        assert not patient.dog.silent(patient.now)  # it has just looked
    assert patient.dog.left(patient.now) == patient.dog.every


def test_one_that_is_gone_is_not_looked_at(patient):
    patient.dog.forget(7)
    patient.dog.forget(7)
    patient.dog.watch(8, 1235)  # none of those to be watched
    assert not patient.looks(2 * LOOKS)


def test_what_the_system_says_of_this_process():
    found = vitals(os.getpid())
    assert found.running
    assert not found.stopped
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)
        os._exit(0)
    hit(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)
    try:
        assert vitals(os.getpid()).stopped  # a child of it
        assert not vitals(pid).running
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    assert vitals(pid) == Vitals()  # nobody is there


# ---------------------------------------------------------------- in a run


def stop(find: Callable[[], dict[str, int]], name: str) -> Step:
    """Stops a process, as soon as it is there."""

    def step(record: Any) -> bool:
        pid = find().get(name)
        if pid is not None:
            hit(pid, signal.SIGSTOP)
        return pid is not None

    return step


@contextmanager
def counted(each: Callable[[int], None]) -> Iterator[None]:
    """Tells of every look at the processes of a run, with its number."""
    silent, numbers = Watchdog.silent, count(1)

    def looked(dog: Watchdog, now: float) -> list[int]:
        if now >= dog.due:
            each(next(numbers))
        return silent(dog, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "silent", looked)
        yield


@pytest.mark.parametrize("about", ["server", "shard", "both"])
def test_a_server_or_a_shard_process_that_stands_still_is_replaced(gate, out, about):
    shards = 1 if about == "server" else 3
    steps = [after(3)]
    if about != "server":
        steps += [stop(shard_processes, "offbeat shard 2")]
    if about != "shard":
        steps += [stop(children, "offbeat server")]
    steps += [seen(Joined), after(3)]
    done, _, what = faulty(gate, "asp", steps, out=out, shards=shards, patience=PATIENCE)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("last", [False, True])
def test_a_tester_that_stands_still_is_replaced(gate, out, last):
    """Also after all samples are trained on, when nothing else is left to happen."""
    what = problem(samples=48)
    steps = [seen(EpochDone), stop(children, "offbeat tester")]
    steps = [seen(EpochDone), *steps] if last else [*steps, seen(Evaluated)]
    epochs = 2 if last else 12
    done, _, _ = faulty(
        gate, "bsp", steps, out=out, epochs=epochs, test=what.data, patience=PATIENCE
    )
    assert done.history.tests[-1].version == done.summary().updates
    assert_exact(done, 48, epochs)


def test_a_server_that_wakes_in_time_is_left_alone(gate, out):
    pids: list[int] = []

    def wake(number: int) -> None:
        if pids and len(pids) < LOOKS:
            pids.append(children()["offbeat server"])
            if len(pids) == LOOKS:
                os.kill(pids[0], signal.SIGCONT)

    def note(record: Any) -> bool:
        pids.append(children()["offbeat server"])
        hit(pids[0], signal.SIGSTOP)
        return True

    with counted(wake):
        steps = [after(3), note, after(3)]
        done, script, what = faulty(gate, "asp", steps, out=out, patience=2.0)
    assert len(pids) == LOOKS
    assert len(set(pids)) == 1
    assert [r.incarnation for r in script.all if isinstance(r, Joined)] == [1, 1, 1]
    assert_exact(done, 48, 12)
    assert_replays(done, what)


class Once:
    """True for the first who asks, in whichever process."""

    def __init__(self) -> None:
        self.left = os.eventfd(1, os.EFD_NONBLOCK)

    def __call__(self) -> bool:
        with suppress(BlockingIOError):
            return bool(os.eventfd_read(self.left))
        return False


class Odd(torch.optim.SGD):
    """A rule that does something else too over one of its steps."""

    def __init__(self, parameters: Any, act: Callable[[], Any], over: int = 3):
        super().__init__(parameters, lr=0.1)
        self.act, self.over, self.made = act, over, 0

    def step(self, closure: Any = None) -> Any:
        self.made += 1
        if self.made == self.over and me().startswith("offbeat"):
            self.act()
        return super().step(closure)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_rule_that_waits_for_ever_is_tried_again(gate, out, shards):
    once = Once()

    def wait() -> None:
        if once():
            threading.Event().wait()

    gate.open()
    what = problem(samples=48)._replace(loss=gate)
    done = run(
        "local", what, "asp", optimizer=partial(Odd, act=wait), workers=2, out=out,
        patience=PATIENCE, shards=shards,
    )  # fmt: skip
    os.close(once.left)
    assert_exact(done, 48, 2)


def test_a_rule_that_always_waits_for_ever_ends_the_run():
    what = problem(samples=48)
    with nothing_left():
        said = message_of(
            ob.RunError,
            lambda: run(
                "local", what, "asp", workers=2, patience=PATIENCE,
                optimizer=partial(Odd, act=threading.Event().wait, over=1),
            ),
        )  # fmt: skip
    assert said.startswith("the server was silent for longer than patience (0.5 s) 4 times")
    assert "pass a larger patience" in said


def test_a_test_that_always_waits_for_ever_ends_the_run():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat tester":
            threading.Event().wait()
        return F.mse_loss(output, target)

    what = problem(samples=48)._replace(loss=loss)
    with nothing_left():
        said = message_of(
            ob.RunError,
            lambda: run("local", what, "bsp", workers=2, test=what.data, patience=PATIENCE),
        )
    assert said.startswith("the test process was silent for longer than patience (0.5 s) 4 times")


@pytest.mark.parametrize("where", ["server", "shard", "tester", "checkpoint"])
def test_whoever_is_at_work_has_all_the_time_it_wants(out, monkeypatch, where):
    """It computes, or writes a file, until it has been looked at for three times patience."""
    looks, once = os.eventfd(0), Once()
    pids: set[int] = set()

    def each(number: int) -> None:
        os.eventfd_write(looks, 1)
        pids.update(children().get(name, 0) for name in ("offbeat server", "offbeat tester"))

    def busy() -> None:
        seen = 0
        while seen < 3 * LOOKS:
            if select.select([looks], [], [], 0)[0]:
                seen += os.eventfd_read(looks)

    def compute() -> None:
        if once():
            busy()

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "tester" and me() == "offbeat tester":
            compute()
        return F.mse_loss(output, target)

    write = checkpoint.save_tensors

    def slow(path: Any, tensors: Any) -> str:
        if where == "checkpoint" and "checkpoints" in path.parts and once():
            seen = 0
            while seen < 3 * LOOKS:  # without a tick of computing
                select.select([looks], [], [])
                seen += os.eventfd_read(looks)
        return write(path, tensors)

    def rule() -> None:
        # Of two shards only the other process's takes its time; the server waits for it.
        if (where == "server" and me() == "offbeat server") or (
            where == "shard" and me().startswith("offbeat shard")
        ):
            compute()

    monkeypatch.setattr(checkpoint, "save_tensors", slow)
    what = problem(samples=48)._replace(loss=loss)
    with counted(each):
        done = run(
            "local", what, "asp", optimizer=partial(Odd, act=rule), workers=2, out=out,
            test=what.data, patience=PATIENCE, shards=2 if where == "shard" else 1,
        )  # fmt: skip
    assert not once()  # it has happened
    os.close(looks)
    os.close(once.left)
    assert len(pids - {0}) == 2  # nobody has been replaced
    assert_exact(done, 48, 2)


def test_ctrl_c_stops_a_run_whose_server_stands_still(gate, out):
    """The one that takes its place is told to stop."""
    stopped = stop(children, "offbeat server")

    def both(record: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return stopped(record)

    what = problem(samples=48)._replace(loss=gate)
    script = Script(gate, [after(3), both])
    how: dict[str, Any] = {"workers": 3, "epochs": 12, "out": out, "patience": PATIENCE}
    with pytest.raises(ob.Interrupted):
        run("local", what, "asp", listeners=[script], **how)
    done = run("local", what, "asp", resume=True, **how)
    assert_exact(done, 48, 12)
    assert_replays(done, what)
