"""Shard processes are killed, fail and cannot be started: the run goes on or says why."""

import errno
import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import offbeat as ob
from offbeat.engine.local import shard_process as shard_module
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.records import EpochDone, Joined, Updated
from tests.contract.common import named, problem, run
from tests.engine.local.common import (
    Script,
    Step,
    after,
    assert_exact,
    assert_replays,
    ended,
    faulty,
    me,
    message_of,
    nothing_left,
    seen,
    shard_processes,
    strike,
)


def gone(pids: list[int]) -> None:
    """Wait until these processes, nobody's children here, have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            ended([os.pidfd_open(pid)])


def strike_shard(number: int) -> Step:
    """Kills a shard process as soon as it is there."""

    def step(record: Any) -> bool:
        pid = shard_processes().get(f"offbeat shard {number}")
        if pid is None:
            return False
        handle = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        ended([handle])
        return True

    return step


@pytest.mark.parametrize("name", ["bsp", "asp-dc", "average", "fedbuff"])
def test_a_shard_process_is_killed_and_everybody_starts_anew(gate, out, name):
    steps = [seen(EpochDone), after(2), strike_shard(2), seen(Joined), after(2)]
    done, script, what = faulty(gate, named(3)[name], steps, out=out, shards=3)
    assert sum(isinstance(record, Joined) for record in script.all) >= 6
    assert_exact(done, 48, 12)
    assert_replays(done, what)


@pytest.mark.parametrize("when", [1, 20])
def test_a_shard_process_is_killed_in_a_run_without_a_folder(gate, when):
    steps = [after(when), strike_shard(1), seen(Joined), after(3)]
    done, _, _ = faulty(gate, "asp", steps, shards=2, epochs=4)
    assert_exact(done, 48, 4)
    assert done.summary().updates == 48  # what was given up is not counted


def test_a_shard_process_is_killed_while_nobody_needs_it(gate):
    """Every worker is in a step that does not end before the server has noticed."""
    gate.seconds = 3600.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (F.mse_loss if me() == "offbeat trial" else gate)(output, target)

    script = Script(gate, [seen(Joined, 2), strike_shard(1), seen(Joined, 0)])
    what = problem(samples=48)._replace(loss=loss)
    options = {"workers": 3, "epochs": 1, "patience": 4000}
    done = run("local", what, "bsp", shards=2, listeners=[script], **options)
    assert not script.left
    assert_exact(done, 48, 1)


def test_a_shard_process_that_is_always_killed_ends_the_run(gate):
    steps = [step for _ in range(4) for step in (seen(Joined), strike_shard(1))]
    said = message_of(ob.RunError, lambda: faulty(gate, "asp", steps, shards=2))
    assert said.startswith("the server was killed by SIGKILL 4 times in a row")


def test_shard_processes_end_with_their_server(gate, out):
    there: list[int] = []
    steps = [
        seen(EpochDone),
        lambda record: len(shard_processes()) == 2 and not there.extend(shard_processes().values()),
        strike("offbeat server"),
        seen(Joined),
        after(2),
        lambda record: not set(there) & set(shard_processes().values()),
    ]
    done, _, what = faulty(gate, "ssp:1", steps, out=out, shards=3)
    gone(there)
    assert_exact(done, 48, 12)
    assert_replays(done, what)


def test_none_is_left_when_a_run_is_over_or_ends_early(gate):
    there: list[int] = []

    class Look(ob.Listener):
        def see(self, record: Any) -> None:
            there.extend(shard_processes().values())
            if isinstance(record, Updated) and stops:
                raise KeyError("enough")

    for stops in (False, True):
        what = problem(samples=48)
        look = partial(run, "local", what, "asp", workers=2, shards=3, listeners=[Look()])
        if stops:
            with pytest.raises(KeyError):
                look()
        else:
            look()
    assert len(set(there)) == 4
    gone(list(set(there)))


def test_one_shard_has_no_shard_process(gate):
    seen_shards: list[dict[str, int]] = []
    script = Script(gate, [lambda record: not seen_shards.append(shard_processes()), after(1)])
    what = problem()._replace(loss=gate)
    run("local", what, "asp", workers=2, listeners=[script])
    assert seen_shards == [{}]


def test_workers_that_write_in_place_need_no_shard_process(gate):
    seen_shards: list[dict[str, int]] = []
    script = Script(gate, [lambda record: not seen_shards.append(shard_processes()), after(1)])
    what = problem()._replace(loss=gate)
    run("local", what, "hogwild", workers=2, shards=3, listeners=[script])
    assert seen_shards == [{}]


class Fussy(torch.optim.SGD):
    """A rule that fails in one process."""

    def step(self, closure: Any = None) -> Any:
        if me() == "offbeat shard 1":
            raise ValueError("not with me")
        return super().step(closure)


STEP = Fussy.step


def test_a_rule_that_fails_in_a_shard_process_ends_the_run_with_its_place():
    line = STEP.__code__.co_firstlineno + 2  # before PyTorch wraps it
    what = problem()
    said = partial(run, "local", what, "asp", workers=2, shards=2, optimizer=partial(Fussy, lr=0.1))
    with nothing_left():
        text = message_of(ob.RunError, said)
    assert text == f"shard process 1 failed: ValueError: not with me ({__file__} line {line})"


def test_a_disk_that_is_full_for_a_shard_process_leaves_the_checkpoint_before(out, monkeypatch):
    write, calls = shard_module.save_tensors, []

    def full(path: Path, tensors: Any) -> str:
        calls.extend([path] if out in path.parents else [])  # others are for a backup
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, tensors)

    monkeypatch.setattr(shard_module, "save_tensors", full)
    what = problem()
    with nothing_left():
        said = message_of(
            ob.RunError, lambda: run("local", what, "bsp", workers=2, shards=2, out=out)
        )
    assert "could not be written (No space left on device)" in said
    assert "make room and resume" in said
    assert not list((out / "checkpoints").glob(".*"))
    found = RunFolder(out).load()
    assert found is not None
    assert found[1]["store"]["epoch"] == 1
    monkeypatch.undo()
    again = run("local", what, "bsp", workers=2, shards=2, out=out, resume=True)
    assert_exact(again, 24, 2)


def test_a_shard_process_that_cannot_be_started_ends_the_run_in_words(monkeypatch):
    real = os.fork

    def fork() -> int:
        if me() == "offbeat server":
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return real()

    monkeypatch.setattr(os, "fork", fork)
    with nothing_left():
        said = message_of(ob.RunError, lambda: run("local", problem(), "bsp", workers=2, shards=2))
    assert "shard process 1 could not be started (Resource temporarily" in said
