"""Comparisons that are run: what they are judged by, their figures, and what is kept."""

import csv
import io
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from offbeat.compare import (
    Comparison,
    RealSpeeds,
    Simulated,
    compare,
)
from offbeat.compare.place import ComparisonFolder
from offbeat.compare.results import results_table
from offbeat.config.task import Metric, Task
from offbeat.errors import CheckpointError, ConfigError
from offbeat.log.log import Listener
from offbeat.log.records import Entry
from offbeat.model.objective import BatchLoss
from offbeat.report.tables import console
from offbeat.report.verdict import verdict
from tests.compare.common import SAMPLES, Seen, plan, task

# ---------------------------------------------------------------- what runs are judged by


def regression(**more: Any) -> Task:
    """Training to be found, with a batch that only a BatchLoss understands."""
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(7))
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = nn.Linear(5, 1)
    return Task(model, data, BatchLoss(loss), data, partial(torch.optim.SGD, lr=0.05), **more)


def test_without_class_scores_runs_are_compared_on_the_test_loss(tmp_path: Path) -> None:
    done = compare(regression(), plan(target=2.0), tmp_path / "grid")
    assert done.results["score"] == {"name": "loss", "higher_is_better": False}
    assert (done.results["target"], done.results["target_given"]) == (2.0, True)
    for cell, row in zip(done.grid.cells, done.results["cells"], strict=True):
        assert cell.digest is not None
        assert row["seconds_to_target"] == cell.digest.time_to(2.0, "loss")
        assert row["seconds_to_target"] is not None
    screen = io.StringIO()
    console(screen).print(results_table(done.grid))
    assert "s to" in screen.getvalue()
    assert "a test loss of 2" in verdict(done.grid).headline
    never = compare(regression(), plan(target=1e-9), tmp_path / "grid")
    assert (
        verdict(never.grid).headline == "No discipline reached a test loss of 1e-09 on 2 devices."
    )
    assert verdict(never.grid).winner is None


@pytest.mark.parametrize("higher", [True, False])
def test_a_metric_of_ones_own_is_what_runs_are_compared_on(higher: bool, tmp_path: Path) -> None:
    def distance(model: nn.Module, test: Any) -> Tensor:
        assert not model.training
        assert not torch.is_grad_enabled()
        x, y = test.tensors
        off = (model(x) - y).abs().mean()
        return -off if higher else off

    metric = Metric("distance", distance, higher_is_better=higher)
    aim = -1.0 if higher else 1.0
    done = compare(regression(metric=metric), plan(target=aim), tmp_path / "grid")
    assert done.results["score"] == {"name": "distance", "higher_is_better": higher}
    found = [row["metric"] for row in done.results["cells"]]
    assert all((value > 0) != higher for value in found)
    times = [row["seconds_to_target"] for row in done.results["cells"]]
    assert all(time is not None for time in times)
    other = Metric("closeness", distance, higher_is_better=higher)
    with pytest.raises(CheckpointError, match="metric is closeness here and distance"):
        compare(regression(metric=other), plan(target=aim), tmp_path / "grid")


def test_a_target_without_a_test_set_is_refused_before_any_run(tmp_path: Path) -> None:
    blind = replace(regression(), test=None)
    with pytest.raises(
        ConfigError, match=r"the task has none: return offbeat.Task\(..., test=...\)"
    ):
        compare(blind, plan(target=0.9), tmp_path / "grid")
    with pytest.raises(ConfigError, match="a loss on the test set here, so 90% means nothing"):
        compare(regression(), plan(target="90%"), tmp_path / "grid")
    with pytest.raises(ConfigError, match=r"an accuracy here: write 90% or 0\.9"):
        compare(task(), plan(target=90.0), tmp_path / "grid")
    assert not (tmp_path / "grid").exists()


def test_a_task_with_a_loader_and_several_metrics(tmp_path: Path) -> None:
    def top(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.max()

    own = task()
    assert own.test is not None
    sampler = SubsetRandomSampler(range(48))
    own = replace(
        own, data=DataLoader(own.data, 12, sampler=sampler), test=DataLoader(own.test, 8),
        metric=[Metric("top", top, higher_is_better=False, on="outputs"), "perplexity"],
    )  # fmt: skip
    found = plan(batch_size=None, devices=(2,), sync=("bsp",), target=9.0)
    done = compare(own, found, tmp_path / "grid")
    assert done.plan.batch_size == 12
    assert done.results["score"] == {"name": "top", "higher_is_better": False}
    digest = done.grid.digests()[0]
    assert digest.summary.ledger[0]["applied"] == 48
    assert digest.summary.metrics.keys() == {"perplexity"}
    assert done.results["cells"][0]["seconds_to_target"] is not None


def test_the_batch_size_of_the_task_is_honoured(tmp_path: Path) -> None:
    own = replace(task(), batch_size=12)
    done = compare(own, plan(batch_size=None, devices=(2,), sync=("bsp",)), tmp_path / "grid")
    assert done.plan.batch_size == 12
    assert done.grid.digests()[0].batch_size == 12
    small = compare(own, plan(batch_size=None, devices=(16,), sync=("bsp",)), tmp_path / "small")
    assert small.plan.batch_size == SAMPLES // 16


# ---------------------------------------------------------------- figures against raw logs


def recounted(folder: Path, target: float | None) -> dict[str, Any]:
    """The figures of a run from its log, with nothing of offbeat's."""
    workers = json.loads((folder / "run.json").read_text())["workers"]
    spent = [
        {"compute": 0.0, "wait": 0.0, "communication": 0.0, "samples": 0} for _ in range(workers)
    ]
    stale: list[int] = []
    updates = samples = sent = 0
    seconds = 0.0
    tests: list[tuple[float, float]] = []
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        seconds = max(seconds, record["time"])
        parts = record["parts"] if record["kind"] == "update" else []
        if record["kind"] == "drop":
            parts = [record["part"]]
        updates += record["kind"] == "update"
        for part in parts:
            for name in ("compute", "wait", "communication", "samples"):
                spent[part["worker"]][name] += part.get(name, 0.0)
            sent += part.get("bytes", 0)
            if record["kind"] == "update":
                stale.append(part.get("staleness", 0))
                samples += part["samples"]
        if record["kind"] == "rest":
            for name in ("wait", "communication"):
                spent[record["worker"]][name] += record.get(name, 0.0)
        if record["kind"] == "test":
            tests.append((record["time"], record["accuracy"]))
    busy = sum(w["compute"] + w["wait"] + w["communication"] for w in spent)
    ideal = sum(w["samples"] / w["compute"] for w in spent if w["compute"])
    return {
        "seconds": seconds,
        "updates": updates,
        "samples": samples,
        "samples_per_second": samples / seconds,
        "accuracy": tests[-1][1],
        "best_accuracy": max(accuracy for _, accuracy in tests),
        "staleness_mean": sum(stale) / len(stale),
        "staleness_max": max(stale),
        "wait_share": sum(w["wait"] for w in spent) / busy,
        "communication_seconds": sum(w["communication"] for w in spent) / workers,
        "compute_seconds": sum(w["compute"] for w in spent) / workers,
        "bytes_sent": sent,
        "ideal_samples_per_second": ideal,
        "efficiency": samples / seconds / ideal,
        "seconds_to_target": next(
            (t for t, a in tests if target is not None and a >= target), None
        ),
    }


def agrees(out: Path) -> dict[str, Any]:
    """results.json and results.csv say what the logs of their cells say."""
    results: dict[str, Any] = json.loads((out / "results.json").read_text())
    with open(out / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results["cells"])
    rates = {}
    for cell, row in zip(results["cells"], rows, strict=True):
        assert row["discipline"] == cell["discipline"]
        if cell["state"] != "finished":
            assert row["samples_per_second"] == ""
            continue
        found = recounted(out / cell["folder"], results["target"])
        rates[cell["discipline"], cell["devices"], cell["repeat"]] = found["samples_per_second"]
        for name, value in found.items():
            assert cell[name] == (value if value is None else pytest.approx(value)), (name, cell)
            shown = float(row[name]) if row[name] else None
            assert shown == (value if value is None else pytest.approx(value)), (name, row)
    for cell in results["cells"]:
        if cell["state"] == "finished" and (cell["discipline"], 1, 0) in rates:
            alone = [r for (name, n, _), r in rates.items() if (name, n) == (cell["discipline"], 1)]
            mean = sum(alone) / len(alone)
            assert cell["speedup"] == pytest.approx(cell["samples_per_second"] / mean)
    return results


def test_simulated_figures_agree_with_the_logs(tmp_path: Path) -> None:
    many = plan(sync=("bsp", "ssp:1", "asp", "soft:2", "local:4", "bsp:backup=1"), repeat=2)
    done = compare(task, many, tmp_path / "out")
    results = agrees(tmp_path / "out")
    assert results == json.loads(json.dumps(done.results))
    states = [cell["state"] for cell in results["cells"]]
    assert states.count("finished") == 20
    assert {c["discipline"] for c in results["cells"] if c["state"] == "impossible"} == {
        "soft:2",
        "bsp:backup=1",
    }
    assert not done.failed
    best = [c["best_accuracy"] for c in results["cells"] if c["state"] == "finished"]
    assert results["target"] <= min(b for b in best if b >= 0.8 * max(best))
    finished = [c for c in results["cells"] if c["state"] == "finished"]
    assert any(c["seconds_to_target"] is not None for c in finished)
    # The slow last worker: lock-step goes at its pace, and free-running does not.
    speed = {(c["discipline"], c["devices"]): c["samples_per_second"] for c in finished}
    assert speed["bsp", 2] < speed["bsp", 1] < speed["asp", 2]


def test_real_figures_agree_with_the_logs(tmp_path: Path) -> None:
    real = plan(on=RealSpeeds("1ms", straggler=2), epochs=1, evaluate_every=48, target=0.5)
    compare(task(), real, tmp_path / "out")
    results = agrees(tmp_path / "out")
    assert [cell["state"] for cell in results["cells"]] == ["finished"] * 4
    assert (results["target"], results["target_given"], results["virtual"]) == (0.5, True, False)
    emulated = json.loads((tmp_path / "out/cells/asp-on2/run.json").read_text())["emulate"]
    assert emulated == [0.001, 0.002]


def test_a_repeat_has_the_next_seed_and_its_own_weights(tmp_path: Path) -> None:
    seeds: list[int] = []

    def make(seed: int) -> Task:
        seeds.append(seed)
        return task(seed)

    compare(make, plan(sync=("asp",), devices=(2,), repeat=3, seed=5), tmp_path / "out")
    assert seeds == [5, 6, 7, 5]
    cells = json.loads((tmp_path / "out/results.json").read_text())["cells"]
    assert [cell["seed"] for cell in cells] == [5, 6, 7]
    assert len({cell["parameter_hash"] for cell in cells}) == 3


def test_the_table_fits_in_eighty_columns(tmp_path: Path) -> None:
    done = compare(task, plan(sync=("bsp", "soft:2", "asp:weigh=inverse")), tmp_path / "out")
    text = shown(done)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "not possible" in text
    assert "asp:weigh=inverse" in text
    rate = done.results["cells"][0]["samples_per_second"]
    assert f"{rate:,.0f}" in text


def shown(done: Comparison) -> str:
    file = io.StringIO()
    console(file).print(results_table(done.grid))
    return file.getvalue()


# ---------------------------------------------------------------- what is kept


def test_nothing_is_run_twice_and_a_grid_may_grow(tmp_path: Path) -> None:
    first, second, third = Seen(), Seen(), Seen()
    before = compare(task, plan(), tmp_path / "out", [first])
    assert first.run == ["bsp-on1", "bsp-on2", "asp-on1", "asp-on2"]
    again = compare(task, plan(), tmp_path / "out", [second])
    assert (second.run, second.kept) == ([], 4)
    assert again.results == before.results
    compare(task, plan(sync=("asp", "ssp:1"), devices=(2,), repeat=2), tmp_path / "out", [third])
    assert third.run == ["ssp_1-on2", "asp-on2-again1", "ssp_1-on2-again1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 4}, "epochs is 4 here and 3 in that folder"),
        ({"batch_size": 4}, "batch_size is 4 here and 8 in that folder"),
        ({"seed": 1}, "seed is 1 here and 0 in that folder"),
        ({"on": Simulated("normal:20ms,4ms")}, "straggler is 1.0 here and 4 in that folder"),
        ({"on": RealSpeeds()}, "engine is local here and sim in that folder"),
        ({"on": Simulated("30ms", 4)}, "of bsp on 1 device, cluster is"),
        ({"rates": {"asp": 0.5}}, "of asp on 1 device, optimizer is torch.optim.SGD(lr=0.5) here"),
    ],
)
def test_other_settings_in_the_same_folder(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    compare(task, plan(), tmp_path / "out")
    seen = Seen()
    with pytest.raises(CheckpointError) as refused:
        compare(task, plan(**changes), tmp_path / "out", [seen])
    assert words in str(refused.value)
    assert "use the same settings to go on with it, or name another folder" in str(refused.value)
    assert not seen.run


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no comparison"):
        compare(task, plan(), tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        compare(task, plan(), tmp_path / "thesis.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_two_comparisons_do_not_share_a_folder(tmp_path: Path) -> None:
    code = (
        "from offbeat.compare.place import ComparisonFolder\n"
        "with ComparisonFolder(OUT).held(): pass"
    )
    with ComparisonFolder(tmp_path / "out").held():
        other = subprocess.run(
            [sys.executable, "-c", code.replace("OUT", repr(str(tmp_path / "out")))],
            capture_output=True,
            text=True,
        )
    assert "another comparison is running" in other.stderr
    with ComparisonFolder(tmp_path / "out").held():
        pass


class Interrupting(Listener):
    """Ctrl-C at the first record of the n-th run."""

    def __init__(self, at: int):
        self.left = at

    def begin(self, store: Any, samples: int) -> None:
        self.left -= 1

    def see(self, record: Entry) -> None:
        if self.left == 0:
            raise KeyboardInterrupt


def test_interrupted_it_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        compare(task, plan(), tmp_path / "out", [Interrupting(2)])
    assert sorted(p.name for p in (tmp_path / "out/cells").iterdir()) == [".bsp-on2", "bsp-on1"]
    seen = Seen()
    done = compare(task, plan(), tmp_path / "out", [seen])
    assert (seen.run, seen.kept) == (["bsp-on2", "asp-on1", "asp-on2"], 1)
    assert done.results["cells"] == compare(task, plan(), tmp_path / "new").results["cells"]


def test_a_failing_cell_is_told_and_tried_again(tmp_path: Path) -> None:
    broken, calls = True, 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += len(seen.run) == 3
        if (
            broken and len(seen.run) == 3 and calls == 20
        ):  # well within the run, which has a folder by then
            raise OSError("the disk is gone\nfor good")
        return nn.functional.cross_entropy(output, target)

    seen = Seen()
    done = compare(partial(task, loss=loss), plan(), tmp_path / "out", [seen])
    assert seen.run == ["bsp-on1", "bsp-on2", "asp-on1", "asp-on2"]
    (reason,) = done.failed.values()
    assert "the disk is gone" in reason
    assert "\n" not in reason
    cells = {(c["discipline"], c["devices"]): c for c in agrees(tmp_path / "out")["cells"]}
    assert cells["asp", 1]["state"] == "failed"
    assert cells["asp", 1]["error"] == reason
    assert cells["asp", 2]["state"] == "finished"
    assert "failed" in shown(done)
    told = json.loads((tmp_path / "out/cells/asp-on1/failed.json").read_text())
    assert "Traceback" in told["trace"]
    assert (tmp_path / "out/cells/asp-on1/log.jsonl").stat().st_size > 0
    broken = False
    again = Seen()
    done = compare(partial(task, loss=loss), plan(), tmp_path / "out", [again])
    assert again.run == ["asp-on1"]
    assert not done.failed
    assert agrees(tmp_path / "out")["cells"][2]["state"] == "finished"
