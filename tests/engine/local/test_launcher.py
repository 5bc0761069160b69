"""Processes of a local run are killed, stopped and frozen: it goes on, or ends with clear words."""

import errno
import os
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

import offbeat as ob
from offbeat.engine.local import plan as local_plan
from offbeat.engine.local import roles as roles_module
from offbeat.engine.local.process import ForkSpawner
from offbeat.folder import checkpoint
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.log import read
from offbeat.log.records import EpochDone, Evaluated, Joined, Lost, Turned, Updated
from offbeat.protocol.server import ServerProtocol
from offbeat.store.store import Store
from offbeat.transport import memory
from tests.contract.common import Stop, StopAfter, named, problem, run, scratch
from tests.contract.real import held_at
from tests.engine.local.common import (
    PATIENCE,
    Gate,
    Script,
    after,
    assert_exact,
    assert_replays,
    children,
    contributed,
    ended,
    faulty,
    me,
    message_of,
    nothing_left,
    seen,
    strike,
)

# One of each kind: lock-step, slack, free, sums of gradients, changes of weights, a centre.
KINDS = ["bsp", "ssp", "asp-dc", "downpour", "local", "easgd"]


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize("name", [*KINDS, "fedbuff", "async-local", "asup", "bsp-backup"])
def test_a_worker_is_killed_and_then_the_server(gate, out, name):
    steps = [
        after(2),
        strike("offbeat 1"),
        seen(Lost, 1),
        seen(Joined, 1),
        contributed(1, 2),
        seen(EpochDone),
        strike("offbeat server"),
        seen(Joined),
        after(2),
    ]
    done, _, what = faulty(gate, named(3)[name], steps, out=out)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("name", KINDS)
def test_a_worker_that_wakes_is_refused_and_joins_again(gate, out, name):
    steps = [
        after(3),
        strike("offbeat 1", what=signal.SIGSTOP),
        seen(Lost, 1),
        strike("offbeat 1", what=signal.SIGCONT),
        seen(Joined, 1),
        contributed(1, 2),
    ]
    pid: list[int] = []
    steps.insert(1, lambda record: not pid.append(children()["offbeat 1"]))
    steps.append(lambda record: children()["offbeat 1"] == pid[0])  # the same process
    done, _, what = faulty(gate, named(3)[name], steps, out=out, epochs=20, patience=1.0)
    assert done.summary().lost >= 1
    assert_exact(done, 48, 20)
    assert_replays(done, what)


@pytest.mark.parametrize("name", ["bsp", "asp", "local"])
def test_a_frozen_worker_is_replaced(gate, out, name):
    pid: list[int] = []
    steps = [
        after(3),
        lambda record: not pid.append(children()["offbeat 1"]),
        strike("offbeat 1", what=signal.SIGSTOP),
        seen(Lost, 1),
        seen(Joined, 1),
        contributed(1, 2),
        lambda record: children()["offbeat 1"] != pid[0],
    ]
    done, _, what = faulty(gate, named(3)[name], steps, out=out, epochs=30, patience=PATIENCE)
    assert_exact(done, 48, 30)
    assert_replays(done, what)


def test_kills_between_fifty_turns(gate, out):
    """Of workers and of the server, which finds in its log which discipline holds."""
    rng = random.Random(5)
    stages = ["bsp", "asp", "ssp:1", "soft:2", "rennala:2,redo=yes", "bsp:backup=1,redo=yes"]
    turns = [ob.Turn(rng.choice(stages), f"v{at}", 1.0) for at in range(2, 102, 2)]
    steps = [
        *(seen(Turned), after(3), strike("offbeat 1"), seen(Lost, 1), seen(Joined, 1)),
        *(seen(Turned), after(2), strike("offbeat server"), seen(Joined), seen(Turned), after(3)),
        *(strike("offbeat server", "offbeat 0"), seen(Joined), seen(Turned), after(2)),
    ]
    done, _, what = faulty(gate, ob.Switch("asp", *turns), steps, out=out, epochs=40)
    assert_exact(done, 48, 40)
    assert_replays(done, what)
    records = [r for r in read(out / "log.jsonl") if isinstance(r, Turned)]
    assert [r.stage for r in records] == list(range(1, 51))
    assert [r.version for r in records] == list(range(2, 102, 2))
    assert [turn.discipline for turn in done.summary().turns] == [str(t.discipline) for t in turns]


def test_all_workers_are_killed_at_once(gate, out):
    everybody = ("offbeat 0", "offbeat 1", "offbeat 2")
    steps = [after(3), strike(*everybody), after(3), strike(*everybody), after(3)]
    done, _, what = faulty(gate, "ssp:1", steps, out=out)
    assert done.summary().lost >= 3
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("name", ["bsp", "easgd"])
def test_a_worker_is_killed_before_the_first_step(gate, out, name):
    """The very first record is somebody's entry, when nobody has begun yet."""
    steps = [strike("offbeat 0"), strike("offbeat 2"), after(3)]
    done, _, what = faulty(gate, named(3)[name], steps, out=out)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("name", ["bsp", "asp"])
def test_the_last_samples_are_held_by_a_stopped_worker(gate, out, name):
    """The others rest, get its leases when it is given up, and the run ends without it."""

    def nearly_over(record: Any) -> bool:
        return isinstance(record, Updated) and record.parts[0].leases[0].epoch == 1

    steps = [nearly_over, strike("offbeat 1", what=signal.SIGSTOP)]
    done, _, what = faulty(gate, named(3)[name], steps, out=out, epochs=2, patience=PATIENCE)
    assert_exact(done, 48, 2)
    assert_replays(done, what)


def test_a_worker_that_always_dies_ends_the_run():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat 1":
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(output, target)

    what = problem()._replace(loss=loss)
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", what, "asp", workers=2, epochs=2000))
    assert said.startswith("worker 1 was killed by SIGKILL 4 times in a row without any work")
    assert "fewer workers" in said


def test_exit_status_0_without_a_goodbye_is_a_death_like_any_other(gate, out):
    left = os.eventfd(1, os.EFD_NONBLOCK)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat 1":
            with suppress(BlockingIOError):
                os.eventfd_read(left)
                os._exit(0)
        return gate(output, target)

    script = Script(gate, [seen(Lost, 1), contributed(1, 2)])
    what = problem(samples=48)._replace(loss=loss)
    done = run("local", what, "asp", workers=3, epochs=12, out=out, listeners=[script])
    os.close(left)
    assert not script.left
    assert_exact(done, 48, 12)
    assert_replays(done, what._replace(loss=gate))


@pytest.mark.parametrize("who", [("offbeat 1",), ("offbeat 0", "offbeat 1")])
def test_workers_that_always_end_with_status_0_end_the_run(who):
    """Also if all do: a model of part of the samples is not given back as if all were well."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() in who:
            os._exit(0)
        return F.mse_loss(output, target)

    what = problem()._replace(loss=loss)
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", what, "asp", workers=2, epochs=2000))
    assert "ended with exit status 0 4 times in a row without any work" in said
    assert "os._exit(0)" in said


def test_a_server_that_ends_with_status_0_is_started_again(gate, out, monkeypatch):
    left, push = os.eventfd(1, os.EFD_NONBLOCK), ServerProtocol._push

    def leaves(server: ServerProtocol, number: int, message: Any, contribution: Any) -> None:
        if server.store.version == 7:
            with suppress(BlockingIOError):
                os.eventfd_read(left)
                os._exit(0)
        push(server, number, message, contribution)

    monkeypatch.setattr(ServerProtocol, "_push", leaves)
    steps = [after(7), seen(Joined), after(1)]
    done, _, what = faulty(gate, "asp", steps, out=out)
    os.close(left)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_a_run_that_does_not_account_for_all_samples_has_not_finished(out, monkeypatch):
    """Whatever has gone wrong: here the store believes that it is through after one epoch."""
    monkeypatch.setattr(Store, "finished", property(lambda store: store.epoch >= 1))
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", problem(), "bsp", workers=2, out=out))
    assert "with samples that nobody has trained on" in said
    assert not (out / "model.safetensors").exists()


def test_steps_longer_than_patience_end_the_run():
    """Without a limit such a worker would be given up and join again for ever."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat 1":
            gate(output, target)
        return F.mse_loss(output, target)

    gate = Gate(seconds=0.6)
    what = problem()._replace(loss=loss)
    with nothing_left():
        said = message_of(
            ob.RunError, lambda: run("local", what, "bsp", workers=2, epochs=9999, patience=0.3)
        )
    gate.close()
    assert "worker 1 was silent for longer than patience (0.3 s) 3 times in a row" in said
    assert "pass a larger patience" in said


# ---------------------------------------------------------------- the user's own code


def test_an_exception_in_the_loss_is_told_with_its_place():
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() in ("offbeat 0", "offbeat 1"):
            raise ValueError("no such class")
        return F.mse_loss(output, target)

    line = loss.__code__.co_firstlineno + 2
    what = problem()._replace(loss=loss)
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", what, "bsp", workers=2))
    assert "failed: ValueError: no such class" in said
    assert said.endswith(f"({__file__} line {line})")
    assert "Traceback" not in said


class Broken(Dataset):
    """One sample cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 23 and me().startswith("offbeat"):
            raise OSError("the file of sample 23 is gone")
        return torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_exception_in_the_dataset_is_told_with_its_place(prefetch):
    line = Broken.__getitem__.__code__.co_firstlineno + 2
    what = problem()
    with nothing_left():
        said = message_of(
            ob.RunError,
            lambda: run("local", what._replace(data=Broken()), "asp", workers=2, prefetch=prefetch),
        )
    assert "OSError: the file of sample 23 is gone" in said
    assert f"({__file__} line {line})" in said


def test_numbers_that_are_not_finite_end_the_run_in_words():
    what = problem()._replace(loss=lambda output, target: output.sum() * float("nan"))
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", what, "bsp", workers=2))
    assert said.startswith("the loss is nan at worker")


# ---------------------------------------------------------------- the tester


def test_the_tester_is_killed_again_and_again(gate, out):
    """More often than a process that never gets anything done would be forgiven."""
    steps = []
    for _ in range(5):
        steps += [seen(EpochDone), strike("offbeat tester"), seen(Evaluated)]
    what = problem(samples=48)
    done, _, what = faulty(
        gate, "asp", steps, out=out, epochs=30, test=what.data, evaluate_every=24
    )
    assert done.history.tests[-1].version == done.summary().updates
    assert_exact(done, 48, 30)
    assert_replays(done, what)


def test_the_tester_is_killed_during_the_last_test(gate, out):
    """The gate slows its batches down, so it is still at work when the last epoch is told."""
    what = problem(samples=48)
    steps = [seen(EpochDone), seen(EpochDone), strike("offbeat tester")]
    done, _, _ = faulty(gate, "bsp", steps, out=out, epochs=2, test=what.data)
    assert done.history.tests[-1].version == done.summary().updates
    assert_exact(done, 48, 2)


# ---------------------------------------------------------------- the server


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("when", [1, 20])
def test_the_server_is_killed_early_or_late_with_a_folder_or_without(gate, out, kept, when):
    steps = [after(when), strike("offbeat server"), seen(Joined), after(3)]
    done, _, what = faulty(gate, "asp", steps, out=out if kept else None, epochs=4)
    assert_exact(done, 48, 4)
    assert done.summary().updates == 48  # what was given up is not counted
    if kept:
        assert_replays(done, what)


def test_the_server_is_killed_while_a_worker_stands_still(gate, out):
    steps = [
        seen(EpochDone),
        strike("offbeat 1", what=signal.SIGSTOP),
        strike("offbeat server"),
        seen(Joined, 1),
        after(3),
    ]
    done, _, what = faulty(gate, "bsp", steps, out=out)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_a_server_that_is_always_killed_ends_the_run(gate):
    steps = [step for _ in range(4) for step in (seen(Joined), strike("offbeat server"))]
    with held_at(0):  # nobody makes a step between two blows
        said = message_of(ob.RunError, lambda: faulty(gate, "asp", steps))
    assert said.startswith("the server was killed by SIGKILL 4 times in a row")


def test_a_server_that_gets_on_may_be_killed_as_often_as_it_likes(gate, out):
    """Updates are progress, although no checkpoint comes between."""
    steps = [step for _ in range(6) for step in (after(1), strike("offbeat server"), seen(Joined))]
    done, _, what = faulty(gate, "asp", steps, out=out, checkpoint_every=100_000)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


class Fatal(torch.optim.SGD):
    """Kills the server over the same update, however often it is made again."""

    def step(self, closure: Any = None) -> Any:
        self.made = getattr(self, "made", 0) + 1
        if self.made == 5 and me().startswith("offbeat"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def test_work_that_is_lost_and_made_again_is_no_progress():
    """Two shards have no image: each time four updates are made and given up."""
    with nothing_left():
        said = message_of(
            ob.RunError,
            lambda: ob.train(
                *problem(), optimizer=partial(Fatal, lr=0.1), discipline="asp", workers=2,
                batch_size=4, epochs=20, shards=2, checkpoint_every=100_000,
            ),
        )  # fmt: skip
    assert said.startswith("the server was killed by SIGKILL 4 times in a row")


@pytest.fixture
def ignored() -> Iterator[None]:
    """As a program may inherit it: the system is to throw away how children end."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_in_a_program_that_ignores_the_end_of_its_children(gate, out, ignored, shards):
    steps = [after(3), strike("offbeat 1"), seen(Joined, 1), contributed(1, 2)]
    done, _, what = faulty(gate, "asp", steps, out=out, shards=shards)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_only_the_main_thread_can_mend_that(ignored):
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(
            message_of(ob.ConfigError, lambda: run("local", problem(), "bsp", workers=2))
        )
    )
    with nothing_left():
        thread.start()
        thread.join()
    assert "signal.signal(signal.SIGCHLD, signal.SIG_DFL)" in said[0]


# ---------------------------------------------------------------- disk, memory, files


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(out, monkeypatch):
    write, calls = checkpoint.save_tensors, []

    def full(path: Path, tensors: Any) -> str:
        calls.append(path)
        if len(calls) > 2 and "checkpoints" in path.parts:  # the initial tensors are the first
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    monkeypatch.setattr(checkpoint, "save_tensors", full)
    what = problem()
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", what, "bsp", workers=2, out=out))
    assert "No space left on device" in said
    assert "make room and resume" in said
    found = RunFolder(out).load()
    assert found is not None
    assert found[1]["store"]["epoch"] == 1
    monkeypatch.undo()
    again = run("local", what, "bsp", workers=2, out=out, resume=True)
    assert_exact(again, 24, 2)


def test_a_checkpoint_keeps_nobody_waiting(out, monkeypatch):
    went_on, write = os.eventfd(0), checkpoint.save_tensors

    def slow(path: Path, tensors: Any) -> str:
        if "checkpoints" in path.parts:
            assert select.select([went_on], [], [], 20)[0]
        return write(path, tensors)

    steps = count(1)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if me() == "offbeat 0" and next(steps) == 5:
            os.eventfd_write(went_on, 1)
        return F.mse_loss(output, target)

    monkeypatch.setattr(checkpoint, "save_tensors", slow)
    what = problem(samples=24)._replace(loss=loss)
    # The checkpoint of version 4 is written when the worker has begun its fifth step.
    done = run("local", what, "asp", workers=1, epochs=1, out=out, checkpoint_every=4)
    assert done.summary().samples == 24
    os.close(went_on)


def test_a_log_that_cannot_be_written_ends_the_run_in_words(out):
    out.mkdir()
    limit = run("local", problem(), "bsp", workers=2, out=out)
    assert limit.folder is not None
    with nothing_left(), scratch() as folder:
        other = folder / "run"
        original = roles_module.Log

        class Full(original):  # type: ignore[misc, valid-type]
            def write(self, record: Any) -> None:
                if isinstance(record, EpochDone):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                super().write(record)

        roles_module.Log = Full  # type: ignore[misc]
        try:
            said = message_of(
                ob.RunError, lambda: run("local", problem(), "bsp", workers=2, out=other)
            )
        finally:
            roles_module.Log = original  # type: ignore[misc]
    assert "No space left on device" in said
    assert "make room and resume" in said


def test_too_little_memory_is_found_before_any_process(monkeypatch):
    monkeypatch.setattr(memory, "memory_left", lambda: 1000)
    forked: list[int] = []
    monkeypatch.setattr(ForkSpawner, "start", lambda *what: forked.append(1))
    with nothing_left():
        said = message_of(ob.ConfigError, lambda: run("local", problem(), "bsp", workers=2))
    assert "MiB of shared memory are not to be had" in said
    assert "use fewer workers" in said
    assert not forked


def test_too_few_open_files_are_found_before_any_process(monkeypatch):
    monkeypatch.setattr(local_plan.resource, "getrlimit", lambda what: (40, 4096))
    with nothing_left():
        said = message_of(ob.ConfigError, lambda: run("local", problem(), "bsp", workers=64))
    assert "64 workers need" in said
    assert "ulimit -n" in said


@pytest.mark.parametrize(
    ("fails", "name"), [(1, "the process that tries the first batch"), (4, "worker 1")]
)
def test_a_process_that_cannot_be_started_ends_the_run_in_words(fails, name, monkeypatch):
    real, calls = os.fork, []

    def fork() -> int:
        calls.append(1)
        if len(calls) == fails:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    monkeypatch.setattr(os, "fork", fork)
    mine = problem()._replace(loss=lambda output, target: F.mse_loss(output, target))
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", mine, "bsp", workers=2))
    assert said.startswith(f"{name} could not be started (Resource temporarily unavailable)")


# ---------------------------------------------------------------- the launcher


@pytest.mark.parametrize("records", [1, 2, 9])
def test_a_listener_that_raises_ends_everything(records):
    with nothing_left(), pytest.raises(Stop):
        run("local", problem(), "asp", workers=2, epochs=50, listeners=[StopAfter(records)])


def interrupt(record: Any) -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return True


def to_all(record: Any) -> bool:
    """As a scheduler does it: every process of a job is asked to stop."""
    for pid in (*children().values(), os.getpid()):
        os.kill(pid, signal.SIGTERM)
    return True


@pytest.mark.parametrize("stop", [interrupt, to_all])
def test_ctrl_c_saves_and_the_run_can_go_on(gate, out, stop):
    what = problem(samples=48)._replace(loss=gate)
    how: dict[str, Any] = {"workers": 3, "epochs": 12, "out": out}
    script = Script(gate, [after(10), stop])
    with pytest.raises(ob.Interrupted) as caught:
        run("local", what, "fedbuff:2,2", listeners=[script], **how)
    assert getattr(caught.value, "code", None) == (143 if stop is to_all else None)
    begun = caught.value.run.summary()
    assert begun.lost == 0
    del caught
    assert 10 <= begun.updates < 48 * 12 // 16
    assert "missing" in begun.ledger[-1]
    done = run("local", what, "fedbuff:2,2", resume=True, **how)
    assert done.summary().updates > begun.updates
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("stop", [interrupt, to_all])
def test_ctrl_c_twice_stops_at_once(gate, stop):
    script = Script(gate, [after(3), lambda record: stop(record) and stop(record)])
    what = problem(samples=48)._replace(loss=gate)
    with pytest.raises(KeyboardInterrupt) as caught:
        run("local", what, "asp", workers=3, epochs=5000, listeners=[script])
    assert not isinstance(caught.value, ob.Interrupted)


def test_ctrl_c_twice_ends_a_run_whose_server_stands_still(gate):
    """Whoever sits before the screen need not wait for patience to run out."""

    def twice(record: Any) -> bool:
        strike("offbeat server", what=signal.SIGSTOP)(record)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return True

    script = Script(gate, [after(3), twice])
    what = problem(samples=48)._replace(loss=gate)
    with pytest.raises(KeyboardInterrupt):
        run("local", what, "asp", workers=3, epochs=5000, listeners=[script])


def test_ctrl_c_reaches_a_server_that_was_killed_meanwhile(gate, out):
    """The order is given again to the one that takes its place."""

    def both(record: Any) -> bool:
        strike("offbeat server")(record)
        return interrupt(record)

    script = Script(gate, [seen(EpochDone), after(2), both])
    what = problem(samples=48)._replace(loss=gate)
    how: dict[str, Any] = {"workers": 3, "epochs": 30, "out": out}
    with pytest.raises(ob.Interrupted):
        run("local", what, "asp", listeners=[script], **how)
    done = run("local", what, "asp", resume=True, **how)
    assert_exact(done, 48, 30)
    assert_replays(done, what)


def test_ctrl_c_during_the_last_test(gate, out):
    """The samples are all trained on; what is missing is the test, which resuming makes."""

    script = Script(gate, [seen(EpochDone), interrupt])
    what = problem(samples=48)._replace(loss=gate)
    how: dict[str, Any] = {"workers": 3, "epochs": 1, "out": out, "test": what.data}
    slow = Gate(seconds=30.0)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (slow if me() == "offbeat tester" else gate)(output, target)

    with pytest.raises(ob.Interrupted):
        run("local", what._replace(loss=loss), "bsp", listeners=[script], **how)
    slow.close()
    done = run("local", what, "bsp", resume=True, **how)
    assert done.history.tests[-1].version == done.summary().updates
    assert_exact(done, 48, 1)
    assert_replays(done, what)


LAUNCHER = """
import os, signal, sys
from torch.nn import functional as F
import offbeat as ob
from tests.contract.common import problem, run
from tests.engine.local.common import Gate, Script, after, children, shard_processes

def tell(record):
    there = children() | shard_processes()
    print(*there.values(), flush=True)
    sys.stdin.readline()
    if sys.argv[3:]:
        for pid in there.values():
            os.kill(pid, signal.SIGSTOP)
    os.kill(os.getpid(), int(sys.argv[1]))
    return True

gate = Gate(0.02)
what = problem(samples=48)._replace(loss=gate)
run("local", what, "asp", workers=3, epochs=5000, out=sys.argv[2], test=what.data, shards=2,
    listeners=[Script(gate, [after(5), tell])])
"""


@pytest.mark.parametrize(
    ("how", "more"), [(signal.SIGKILL, ()), (signal.SIGKILL, ("stopped",)), (signal.SIGTERM, ())]
)
def test_everything_ends_with_the_launcher(out, how, more):
    root = Path(__file__).parents[3]
    temporary = out.parent / "temporary"
    temporary.mkdir()
    # PyTorch's own cache, which the first optimiser of any process makes.
    places = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(out.parent / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(int(how)), str(out), *more],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)} | places,
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
        # SIGTERM saves and stops, and is told by the exit code.
        assert process.wait() == (143 if how == signal.SIGTERM else -how)
    ended(handles)
    assert len(pids) == 7
    assert list(temporary.iterdir()) == []
    assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]
    assert "run.json" in os.listdir(out)
    assert how == signal.SIGKILL or RunFolder(out).load() is not None
    assert (out / "model.safetensors").exists() == (how == signal.SIGTERM)
