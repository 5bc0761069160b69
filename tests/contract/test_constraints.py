"""Constraints hold after every update, on every engine, and are logged, resumed and replayed."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.rules.constraint import parse
from tests.contract.common import MOMENTUM, assert_same_bits, plain, problem, run

BOX = ob.Clamp(-0.2, 0.15, "0.*")
ROWS = ob.MaxNorm(0.4, "2.weight")
BOTH = [BOX, ROWS]


def holds(model: nn.Module) -> bool:
    first: Any = model[0]  # type: ignore[index]
    last: Any = model[2]  # type: ignore[index]
    inside = all(bool(((p >= -0.2) & (p <= 0.15)).all()) for p in first.parameters())
    return inside and bool((last.weight.norm(dim=1) <= 0.4).all())


def clamped(what: Any, rule: Any, epochs: int = 2) -> nn.Module:
    """Plain PyTorch, with the limits put on after each step as a user would write them."""

    class Limited(rule.func):  # type: ignore[name-defined, misc]
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"][:2]:
                    parameter.clamp_(-0.2, 0.15)
                rows = self.param_groups[0]["params"][2]
                for row in rows:
                    if row.norm() > 0.4:
                        row.mul_(0.4 / (row.norm() + 1e-7))

    return plain(what, partial(Limited, **rule.keywords), epochs=epochs)


@pytest.mark.parametrize("engine", ["sim", "local"])
@pytest.mark.parametrize("discipline", ["bsp", "asp"])
def test_one_worker_is_plain_pytorch_with_a_clamp(engine: str, discipline: str) -> None:
    what = problem()
    found = run(engine, what, discipline, workers=1, optimizer=MOMENTUM, constrain=BOTH)
    assert_same_bits(found.model, clamped(what, MOMENTUM))
    assert holds(found.model)
    assert not holds(run(engine, what, discipline, workers=1, optimizer=MOMENTUM).model)


DISCIPLINES = ["bsp", "ssp:2", "asup", "local:2", "easgd:2", "bmuf:2", "diloco:2", "downpour:2,2"]


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_every_discipline_keeps_to_it_and_replays(tmp_path: Path, discipline: str) -> None:
    what = problem()
    found = run("sim", what, discipline, workers=3, constrain=BOTH, out=tmp_path / "run")
    assert holds(found.model)
    config = json.loads((tmp_path / "run" / "run.json").read_text())
    assert config["constrain"] == ["clamp(-0.2,0.15,0.*)", "maxnorm(0.4,dim=0,2.weight)"]
    assert ob.replay(tmp_path / "run", *what).identical  # what it says there is enough


@pytest.mark.parametrize(
    ("discipline", "options"),
    [
        ("ssp:2", {"shards": 3}),
        ("bsp", {"via": "allreduce"}),
        ("local:2", {"layout": "pp=2,microbatches=2,split=count"}),
        ("easgd:2", {}),
    ],
)
def test_every_process_keeps_to_it(
    tmp_path: Path, discipline: str, options: dict[str, Any]
) -> None:
    what = problem()
    out = tmp_path / "run"
    found = run("local", what, discipline, workers=2, constrain=BOTH, out=out, **options)
    assert holds(found.model)
    assert ob.replay(out, *what).identical


def test_lock_step_is_the_large_batch_with_a_clamp() -> None:
    what = problem()
    many = run("local", what, "bsp", workers=2, shards=2, constrain=BOTH)
    one = run("sim", what, "bsp", workers=1, batch_size=8, constrain=BOTH)
    for mine, theirs in zip(many.model.parameters(), one.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_another_constraint_is_another_run(tmp_path: Path) -> None:
    what = problem()
    run("sim", what, "bsp", workers=2, constrain=BOX, out=tmp_path / "run")
    with pytest.raises(ob.CheckpointError, match="constrain is None here and"):
        run("sim", what, "bsp", workers=2, out=tmp_path / "run", resume=True)
    with pytest.raises(ob.CheckpointError, match="cannot be replayed with this: constrain is None"):
        ob.replay(tmp_path / "run", *what, constrain=None)


LOOP = """
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(24, 3), torch.randn(24, 2))
with ob.join() as run:
    model = run.replica(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    limits = [ob.Clamp(-0.2, 0.15, "0.*"), ob.MaxNorm(0.4, "2.weight")]
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.3), constrain=limits)
    for x, y in run.batches(data, batch_size=4, epochs=2):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert bool((model[0].weight.abs() <= 0.2).all())
"""


def test_in_a_script(tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    path.write_text(LOOP)
    command = [sys.executable, "-m", "offbeat", "run", "-n", "2", "--sync", "local:2", "--out"]
    done = subprocess.run(
        [*command, str(out), str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert replay_script(Script(path), RunFolder(out)).identical
    assert holds(simulate_script(Script(path), ob.Cluster.equal(2), {}).model)


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"constrain": ob.Clamp(0, 1, "critic.*")}, "no trainable parameter 'critic"),
        ({"constrain": 0.01}, r"ob\.Clamp\(-0\.01, 0\.01, 'critic"),
        ({"constrain": "clip(1,2)"}, "is no constraint"),
        ({"constrain": BOX, "discipline": "gossip"}, "use asp or ssp"),
    ],
)
def test_what_cannot_hold_is_refused(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ob.ConfigError, match=remedy):
        run("sim", problem(), **{"discipline": "bsp", "workers": 2} | options)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_norm_that_forward_would_write_is_one_for_the_store(kind: Any) -> None:
    what = problem(lambda: nn.Sequential(kind(5, 3, max_norm=1.0), nn.Linear(3, 2)))
    with pytest.raises(ob.ConfigError, match=r'constrain=ob\.MaxNorm\(1, "0\.weight"\)'):
        run("sim", what, "bsp", workers=2)


def test_hogwild_is_refused() -> None:
    with pytest.raises(ob.ConfigError, match="workers change parameters by themselves"):
        run("local", problem(), "hogwild", workers=2, constrain=BOX)


def test_rows_that_are_split_have_no_norm() -> None:
    what = problem()
    what.model.layout_shards = {"0": "column", "2": "row"}  # type: ignore[assignment]
    with pytest.raises(ob.ConfigError, match=r"no process has a whole row: use ob\.Clamp"):
        run("local", what, "local:2", workers=1, constrain=ROWS, layout="tp=2")


@pytest.mark.parametrize(
    "value",
    [BOX, ROWS, ob.Clamp(0, float("inf")), ob.MaxNorm(2, dim=None), ob.MaxNorm(1.5, "a", dim=1)],
)
def test_the_text_is_read_back(value: Any) -> None:
    assert parse(str(value)) == value
    assert copy.copy(value) == value
    assert hash(parse(str(value))) == hash(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ob.Clamp(1, 0),
        lambda: ob.Clamp(float("nan"), 1),
        lambda: ob.Clamp(0, 1, ""),
        lambda: ob.MaxNorm(0),
        lambda: ob.MaxNorm(1, dim=-1),
        lambda: ob.MaxNorm(True),
        lambda: parse("clamp(1)"),
        lambda: parse("maxnorm(1,dim=x)"),
    ],
)
def test_mistakes(make: Any) -> None:
    with pytest.raises(ob.ConfigError):
        make()


def test_norms() -> None:
    whole, rows = torch.ones(2, 4), torch.ones(2, 4)
    ob.MaxNorm(1.0, dim=None).apply(whole)
    ob.MaxNorm(1.0).apply(rows)
    assert whole.norm().item() == pytest.approx(1.0)
    assert [row.norm().item() for row in rows] == pytest.approx([1.0, 1.0])
    bias, half = torch.ones(4), torch.ones(3, 3, dtype=torch.float16)
    ob.MaxNorm(1.0).apply(bias)
    ob.MaxNorm(1.0, dim=1).apply(half)
    assert bias.norm().item() == pytest.approx(1.0)
    assert half.float().norm(dim=0).tolist() == pytest.approx([1.0] * 3, abs=1e-3)
    inside = torch.full((2, 2), 0.1)
    ob.MaxNorm(1.0).apply(inside)
    assert torch.equal(inside, torch.full((2, 2), 0.1))
