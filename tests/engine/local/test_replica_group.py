"""Processes of a split replica are killed, stopped and fail: the replica falls as one, no other."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.engine.local.launcher import Launcher
from offbeat.engine.local.worker_process import WorkerProcess
from offbeat.log.records import EpochDone, Joined, Lost, Record
from offbeat.worker.loop import Loop
from tests.contract.common import Problem, problem, run
from tests.engine.local.common import (
    Gate,
    Script,
    Step,
    after,
    assert_exact,
    assert_replays,
    children,
    contributed,
    ended,
    me,
    message_of,
    nothing_left,
    seen,
    strike,
)

SAMPLES = 48


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.2), Last())


class Last(nn.Module):
    """A block of the last stage; `net` has one, so that tests can let it fail."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(value)
        return result


def members(worker: int) -> dict[str, int]:
    """The processes of a worker beside its leader, by their names."""
    leader = children().get(f"offbeat {worker}")
    found: dict[str, int] = {}
    if leader is None:
        return found
    try:
        for thread in os.listdir(f"/proc/{leader}/task"):
            for pid in Path(f"/proc/{leader}/task/{thread}/children").read_text().split():
                found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    except OSError:
        return {}  # it has just ended
    return found


def strike_member(worker: int, process: int, what: signal.Signals = signal.SIGKILL) -> Step:
    """Signals another process of a replica than its leader, as soon as it is there."""

    def step(record: Record) -> bool:
        pid = members(worker).get(f"offbeat {worker}.{process}")
        if pid is None:
            return False
        os.kill(pid, what)
        return True

    return step


def noted(into: list[int], find: Callable[[], int | None]) -> Step:
    """Keeps a process's number, as soon as it is there."""

    def step(record: Record) -> bool:
        pid = find()
        into.extend([] if pid is None else [pid])
        return pid is not None

    return step


@pytest.fixture
def gate(unhurried: None) -> Iterator[Gate]:
    made = Gate()
    with nothing_left():
        yield made
    # Whoever was forked has this end too, the processes of processes as well. It ends with them.
    os.close(made.writing)
    left = True
    while left:
        assert select.select([made.reading], [], [], 60)[0], "a process is left"
        left = bool(os.read(made.reading, 1))
    os.close(made.reading)


def faulty(
    gate: Gate, discipline: str, layout: str, steps: list[Step], **options: Any
) -> tuple[ob.Run, Script, Problem]:
    what = problem(net, samples=SAMPLES)._replace(loss=gate)
    script = Script(gate, steps)
    options = {"workers": 2, "epochs": 12} | options
    done = run("local", what, discipline, layout=layout, listeners=[script], **options)
    assert not script.left, "the run was over before everything had happened"
    return done, script, what


def incarnations(script: Script, worker: int) -> list[int]:
    return [r.incarnation for r in script.all if isinstance(r, Joined) and r.worker == worker]


KINDS = [
    ("bsp", "pp=2,microbatches=2,split=count", 1),
    ("asp", "pp=3,microbatches=4,split=count,schedule=zero-bubble", 1),
    ("asp", "pp=3,microbatches=1,split=count,schedule=stash", 2),
    ("ssp:1", "pp=2,microbatches=2,split=count,schedule=2bw", 1),
    ("local:2", "pp=2,microbatches=2,split=2,schedule=gpipe", 1),
]


@pytest.mark.parametrize(("name", "layout", "process"), KINDS)
def test_a_process_of_a_replica_is_killed_and_then_its_leader(gate, out, name, layout, process):
    pids: list[dict[str, int]] = []

    def note(record: Record) -> bool:
        found = members(1) | {"leader": children().get("offbeat 1", 0)}
        pids.append(found)
        return True

    steps = [
        after(2),
        note,
        strike_member(1, process),
        seen(Lost, 1),
        seen(Joined, 1),
        contributed(1, 2),
        note,
        strike("offbeat 1"),
        seen(Lost, 1),
        seen(Joined, 1),
        contributed(1, 3),
    ]
    done, script, what = faulty(gate, name, layout, steps, out=out)
    assert_exact(done, SAMPLES, 12)
    assert_replays(done, what)
    # It was made anew as a whole, and the other one went on as it was.
    assert not set(pids[0].values()) & set(pids[1].values())
    assert incarnations(script, 0) == [1]
    assert incarnations(script, 1) == [1, 2, 3]
    assert {r.worker for r in script.all if isinstance(r, Lost)} == {1}


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_process_that_stands_still_is_named(gate, out, schedule):
    """The launcher ends the whole replica when it does not wake, and the run goes on."""
    pid: list[int] = []
    steps = [
        after(3),
        noted(pid, lambda: children().get("offbeat 1")),
        strike_member(1, 1, signal.SIGSTOP),
        seen(Lost, 1),
        seen(Joined, 1),
        contributed(1, 2),
        lambda record: children().get("offbeat 1") != pid[0],
    ]
    layout = f"pp=2,microbatches=2,split=count,schedule={schedule}"
    done, script, what = faulty(gate, "asp", layout, steps, out=out, epochs=30, patience=1.0)
    assert_exact(done, SAMPLES, 30)
    assert_replays(done, what)
    why = [r.why for r in script.all if isinstance(r, Lost) and r.worker == 1]
    waits = r"process 0 waits for .* from process 1 since step \d"
    assert any(re.search(waits, words) for words in why), why


@pytest.mark.parametrize(("name", "schedule"), [("bsp", "1f1b"), ("asp", "1f1b"), ("asp", "2bw")])
def test_a_replica_that_wakes_is_refused_and_joins_again(gate, out, name, schedule):
    """With the same processes, and nothing of what they had under way."""
    pid: list[int] = []
    steps = [
        after(3),
        noted(pid, lambda: members(1).get("offbeat 1.1")),
        strike_member(1, 1, signal.SIGSTOP),
        seen(Lost, 1),
        strike_member(1, 1, signal.SIGCONT),
        seen(Joined, 1),
        contributed(1, 2),
        lambda record: members(1).get("offbeat 1.1") == pid[0],
    ]
    layout = f"pp=2,microbatches=2,split=count,schedule={schedule}"
    done, _, what = faulty(gate, name, layout, steps, out=out, epochs=20, patience=1.0)
    assert_exact(done, SAMPLES, 20)
    assert_replays(done, what)


def test_the_server_is_killed_while_batches_are_under_way(gate, out):
    steps = [seen(EpochDone), strike("offbeat server"), seen(Joined), after(3)]
    layout = "pp=2,microbatches=2,split=count,schedule=2bw"
    done, _, what = faulty(gate, "asp", layout, steps, out=out)
    assert_exact(done, SAMPLES, 12)
    assert_replays(done, what)


def test_a_process_that_always_dies_ends_the_run(gate):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat 1.1":
            os.kill(os.getpid(), signal.SIGKILL)
        return gate(output, target)

    what = problem(net)._replace(loss=loss)
    said = message_of(
        ob.RunError,
        lambda: run("local", what, "asp", workers=2, epochs=2000, layout="pp=2,split=count"),
    )
    assert said.startswith("worker 1 ended 4 times in a row without any work")


# ---------------------------------------------------------------- told to leave before it joined


def late(when: Callable[[], bool]) -> Callable[[WorkerProcess], Loop]:
    """Workers that enter while `when` do so when they have been told that it is over."""
    enter = WorkerProcess.enter

    def entered(worker_process: WorkerProcess) -> Loop:
        if when():
            assert select.select([worker_process.client.link.wire], [], [], 60)[0]
        return enter(worker_process)

    return entered


LAYOUTS = [f"pp=2,microbatches=2,split=count,schedule={kind}" for kind in ("1f1b", "2bw")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stage_is_killed_near_the_end(gate, out, monkeypatch, layout):
    """Its replica is made anew, and the run is over before that has joined."""
    struck = os.eventfd(0)
    killed = strike_member(1, 1)

    def kill(record: Record) -> bool:
        if not members(1):
            return False
        os.eventfd_write(struck, 1)
        return killed(record)

    monkeypatch.setattr(
        WorkerProcess, "enter", late(lambda: bool(select.select([struck], [], [], 0)[0]))
    )
    done, script, what = faulty(gate, "asp", layout, [after(3), kill, seen(Lost, 1)], out=out)
    os.close(struck)
    assert incarnations(script, 1) == [1]
    assert_exact(done, SAMPLES, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_finished_run_is_resumed(gate, out, monkeypatch, layout):
    gate.open()
    what = problem(net, samples=SAMPLES)._replace(loss=gate)
    how: dict[str, Any] = {"workers": 2, "epochs": 2, "out": out, "layout": layout}
    first = run("local", what, "asp", **how)
    monkeypatch.setattr(WorkerProcess, "enter", late(lambda: True))
    again = run("local", what, "asp", resume=True, **how)
    assert again.parameter_hash == first.parameter_hash
    assert_exact(again, SAMPLES, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ctrl_c_before_anybody_has_joined(gate, out, monkeypatch, layout):
    gate.open()
    what = problem(net, samples=SAMPLES)._replace(loss=gate)
    how: dict[str, Any] = {"workers": 2, "epochs": 2, "out": out, "layout": layout}
    start = Launcher._start

    def interrupted(launcher: Launcher, *given: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        start(launcher, *given)

    with monkeypatch.context() as patched:
        patched.setattr(WorkerProcess, "enter", late(lambda: True))
        patched.setattr(Launcher, "_start", interrupted)
        with pytest.raises(ob.Interrupted) as caught:
            run("local", what, "asp", **how)
    assert caught.value.run.summary().updates == 0
    del caught
    assert_exact(run("local", what, "asp", resume=True, **how), SAMPLES, 2)


# ---------------------------------------------------------------- the user's own code


class Failing(Last):
    """Fails in one process, named as `ps` has it."""

    where = "offbeat 1.1"

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if me() == self.where:
            raise ValueError("no such class")
        return super().forward(value)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "2bw"])
@pytest.mark.parametrize("process", [0, 1])
def test_an_exception_in_a_stage_is_told_with_its_place(gate, schedule, process):
    line = Failing.forward.__code__.co_firstlineno + 2
    failing = Failing()
    failing.where = "offbeat 1.1" if process else "offbeat 1"
    first, last = nn.Linear(3, 4), nn.Linear(2, 2)
    model = nn.Sequential(first, failing, last).double()
    what = problem()._replace(model=model, loss=gate)
    split = "1" if process else "2"
    layout = f"pp=2,microbatches=2,split={split},schedule={schedule}"
    gate.open()
    said = message_of(
        ob.RunError, lambda: run("local", what, "asp", workers=2, layout=layout, epochs=500)
    )
    who = "MemberFailed: process 1 of its replica: " if process else ""
    assert said == f"worker 1 failed: {who}ValueError: no such class ({__file__} line {line})"


@pytest.mark.parametrize("schedule", ["1f1b", "stash"])
def test_numbers_that_are_not_finite_end_the_run_in_words(gate, schedule):
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) * float("nan")

    gate.open()
    what = problem(net)._replace(loss=loss)
    layout = f"pp=2,microbatches=2,split=count,schedule={schedule}"
    said = message_of(ob.RunError, lambda: run("local", what, "bsp", workers=2, layout=layout))
    assert said.startswith("the loss is nan at worker")


def test_what_cannot_travel_between_stages_is_named(gate):
    class Odd(nn.Module):
        def forward(self, value: torch.Tensor) -> Any:
            return {"value": value, "kinds": {1, 2}}

    class Even(nn.Module):
        def forward(self, value: dict[str, Any]) -> torch.Tensor:
            result: torch.Tensor = value["value"]
            return result

    model = nn.Sequential(nn.Linear(3, 2), Odd(), Even(), nn.Linear(2, 2)).double()
    gate.open()
    what = problem()._replace(model=model, loss=gate)
    said = message_of(
        ob.RunError, lambda: run("local", what, "bsp", workers=1, layout="pp=2,split=2")
    )
    assert "a set cannot travel between stages" in said


# ---------------------------------------------------------------- Ctrl-C, and the launcher


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_ctrl_c_saves_and_the_run_can_go_on(gate, out, schedule):
    def interrupt(record: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return True

    what = problem(net, samples=SAMPLES)._replace(loss=gate)
    layout = f"pp=2,microbatches=2,split=count,schedule={schedule}"
    how: dict[str, Any] = {"workers": 2, "epochs": 4, "out": out, "layout": layout}
    script = Script(gate, [after(10), interrupt])
    with pytest.raises(ob.Interrupted) as caught:
        run("local", what, "asp", listeners=[script], **how)
    begun = caught.value.run.summary().updates
    del caught
    done = run("local", what, "asp", resume=True, **how)
    assert done.summary().updates > begun
    assert_exact(done, SAMPLES, 4)
    assert_replays(done, what)


LAUNCHER = """
import os, sys
from tests.contract.common import problem, run
from tests.engine.local.common import Gate, Script, after, children
from tests.engine.local.test_replica_group import members, net

def tell(record):
    there = children() | members(0) | members(1)
    print(*there.values(), flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
    return True

gate = Gate(0.02)
what = problem(net, samples=48)._replace(loss=gate)
run("local", what, "asp", workers=2, epochs=5000, layout=sys.argv[1],
    listeners=[Script(gate, [after(5), tell])])
"""


@pytest.mark.parametrize("schedule", ["1f1b", "stash"])
def test_everything_ends_with_the_launcher(schedule):
    root = Path(__file__).parents[3]
    layout = f"pp=3,microbatches=4,split=count,schedule={schedule}"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, layout],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        handles = [os.pidfd_open(pid) for pid in pids]
        process.stdin.write(b"go\n")
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL
    ended(handles)
    assert len(pids) == 1 + 2 * 3


ONCE = """
import sys
import torch
from torch import nn
import offbeat as ob
from tests.contract.common import problem, run

def loss(output, target):
    if len(output) < 4:  # a microbatch: the trial before the run has a whole batch
        assert "torch.distributed.pipelining._backward" in sys.modules
    return ((output - target) ** 2).mean()

what = problem()._replace(loss=loss)
run("local", what, "asp", workers=1, epochs=1, layout="pp=2,split=2,schedule=zero-bubble")
"""


def test_what_two_halves_take_is_loaded_before_any_process_is_forked():
    """It takes seconds; every process would spend them in its first step."""
    root = Path(__file__).parents[3]
    subprocess.run(
        [sys.executable, "-c", ONCE], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
        check=True,
    )  # fmt: skip
