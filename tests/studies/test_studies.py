"""Tiny versions of the studies: structure, determinism, and the one shape that is quick to see."""

import copy
import json
import math
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset
from typer import Typer
from typer.testing import CliRunner

import offbeat as ob
from offbeat.config.task import Task
from offbeat.recipes.common import from_seed
from offbeat.studies import STUDIES, dc_asgd, diloco, staleness, study, sync_switch
from offbeat.studies.__main__ import as_builtins, main
from offbeat.studies.common import (
    ACCURACY,
    LOSS,
    RATE,
    SECONDS,
    Method,
    MethodRow,
    Outcome,
    Result,
    StudyTask,
    digits_task,
    held_back,
    mnist_task,
    sgd,
    tensors,
    trial,
)


def tiny_task(seed: int) -> Task:
    """Two clouds of points, 48 to train and 24 to test, and a model of one layer."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(72) % 2
    points = torch.randn(72, 3, generator=generator) + labels[:, None]
    return Task(
        from_seed(seed, lambda: nn.Linear(3, 2)),
        TensorDataset(points[:48], labels[:48]),
        functional.cross_entropy,
        TensorDataset(points[48:], labels[48:]),
    )


TINY = StudyTask(tiny_task, epochs=2, seeds=(0, 1))
PLANS = {
    "staleness": lambda: staleness.study(
        staleness.StalenessPlan(TINY, rates=(0.01, 0.1), workers=4, batch_size=4)
    ),
    "sync-switch": lambda: sync_switch.study(
        sync_switch.SyncSwitchPlan(TINY, rates=(0.01, 0.1), shares=(0.5,), workers=3, batch_size=4)
    ),
    "dc-asgd": lambda: dc_asgd.study(
        dc_asgd.DCASGDPlan(TINY, rates=(0.01, 0.1), workers=(2,), batch_size=4)
    ),
    "diloco": lambda: diloco.study(
        diloco.DiLoCoPlan(
            TINY, rates=(0.01,), local_steps=(1, 3), averaged=3, workers=2, batch_size=4
        )
    ),
}
ROWS = {
    "staleness": [
        "one learner",
        "ASP, fixed rate",
        "ASP, rate / τ",
        "ASP, rate / 4",
        "SoftSync 2, fixed rate",
        "SoftSync 2, rate / τ",
    ],
    "sync-switch": ["BSP", "BSP 50 %, then ASP", "ASP", "ASP, rate of its own"],
    "dc-asgd": [
        "sequential",
        *(
            f"{name}, 2 workers{rate}"
            for name in ("SSGD", "ASGD", "DC-ASGD-c", "DC-ASGD-a")
            for rate in ("", ", sequential's rate")
        ),
    ],
    "diloco": ["data-parallel", "DiLoCo, H = 1", "DiLoCo, H = 3", "averaging, H = 3"],
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_its_rows_and_repeats_itself(name: str) -> None:
    result = PLANS[name]()
    assert list(dict.fromkeys(row.method for row in result.rows)) == ROWS[name]
    assert result.study == name
    for row in result.rows:
        assert len(row.outcomes) == len(result.seeds) == 2
        assert 0 <= row.accuracy <= 1
        assert row.mean("seconds") > 0
    assert PLANS[name]() == result


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_shows_each_row(name: str) -> None:
    result = PLANS[name]()
    shown = STUDIES[name].show(result)
    assert shown.row_count == len(result.rows)
    assert len(shown.columns) >= 4


def test_each_study_says_what_it_tries_in_one_sentence() -> None:
    for one in STUDIES.values():
        assert one.about.endswith(".")
        assert one.about.count(". ") == 0


def test_an_unknown_study_names_the_known_ones() -> None:
    with pytest.raises(ob.ConfigError, match="staleness, sync-switch, dc-asgd, diloco"):
        study("stalness")


# ---------------------------------------------------------------- what the studies share


def method(rate: float, workers: int = 2) -> Method:
    return Method("m", ob.ASP(), ob.Cluster.equal(workers), 4, sgd(rate))


def test_a_rate_is_chosen_on_held_back_data_and_other_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int, int]] = []

    def fake(task: Task, tried: Method, epochs: int, seed: int) -> Outcome:
        seen.append((seed, len(tensors(task.data)[0]), len(tensors(task.test)[0])))
        rate = tried.optimizer([torch.zeros(1)]).param_groups[0]["lr"]
        return Outcome({0.1: 0.9, 0.2: 0.95, 0.4: 0.945, 0.8: 0.2}[rate], 1.0)

    monkeypatch.setattr("offbeat.studies.common.trial", fake)
    rates = (0.1, 0.2, 0.4, 0.8)
    assert TINY.choose(method, rates)[0] == 0.2
    assert seen == [(100, 38, 10)] * 4
    assert TINY.choose(method, rates, margin=0.01)[0] == 0.4
    assert TINY.tuned(method, rates).sweep == {"0.1": 0.9, "0.2": 0.95, "0.4": 0.945, "0.8": 0.2}


def test_equal_accuracies_are_told_apart_by_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([0.5, 0.4, None])
    monkeypatch.setattr("offbeat.studies.common.trial", lambda *_: Outcome(0.5, next(losses)))
    assert TINY.choose(method, (0.1, 0.2, 0.4))[0] == 0.2


def test_held_back_data_is_a_fifth_of_the_training_data_and_no_test_data() -> None:
    task = tiny_task(0)
    part = held_back(task)

    def points(data: object) -> set[tuple[float, ...]]:
        return {tuple(point.tolist()) for point in tensors(data)[0]}

    assert points(part.data) | points(part.test) == points(task.data)
    assert not points(part.data) & points(part.test)
    assert len(points(part.test)) == 10


def test_a_run_that_ends_in_infinities_scores_as_a_guess() -> None:
    class Exploding(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 1e30

    task = replace(tiny_task(0), model=Exploding(3, 2))
    result = trial(task, method(1e30), epochs=2, seed=0)
    assert result == Outcome(0.5, None)


def test_other_errors_of_a_run_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise ob.RunError("the disk is full")

    monkeypatch.setattr("offbeat.studies.common.train", failing)
    with pytest.raises(ob.RunError, match="disk"):
        trial(tiny_task(0), method(0.1), epochs=1, seed=0)


def test_mean_and_spread_of_a_row() -> None:
    ended = Outcome(0.9, 1.0, seconds=2.0, updates=5)
    row = MethodRow("m", 0.1, [ended, Outcome(0.7, None)])
    assert row.accuracy == pytest.approx(0.8)
    assert row.spread == pytest.approx(math.sqrt(0.02))
    assert row.loss is None
    assert row.mean("seconds") == 2.0
    assert MethodRow("m", 0.1, [ended]).spread == 0.0


def test_a_row_without_a_finished_run_has_no_times() -> None:
    row = MethodRow("m", 0.1, [Outcome(0.1, None)])
    assert math.isnan(row.mean("seconds"))
    shown = dict(zip(("rate", "s", "accuracy", "loss"), cells(row), strict=True))
    assert shown == {"rate": "0.1", "s": "–", "accuracy": "10.00 ± 0.00", "loss": "not finite"}


def cells(row: MethodRow) -> list[str]:
    return [show(row) for _, show in (RATE, SECONDS, ACCURACY, LOSS)]


def test_a_missing_row_is_named() -> None:
    with pytest.raises(ob.ConfigError, match="no row 'b'; there are a"):
        Result("s", "", [0], [MethodRow("a", 0.1, [])]).row("b")


def test_the_digits_are_centred_by_the_training_images() -> None:
    images, _ = tensors(digits_task(0).data)
    assert images.mean(0).abs().max() < 1e-5
    assert not torch.equal(
        next(digits_task(0).model.parameters()), next(digits_task(1).model.parameters())
    )


def test_mnist_needs_its_folder() -> None:
    with pytest.raises(ob.ConfigError, match="is not a folder"):
        mnist_task("nowhere")


# ---------------------------------------------------------------- one by one


def test_a_share_must_end_with_an_epoch() -> None:
    assert sync_switch.phases(16, 0.125) == (2, 14)
    for share in (0.1, 0.0, 1.0):
        with pytest.raises(ob.ConfigError, match="not a whole number of epochs"):
            sync_switch.phases(16, share)


def test_a_switch_keeps_parameters_and_momentum(tmp_path: Path) -> None:
    plan = sync_switch.SyncSwitchPlan(TINY, rates=(0.1,), shares=(0.5,), workers=3, batch_size=4)
    task = tiny_task(0)
    both = sync_switch.switched(plan, task, 0.5, 0.1, 0)
    first = ob.train(
        copy.deepcopy(task.model), task.data, task.loss, discipline="bsp", optimizer=sgd(0.3, 0.9),
        cluster=plan.cluster, batch_size=4, epochs=1, out=tmp_path / "a",
    )  # fmt: skip
    second = {}
    for name, momentum in (("kept", 0.9), ("none", 0.0)):
        told = pytest.warns(RuntimeWarning, match=r"momentum was 0\.9 and is 0\.0")
        with nullcontext() if momentum else told:
            run = ob.train(
                copy.deepcopy(task.model), task.data, task.loss, discipline="asp",
                optimizer=sgd(0.1, momentum), cluster=plan.cluster, batch_size=4, epochs=1,
                test=task.test, seed=sync_switch.SECOND_PHASE, start=tmp_path / "a",
            )  # fmt: skip
        second[name] = run.summary()
    assert both.loss == second["kept"].loss != second["none"].loss
    assert both.seconds == first.summary().seconds + second["kept"].seconds


def test_no_compensation_is_plain_asgd() -> None:
    plan = dc_asgd.DCASGDPlan(TINY, rates=(0.1,), workers=(3,), batch_size=4)
    plain = plan.method("m", ob.ASP(), 0.1, 3)
    zero = plan.method("m", ob.ASP(ob.DelayCompensation(0.0)), 0.1, 3)
    strong = plan.method("m", ob.ASP(ob.DelayCompensation(50.0)), 0.1, 3)
    assert TINY.measure(plain, 0.1) == TINY.measure(zero, 0.1) != TINY.measure(strong, 0.1)


def test_every_method_is_another_one() -> None:
    weighed = PLANS["staleness"]()
    losses = [row.loss for row in weighed.rows if row.method in ROWS["staleness"][1:4]]
    assert len(set(losses)) == len(losses) == 3
    compensated = PLANS["dc-asgd"]()
    rows = [compensated.row(f"{name}, 2 workers, sequential's rate") for name in dc_asgd.METHODS]
    assert len({row.loss for row in rows}) == len(rows) == 4
    assert [row.mean("staleness") > 0 for row in rows] == [False, True, True, True]


def test_diloco_equals_averaging_and_sends_less() -> None:
    result = PLANS["diloco"]()
    assert result.checks == {diloco.EQUAL: True}
    often, seldom = (result.row(f"DiLoCo, H = {h}").mean("bytes_sent") for h in (1, 3))
    assert often == result.row("data-parallel").mean("bytes_sent")
    assert often == pytest.approx(3 * seldom)


def test_stale_gradients_fail_at_one_learners_rate_unless_weighed() -> None:
    plan = staleness.digits_plan()
    task = digits_task(0)

    def accuracy(discipline: ob.Discipline, workers: int) -> float:
        tried = plan.method("m", discipline, 0.1, workers)
        return trial(task, tried, epochs=6, seed=0).accuracy

    alone = accuracy(ob.BSP(), 1)
    assert alone > 0.95
    assert accuracy(ob.ASP(), 30) < 0.3
    assert accuracy(ob.ASP(ob.Inverse()), 30) > alone - 0.03


# ---------------------------------------------------------------- the command

APP = Typer(add_completion=False)
APP.command()(main)


@pytest.fixture
def tiny_diloco(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(STUDIES["diloco"], run=lambda folder: PLANS["diloco"]())
    monkeypatch.setitem(STUDIES, "diloco", one)


@pytest.mark.usefixtures("tiny_diloco")
def test_the_command_prints_a_table_and_the_sweep() -> None:
    said = CliRunner().invoke(APP, ["diloco"])
    assert said.exit_code == 0
    assert "DiLoCo, H = 3" in said.output
    assert "rates tried for data-parallel" in said.output
    assert f"{diloco.EQUAL}: yes" in said.output


@pytest.mark.usefixtures("tiny_diloco")
def test_the_command_prints_json() -> None:
    said = CliRunner().invoke(APP, ["diloco", "--json"])
    assert json.loads(said.output) == json.loads(json.dumps(as_builtins(PLANS["diloco"]())))
    assert "spread" in json.loads(said.output)["rows"][0]


def test_the_command_without_a_name_lists_the_studies() -> None:
    assert set(json.loads(CliRunner().invoke(APP, ["--json"]).output)) == set(STUDIES)
    assert "sync-switch" in CliRunner().invoke(APP, []).output


def test_the_command_refuses_what_it_does_not_know() -> None:
    said = CliRunner().invoke(APP, ["nothing"])
    assert said.exit_code == 2
    assert "there is no study 'nothing'" in said.output


def test_the_package_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offbeat.studies", "--json"], capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "staleness" in json.loads(done.stdout)
