"""Real processes that die, stop and freeze: the run goes on, and its books are exact."""

import os
import signal
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import offbeat as ob
from offbeat.log.records import Joined, Lost, Pulled, Refused, Updated
from tests.contract.common import NAMES, Records, check_run, named, optimizer_for, problem, run
from tests.contract.real import QUICK, AtStep, Gate, Once, WakeLost, children, level, strike

SAMPLES = 30  # with batches of 4 the last one of an epoch is short


def _with(what: Any, acts: dict[tuple[int, int], Any], workers: int = 0) -> Any:
    """The problem with something that happens at steps, the first of which all begin together."""
    return level("local", what._replace(loss=AtStep(what.loss, acts)), workers or 1)


def test_the_faults_do_happen(local_only, tmp_path):
    """One dies over a step, one stops in a step until it is given up: both come again."""
    acts = {(1, 1): Once(signal.SIGKILL), (2, 1): Once(signal.SIGSTOP)}
    what = _with(problem(samples=80), acts, 3)
    out = tmp_path / "run"
    listeners = [WakeLost()]
    got = run(
        local_only, what, "asp", workers=3, patience=QUICK, emulate=[0.001], listeners=listeners,
        out=out,
    )  # fmt: skip
    records = check_run(out, what)
    lost = Counter(record.worker for record in records if isinstance(record, Lost))
    assert lost[1] >= 1
    assert lost[2] >= 1
    assert any(record.leases for record in records if isinstance(record, Lost))
    assert got.summary().lost == lost.total()
    assert got.summary().per_worker[1].joins == 1 + lost[1]


def test_one_that_wakes_is_refused_and_joins_again(local_only, tmp_path):
    """It stops over a gradient that the store will not take any more; nothing is applied twice.

    The others wait in their next step until it has come back, so that there is work left for it.
    """
    back = Gate()
    acts = {(0, 3): back.wait, (1, 2): Once(signal.SIGSTOP)}

    class Came(ob.Listener):
        def see(self, record: Any) -> None:
            if isinstance(record, Joined) and record.worker == 1 and record.incarnation > 1:
                back.open()

    what, out = _with(problem(samples=80), acts), tmp_path / "run"
    listeners = [WakeLost(), Came()]
    run(local_only, what, "asp", workers=2, patience=1.0, listeners=listeners, out=out)
    records = check_run(out, what)
    assert any(isinstance(record, Refused) and record.worker == 1 for record in records)
    joined = [record for record in records if isinstance(record, Joined) and record.worker == 1]
    assert len(joined) > 1


@pytest.mark.parametrize("name", ["bsp", "ssp", "local", "asup", "average", "soft"])
def test_one_that_stops_for_ever_holds_up_nobody_for_ever(local_only, name, tmp_path):
    """The others go on when patience is over, and everything is done without it."""
    what = _with(problem(samples=SAMPLES), {(2, 1): Once(signal.SIGSTOP)}, 3)
    out = tmp_path / "run"
    run(local_only, what, named(3)[name], workers=3, patience=QUICK, out=out)
    records = check_run(out, what)
    assert any(isinstance(record, Lost) and record.worker == 2 for record in records)


@pytest.mark.parametrize("name", NAMES)
def test_all_may_die(local_only, name, tmp_path):
    """Every worker dies once, over its second step, and another takes its place."""
    acts = {(worker, 2): Once(signal.SIGKILL) for worker in range(2)}
    what, discipline = _with(problem(samples=SAMPLES), acts, 2), named(2)[name]
    out = tmp_path / "run"
    adam = partial(torch.optim.Adam, lr=0.01)
    got = run(
        local_only, what, discipline, workers=2, codec="int8", out=out,
        optimizer=optimizer_for(discipline, adam),
    )  # fmt: skip
    check_run(out, what)
    assert got.summary().lost >= 1


def test_one_that_always_dies_ends_the_run_with_a_reason(local_only):
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    what = _with(problem(samples=SAMPLES), {(0, 1): die})
    with pytest.raises(ob.RunError, match="worker 0 was killed by SIGKILL 4 times in a row"):
        run(local_only, what, "bsp", workers=1)
    assert not children()


# ---------------------------------------------------------------- the server


class KillServer(ob.Listener):
    """Kills the server at the first record of the given version or a later one, so many times."""

    def __init__(self, version: int, gate: Gate, times: int = 1):
        self.version, self.gate, self.times = version, gate, times

    def see(self, record: Any) -> None:
        if self.times and isinstance(record, Updated) and record.version >= self.version:
            self.times -= 1
            strike("server", signal.SIGKILL)
            self.gate.open()


@pytest.mark.parametrize("name", ["bsp", "bsp-backup", "ssp", "asp-gap", "local", "easgd"])
@pytest.mark.parametrize("kept", ["folder", "memory"])
def test_a_killed_server_goes_on_from_its_last_checkpoint(local_only, name, kept, tmp_path):
    """It is killed at the third version, when at least one of the first two has been saved.

    Workers wait in their seventh step until it is dead, so that it does not finish before.
    """
    gate, seen = Gate(), Records()
    what = _with(problem(samples=SAMPLES), {(worker, 7): gate.wait for worker in range(2)}, 2)
    out = tmp_path / "run" if kept == "folder" else None
    got = run(
        local_only, what, named(2)[name], workers=2, out=out, checkpoint_every=1,
        codec="topk:0.3", listeners=[KillServer(3, gate), seen],
    )  # fmt: skip
    assert all(e["applied"] + e["dropped"] == SAMPLES for e in got.summary().ledger)
    assert all(e["repeated"] == e["missing"] == 0 for e in got.summary().ledger)
    # Everybody has joined twice: once with each server.
    joins = Counter(record.worker for record in seen.of(Joined))
    assert joins == {0: 2, 1: 2}
    versions = [record.version for record in seen.of(Updated)]
    assert versions.count(1) == 1  # what has been saved is never taken back
    assert versions[-1] == got.summary().updates
    if out is not None:
        records = check_run(out, what)
        assert got.summary().updates == sum(isinstance(r, Updated) for r in records)
        assert got.summary().samples == sum(e["applied"] for e in got.summary().ledger)


def test_a_server_killed_before_its_first_checkpoint(local_only, tmp_path):
    gate, out = Gate(), tmp_path / "run"
    what = _with(problem(samples=SAMPLES), {(worker, 3): gate.wait for worker in range(2)})
    run(
        local_only, what, "asp", workers=2, out=out, checkpoint_every=1000,
        listeners=[KillServer(1, gate)],
    )  # fmt: skip
    records = check_run(out, what)
    assert next(r.version for r in records if isinstance(r, Pulled)) == 0


def test_nobody_is_left_after_a_run(local_only):
    run(local_only, problem(), "asp", workers=2, test=problem().data)
    assert not children()
