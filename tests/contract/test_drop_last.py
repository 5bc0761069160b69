"""What makes no whole batch at the end of an epoch: left out on request, refused where it kills."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import offbeat as ob
from offbeat.compare import ComparisonPlan, Simulated, compare
from offbeat.errors import CheckpointError, ConfigError
from offbeat.report.digest import digest
from offbeat.report.tables import ledger_line
from tests.contract.common import SGD, Records, Stop, StopAfter, problem, run
from tests.engine.local.test_scripts import SCRIPT, offbeat

LEFT = {"repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def ledger(applied: int, left_out: int, epochs: int = 2) -> list[dict[str, int]]:
    return [{"applied": applied, "left_out": left_out, **LEFT}] * epochs


@pytest.mark.parametrize(
    ("name", "settings", "applied"),
    [
        ("bsp", {}, 24),
        ("asp", {"accumulate": 2}, 24),
        ("local:2", {"batch_size": 5}, 25),
        ("bsp", {"layout": "pp=2,microbatches=2"}, 24),
    ],
)
def test_an_epoch_ends_with_its_last_whole_batch(
    engine: str, name: str, settings: dict[str, Any], applied: int, tmp_path: Path
) -> None:
    what = problem(normed, samples=27)
    out = tmp_path / "run"
    done = run(engine, what, name, workers=2, out=out, drop_last=True, **settings)
    assert done.summary().ledger == ledger(applied, 27 - applied)
    assert f"{2 * (27 - applied)} left out" in ledger_line(done.summary().ledger)
    assert json.loads((out / "run.json").read_text())["drop_last"] is True
    assert digest(out).summary.ledger == done.summary().ledger
    assert ob.replay(out, *what).check().compared == done.summary().updates


def test_other_samples_are_left_out_in_every_epoch() -> None:
    seen: list[set[float]] = []
    what = problem(samples=6)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(set(batch[0][:, 0].tolist()))
        return F.mse_loss(model(batch[0]), batch[1])

    what = what._replace(loss=ob.BatchLoss(loss))
    run("sim", what, "bsp", workers=1, epochs=6, drop_last=True)
    assert {len(one) for one in seen} == {4}
    assert len(set.union(*seen[1:])) == 6  # after the trial


def test_nothing_is_left_out_where_all_batches_are_whole(engine: str) -> None:
    done = run(engine, problem(samples=24), "bsp", workers=2, drop_last=True)
    assert done.summary().ledger == [{"applied": 24, **LEFT}] * 2


def test_a_run_goes_on_as_it_began(engine: str, tmp_path: Path) -> None:
    what, out = problem(samples=27), tmp_path / "run"
    common: dict[str, Any] = {"workers": 2, "out": out, "epochs": 3, "checkpoint_every": 2}
    with pytest.raises((KeyboardInterrupt, Stop)):
        run(engine, what, "bsp", drop_last=True, listeners=[StopAfter(3)], **common)
    with pytest.raises(CheckpointError, match="drop_last is False here and True in the run"):
        run(engine, what, "bsp", resume=True, **common)
    done = run(engine, what, "bsp", resume=True, drop_last=True, **common)
    assert done.summary().ledger == ledger(24, 3, epochs=3)
    assert ob.replay(out, *what).check().compared == done.summary().updates


def test_folders_of_before_are_gone_on_with(tmp_path: Path) -> None:
    what, out = problem(samples=27), tmp_path / "run"
    common: dict[str, Any] = {"workers": 2, "out": out, "checkpoint_every": 2}
    with pytest.raises((KeyboardInterrupt, Stop)):
        run("sim", what, "bsp", listeners=[StopAfter(3)], **common)
    config = json.loads((out / "run.json").read_text())
    del config["drop_last"], config["run"]  # as a folder of before, which has no checksums
    (out / "manifest.json").unlink()
    (out / "run.json").write_text(json.dumps(config))
    done = run("sim", what, "bsp", resume=True, **common)
    assert done.summary().ledger == [{"applied": 27, **LEFT}] * 2
    assert ob.replay(out, *what).check().compared == done.summary().updates
    assert digest(out).summary.ledger == done.summary().ledger


# ---------------------------------------------------------------- refused before the first step


@pytest.mark.parametrize(
    ("samples", "settings"),
    [
        (25, {}),
        (27, {"accumulate": 2}),  # in parts of 2 and 1
        (25, {"layout": "pp=2,microbatches=2"}),
        (26, {"layout": "pp=2,microbatches=2"}),
    ],
)
def test_one_sample_alone_is_refused_where_batch_norm_refuses_it(
    engine: str, samples: int, settings: dict[str, Any]
) -> None:
    what, seen = problem(normed, samples=samples), Records()
    before = {k: v.clone() for k, v in what.model.state_dict().items()}
    with pytest.raises(ConfigError, match="write drop_last=True to leave such samples out"):
        run(engine, what, "bsp", workers=2, listeners=[seen], **settings)
    assert not seen.all
    assert all(torch.equal(v, before[k]) for k, v in what.model.state_dict().items())
    done = run(engine, what, "bsp", workers=2, drop_last=True, **settings)
    assert done.summary().ledger[0]["left_out"] > 0


def test_it_is_not_refused_where_it_does_no_harm() -> None:
    plain = problem(samples=25)
    assert run("sim", plain, "bsp", workers=2).summary().ledger[0]["applied"] == 25
    # Three numbers of a channel in one sample.
    inner = (nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1), nn.Flatten())
    what = problem(lambda: nn.Sequential(*inner, nn.Linear(3, 2)), samples=25)
    assert run("sim", what, "bsp", workers=2).summary().ledger[0]["applied"] == 25


def test_a_model_that_has_no_copy_is_tried_too() -> None:
    what = problem(normed, samples=25)
    what.model.handle = (number for number in range(3))
    with pytest.raises(ConfigError, match="last batch of every epoch has one sample"):
        ob.train(*what, discipline="bsp", optimizer=SGD, engine="sim", workers=2, batch_size=4)
    assert all(module.training for module in what.model.modules())
    assert what.model[1].num_batches_tracked == 0


@pytest.mark.parametrize("split", ["count", "time"])
@pytest.mark.parametrize("engine", ["sim", "local"])
def test_microbatches_of_one_sample_are_refused(engine: str, split: str) -> None:
    how = {"layout": f"pp=2,microbatches=4,split={split}", "workers": 1}
    with pytest.raises(ConfigError, match="write fewer microbatches, or a larger batch_size"):
        run(engine, problem(normed, samples=24), "bsp", batch_size=4, **how)


@pytest.mark.parametrize("value", [1, "yes"])
def test_drop_last_is_true_or_false(value: Any) -> None:
    with pytest.raises(ConfigError, match="drop_last must be True or False"):
        ob.train(*problem(), discipline="bsp", optimizer=SGD, engine="sim", drop_last=value)


# ---------------------------------------------------------------- scripts and the command line


@pytest.mark.parametrize("words", [("--engine", "sim"), ("-n", "2")])
def test_a_script_says_it_to_batches(words: tuple[str, ...], tmp_path: Path) -> None:
    path, out = tmp_path / "train.py", tmp_path / "run"
    text = SCRIPT.replace("HERE", "pass").replace("AFTER", "").replace("randn(48", "randn(49")
    text = text.replace(
        "Linear(3, 2)", "Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))"
    )
    path.write_text(text)
    refused = offbeat("run", *words, path)
    assert refused.returncode == 2
    assert "write drop_last=True" in refused.stderr
    path.write_text(text.replace("epochs=2", "epochs=2, drop_last=True"))
    done = offbeat("run", *words, "--out", out, path)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "summary.json").read_text())["ledger"] == ledger(48, 1)
    again = offbeat("run", "--replay", out, path)
    assert "identical at all" in again.stdout, again.stderr


def test_the_command_line_leaves_out_too(tmp_path: Path) -> None:
    words = ("simulate", "--recipe", "digits", "--batch-size", 500, "--drop-last", "--json")
    done = offbeat(*words)
    assert done.returncode == 0, done.stderr
    (epoch,) = json.loads(done.stdout)["summary"]["ledger"]
    assert (epoch["applied"] % 500, epoch["left_out"] > 0) == (0, True)
    refused = offbeat("simulate", "--cost-only", "--drop-last")
    assert refused.returncode == 2
    assert "--drop-last has no effect with --cost-only" in refused.stderr


def test_a_comparison_leaves_out_too(tmp_path: Path) -> None:
    what = problem(normed, samples=25)
    task = ob.Task(what.model, what.data, what.loss, optimizer=SGD)
    plan = ComparisonPlan(["bsp"], [2], Simulated("20ms"), batch_size=4, drop_last=True, epochs=2)
    found = compare(task, plan, tmp_path / "grid")
    assert not found.failed
    folder = next((tmp_path / "grid").rglob("run.json"))
    assert json.loads(folder.read_text())["drop_last"] is True
