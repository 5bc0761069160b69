"""Comparisons: what is read, refused and kept, and that the figures agree with the logs."""

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.compare import (
    Comparison,
    ComparisonPlan,
    Point,
    RealSpeeds,
    Simulated,
    Watcher,
    compare,
)
from offbeat.compare import display as display_module
from offbeat.compare.display import Display, Estimate, in_words
from offbeat.compare.place import ComparisonFolder
from offbeat.compare.results import results_table
from offbeat.compare.spell import read_devices, read_disciplines, read_rates
from offbeat.config.task import Metric, Task
from offbeat.discipline.named import ROWS
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import CheckpointError, ConfigError
from offbeat.log.log import Listener
from offbeat.log.records import Entry
from offbeat.model.objective import BatchLoss
from offbeat.report.summary import Summary
from offbeat.report.tables import console
from offbeat.report.verdict import verdict

SAMPLES = 96


def task(seed: int = 0, loss: Callable[..., Tensor] = nn.functional.cross_entropy) -> Task:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Linear(5, 2)
    return Task(model, data, loss, data, partial(torch.optim.SGD, lr=0.2))


def plan(**changes: Any) -> ComparisonPlan:
    settings: dict[str, Any] = {
        "sync": ("bsp", "asp"),
        "devices": (1, 2),
        "on": Simulated("normal:20ms,4ms", straggler=4),
        "batch_size": 8,
        "epochs": 3,
    }
    return ComparisonPlan(**settings | changes)


class Seen(Watcher):
    """Which cells were run, and what came of each."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.kept = 0
        self.failed: dict[str, str] = {}

    def planned(self, work: Any, kept: int) -> None:
        self.kept = kept

    def starts(self, point: Point) -> None:
        self.run.append(point.name)

    def ends(self, point: Point, summary: Summary | None, failed: str = "") -> None:
        if summary is None:
            self.failed[point.name] = failed


# ---------------------------------------------------------------- lists as text


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (["bsp,ssp:3,asp,local:16,asup"], ["bsp", "ssp:3", "asp", "local:16", "asup"]),
        (["fedbuff:2,2,asp"], ["fedbuff:2,2", "asp"]),
        (["asup:lr=0.002,momentum=0.5,bsp"], ["asup:lr=0.002,momentum=0.5", "bsp"]),
        (["local:4,keep,asp"], ["local:4,keep", "asp"]),
        (["local:4,reset,average:4"], ["local:4,reset", "average:4"]),
        (["asp", "ssp:1 , bsp,"], ["asp", "ssp:1", "bsp"]),
        (["ssp:1,weigh=inverse,bsp"], ["ssp:1,weigh=inverse", "bsp"]),
        (
            ["custom:send=gradient,gather=count(2),wait=3,asp"],
            ["custom:send=gradient,gather=count(2),wait=3", "asp"],
        ),
    ],
)
def test_lists_of_disciplines(texts: list[str], found: list[str]) -> None:
    assert list(read_disciplines(texts)) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bsp,sp:3", "unknown discipline 'sp' (did you mean 'ssp'?)"),
        ("bsp,aps", "unknown discipline 'aps' (did you mean 'asp'?)"),
        ("ssp:3,aps", "unknown discipline 'aps' (did you mean 'asp'?)"),
        ("ssp:3,bsp,ssp:slack=3", "ssp:slack=3 is listed twice"),
        ("asup:lr=fast,momentum=0.9", "lr must be a number"),
        ("2,asp", "unknown discipline '2'"),
        (" , ", "there is no discipline to compare"),
    ],
)
def test_mistakes_in_a_list_of_disciplines(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_disciplines([text])
    assert words in str(refused.value)


@given(st.lists(st.sampled_from([n for n in ROWS if n not in ("soft", "ssp")]), unique=True))
def test_a_list_of_names_is_these_names(names: list[str]) -> None:
    if names:
        assert [one.partition(":")[0] for one in read_disciplines([",".join(names)])] == names


def test_rates_and_devices_as_text() -> None:
    assert read_rates(["0.1", "asp=0.05", "asp:weigh=inverse=0.2"]) == {
        "": 0.1,
        "asp": 0.05,
        "asp:weigh=inverse": 0.2,
    }
    assert read_devices("1, 8") == (1, 8)
    for read in (
        partial(read_rates, ["fast"]),
        partial(read_rates, ["0.1", "0.2"]),
        partial(read_devices, "1,two"),
    ):
        with pytest.raises(ConfigError):
            read()


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": (0, 1)}, "devices must be a whole number of at least 1, not 0"),
        ({"devices": (1, 1)}, "different numbers"),
        ({"devices": ()}, "different numbers"),
        ({"repeat": 0}, "repeat"),
        ({"epochs": 0}, "epochs"),
        ({"target": "most"}, "a number such as 90%, 0.9 or 0.35"),
        ({"target": float("nan")}, "a number such as"),
        ({"sync": ("soft:4",)}, "cannot gather 4 contributions from 2 workers: use 2 or less"),
        ({"sync": ("hogwild",)}, "hogwild"),
        ({"rates": {"local": 0.1}}, "not compared: write one of bsp, asp"),
        ({"rates": {"": -1.0}}, "above 0"),
        ({"sync": ("asup",), "rates": {"asup": 0.1}}, "--sync 'asup:lr=0.1'"),
        ({"on": Simulated("20ms,20ms,20ms")}, "describes 3 workers and the most devices are 2"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"straggler": 4}, "add --emulate 20ms"),
        ({"emulate": "20ms", "straggler": 0.5}, "at least 1 times slower"),
        ({"emulate": "fast"}, "no duration"),
    ],
)
def test_speeds_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RealSpeeds(**settings)
    assert words in str(refused.value)


def test_emulated_speeds_of_fewer_devices() -> None:
    assert RealSpeeds("20ms", 4).steps(1) == [0.02]
    assert RealSpeeds("20ms", 4).steps(3) == [0.02, 0.02, 0.08]
    assert RealSpeeds("10ms,20ms,30ms").steps(2) == [0.01, 0.02]
    assert RealSpeeds().steps(2) is None
    with pytest.raises(ConfigError, match="has 3 times and the most devices are 4"):
        RealSpeeds("10ms,20ms,30ms").check(4)


def test_simulated_speeds_of_fewer_devices() -> None:
    cluster = Cluster.parse("10ms,20ms,30ms")
    assert Simulated(cluster).of(2) == Cluster.parse("10ms,20ms")
    assert Simulated(cluster, 3).of(2) == Cluster.parse("10ms,60ms")
    assert Simulated(cluster, 3).of(1) == Cluster.parse("10ms")
    assert Simulated().of(4) == Cluster.equal(4)
    assert Simulated("20ms", 4).of(3) == Cluster.with_straggler(3)


def test_no_two_cells_share_a_folder() -> None:
    names = (
        *("asp", "asp:weigh=inverse", "asp:weigh=polynomial(0.5)", "fedbuff:2,every=2"),
        *("fedbuff:2", "local:4", "local:4,state=reset", "bsp:backup=1", "x/../y", "x_.._y"),
        *("custom:" + "a" * 300, "custom:" + "a" * 301),
    )
    points = [
        Point(name, devices, again) for name in names for devices in (1, 11) for again in (0, 1)
    ]
    folders = {point.name for point in points}
    assert len(folders) == len(points)
    assert all("/" not in name and len(name) < 200 and name[0] != "." for name in folders)


def test_what_is_left_out_is_chosen_for_the_data() -> None:
    usual = ComparisonPlan(devices=(1, 8)).fitted(1437, 128)
    assert (usual.batch_size, usual.epochs, usual.evaluate_every) == (128, 45, 1437)
    large = ComparisonPlan(devices=(1, 8)).fitted(60_000, 64)
    assert (large.batch_size, large.epochs, large.evaluate_every) == (64, 1, 6_000)
    assert ComparisonPlan(devices=(1, 8)).fitted(64, 128).batch_size == 8
    with pytest.raises(ConfigError, match="batch size of 8 or less, or use fewer devices"):
        ComparisonPlan(devices=(1, 8), batch_size=128).fitted(64, 32)
    with pytest.raises(ConfigError, match="there are 3: use fewer devices"):
        ComparisonPlan(devices=(4,)).fitted(3, 32)


def test_rates_of_a_plan() -> None:
    found = plan(sync=("bsp", "asp", "ssp:3", "asup"), rates={"": 0.3, "asp": 0.1, "ssp:3": 0.2})
    rates = {name: found.optimizer(task(), name) for name in found.sync}
    settings = {name: one and one.keywords["lr"] for name, one in rates.items()}  # type: ignore[attr-defined]
    assert settings == {"bsp": 0.3, "asp": 0.1, "ssp:3": 0.2, "asup": None}
    own = task()
    assert plan().optimizer(own, "bsp") is own.optimizer
    closed = Task(nn.Linear(1, 1), task().data, nn.functional.mse_loss, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match="cannot reach into the task's optimizer"):
        found.optimizer(closed, "bsp")


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


# ---------------------------------------------------------------- time left, and showing it


def test_the_estimate_scales_by_work() -> None:
    points = [Point("bsp", n) for n in (1, 2, 4)]
    estimate = Estimate({points[0]: 4.0, points[1]: 2.0, points[2]: 1.0})
    assert estimate.left() is None
    assert estimate.left(points[0], 0.5, 10.0) == pytest.approx(25.0)
    estimate.ended(points[0], 20.0)
    assert estimate.left() == pytest.approx(15.0)
    assert estimate.left(points[1], 0.5, 10.0) == pytest.approx(12.0)
    estimate.ended(points[1], 20.0)
    estimate.ended(points[2], 1.0)
    assert estimate.left() == 0.0


def test_slow_workers_count_in_the_estimate() -> None:
    slow = RealSpeeds("20ms", straggler=4)
    assert slow.work("bsp", 4) == pytest.approx(0.08 / 4)
    assert slow.work("asp", 4) == pytest.approx(1 / (3 / 0.02 + 1 / 0.08))
    assert RealSpeeds().work("bsp", 1) == 1
    assert Simulated().work("bsp", 8) == Simulated().work("bsp", 1)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (41.4, "41 s"), (59.4, "59 s"), (100, "2 min"), (7800, "2 h 10 min")],
)
def test_time_left_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now


def watched(monkeypatch: pytest.MonkeyPatch, file: io.StringIO, out: Path) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(display_module, "time", Clock())
    monkeypatch.setattr("offbeat.report.live.time", Clock())
    with Display(file, virtual=True) as display:
        compare(task, plan(sync=("bsp", "soft:2")), out, [display])
    return file.getvalue()


def test_elsewhere_than_in_a_terminal_a_line_tells_of_each_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = watched(monkeypatch, io.StringIO(), tmp_path / "out").splitlines()
    ends = [line for line in lines if " samples/virtual s, " in line]
    assert [line.split(": ")[0] for line in ends] == [
        "1/3 bsp on 1 device",
        "2/3 bsp on 2 devices",
        "3/3 soft:2 on 2 devices",
    ]
    assert all("left" in line for line in ends[:-1])
    assert "left" not in ends[-1]
    assert watched(monkeypatch, io.StringIO(), tmp_path / "out") == (
        "3 of 3 cells are there already\n"
    )


def test_in_a_terminal_bars_show_the_grid_and_its_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = watched(monkeypatch, Terminal(), tmp_path / "out")
    for words in ("comparison", "bsp on 2 devices", "1/3", "left", "samples per virtual s"):
        assert words in text
    assert "\x1b[?25l" not in text.replace("\x1b[?25l\x1b[?25h", "")
