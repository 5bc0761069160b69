"""A late gradient is compared with the parameters that it was computed on, wherever it has been."""

import copy
import json
import signal
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

import offbeat as ob
from offbeat.folder.manifest import checksum, read_manifest
from offbeat.log.records import Updated
from tests.contract.common import SGD, Problem, Stop, StopAfter, check_run, problem, run
from tests.contract.real import strike
from tests.independent.executor import Executor, Way, Yours

WAYS = {
    "dc(0.5)": ("dc", 0.5),
    "dc-adaptive(0.5;0.8)": ("dc-adaptive", 0.5, 0.8),
    "gap(0.9)": ("gap", 0.9),
}
TOGETHER = "20ms,50ms,30ms,30ms"


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def discipline(gather: int, weigh: str) -> ob.Discipline:
    kind, *rest = WAYS[weigh]
    kinds = {
        "dc": ob.DelayCompensation,
        "dc-adaptive": ob.AdaptiveDelayCompensation,
        "gap": ob.GapAware,
    }
    return ob.Discipline(gather=ob.Count(gather), weigh=kinds[kind](*rest))


def off(got: ob.Run, what: Problem, weigh: str) -> float:
    """How far a run is from plain PyTorch that follows its log."""
    assert got.folder is not None
    executor = Executor(
        got.folder, copy.deepcopy(what.model), what.data, torch.nn.functional.mse_loss,
        Way(weigh=WAYS[weigh]),
    )  # fmt: skip
    expected = executor.run(Yours(SGD))
    found = parameters_to_vector(got.model.parameters()).detach()
    return float((found - expected).abs().max())


@pytest.mark.parametrize("weigh", WAYS)
@pytest.mark.parametrize("shards", [1, 3])
def test_one_that_waited_for_others_while_its_worker_pulled_again(engine, weigh, shards, tmp_path):
    what = problem(deep, samples=40)
    got = run(
        engine, what, discipline(3, weigh), cluster=TOGETHER, shards=shards, optimizer=SGD,
        out=tmp_path / "run",
    )  # fmt: skip
    assert off(got, what, weigh) < 1e-12
    check_run(tmp_path / "run", what)


@pytest.mark.parametrize("weigh", WAYS)
@pytest.mark.parametrize(
    ("gather", "how"),
    [
        (1, {"overlap": True}),
        (2, {"overlap": True, "shards": 2}),
        (1, {"layout": "pp=3,microbatches=1,split=count,schedule=stash"}),
        (2, {"layout": "pp=2,microbatches=2,split=count,schedule=2bw"}),
    ],
)
def test_one_of_several_under_way(local_only, weigh, gather, how, tmp_path):
    what = problem(deep, samples=40)
    got = run(
        local_only, what, discipline(gather, weigh), workers=2, optimizer=SGD,
        out=tmp_path / "run", **how,
    )  # fmt: skip
    assert off(got, what, weigh) < 1e-12
    check_run(tmp_path / "run", what)


@pytest.mark.parametrize("weigh", WAYS)
def test_after_a_stop(sim_only, weigh, tmp_path):
    what = problem(deep, samples=40)
    how: dict[str, Any] = {"cluster": TOGETHER, "optimizer": SGD, "checkpoint_every": 1}
    rule = discipline(3, weigh)
    whole = run(sim_only, what, rule, out=tmp_path / "whole", **how)
    for records in (17, 40, 75):
        with suppress(Stop):
            out = tmp_path / f"cut {records}"
            run(sim_only, what, rule, out=out, listeners=[StopAfter(records)], **how)
        again = run(sim_only, what, rule, out=out, resume=True, **how)
        assert again.parameter_hash == whole.parameter_hash
        assert off(again, what, weigh) < 1e-12


class KillServer(ob.Listener):
    """Kills the server once, at a version."""

    def __init__(self) -> None:
        self.done = False

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version >= 5 and not self.done:
            self.done = True
            strike("server", signal.SIGKILL)


@pytest.mark.parametrize("shards", [1, 2])
def test_after_the_death_of_the_server(local_only, shards, tmp_path):
    what = problem(deep, samples=60)
    got = run(
        local_only, what, discipline(2, "dc(0.5)"), workers=3, shards=shards, optimizer=SGD,
        out=tmp_path / "run", checkpoint_every=2, listeners=[KillServer()],
    )  # fmt: skip
    assert off(got, what, "dc(0.5)") < 1e-12
    check_run(tmp_path / "run", what)


def test_a_run_of_old_goes_on_and_replays_as_it_began(sim_only, tmp_path, monkeypatch):
    what, rule = problem(deep, samples=40), discipline(3, "dc(0.5)")
    how: dict[str, Any] = {"cluster": TOGETHER, "optimizer": SGD, "checkpoint_every": 1}
    with monkeypatch.context() as before:
        before.setattr("offbeat.config.describe.NUMERICS", 1)
        whole = run(sim_only, what, rule, out=tmp_path / "whole", **how)
        with pytest.raises(Stop):
            run(sim_only, what, rule, out=tmp_path / "cut", listeners=[StopAfter(40)], **how)
    for name in ("whole", "cut"):  # where nothing was said of it
        file = tmp_path / name / "run.json"
        config = json.loads(file.read_text())
        assert config.pop("numerics") == 1
        sums = read_manifest(file.parent)
        file.write_text(json.dumps(config))
        sums.files[file.name] = checksum(file)
        sums.write(file.parent)
    assert off(whole, what, "dc(0.5)") > 1e-6
    again = run(sim_only, what, rule, out=tmp_path / "cut", resume=True, **how)
    assert again.parameter_hash == whole.parameter_hash
    check_run(tmp_path / "cut", what)
