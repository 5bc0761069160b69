"""MLflow with a real store of files; Weights & Biases with a stand-in that records its calls."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import offbeat as ob
from offbeat.track import tracker
from tests.track.common import StopAt, small_run


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow itself, which asks to be allowed files, and which is to call nobody from a test."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return pytest.importorskip("mlflow")


def only_run(mlflow: Any, uri: str, experiment: str = "offbeat") -> tuple[Any, Any]:
    client = mlflow.MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name(experiment).experiment_id
    (run,) = client.search_runs([number])
    return client, run


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_mlflow_has_parameters_curves_and_summary(engine: str, mlflow: Any, tmp_path: Path) -> None:
    place = tmp_path / "mlruns"
    tracking = ob.track.MLflow(
        uri=place, name="slow third", params={"lr": 0.01, "net": {"kind": "linear"}}, every=1
    )
    run = small_run(tracking, engine=engine)
    client, found = only_run(mlflow, place.as_uri())
    assert (found.info.run_name, found.info.status) == ("slow third", "FINISHED")
    assert {"lr": "0.01", "net.kind": "linear", "workers": "3"}.items() <= found.data.params.items()
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [metric.value for metric in losses] == [step.loss for step in run.history.steps]
    assert [metric.step for metric in losses] == [4 * n for n in range(1, 25)]
    seconds = (losses[-1].timestamp - losses[0].timestamp) / 1000
    steps = run.history.steps
    assert seconds == pytest.approx(steps[-1].time - steps[0].time, abs=0.01)
    tests = client.get_metric_history(found.info.run_id, "test/loss")
    assert [metric.value for metric in tests] == [test.loss for test in run.history.tests]
    final = found.data.metrics
    assert final["final/samples"] == 96
    assert final["final/staleness_mean"] == run.summary().staleness_mean
    assert final["final/wait_share"] == run.summary().wait_share


def test_mlflow_has_one_run_per_training_in_an_experiment(mlflow: Any, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    for _ in range(2):
        small_run(ob.track.MLflow("mine", uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    number = client.get_experiment_by_name("mine").experiment_id
    assert len(client.search_runs([number])) == 2
    assert mlflow.active_run() is None


def test_mlflow_says_that_a_run_was_stopped(mlflow: Any, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    with pytest.raises(RuntimeError):
        small_run(ob.track.MLflow(uri=uri), StopAt(5, RuntimeError("on purpose")))
    _, found = only_run(mlflow, uri)
    assert found.info.status == "KILLED"


def test_mlflow_that_refuses_is_told_before_the_run(mlflow: Any, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    with pytest.raises(ob.ConfigError, match="MLflow refuses to begin a run"):
        small_run(ob.track.MLflow("", uri=uri))


def test_mlflow_that_fails_later_does_not_end_the_run(mlflow: Any, tmp_path: Path) -> None:
    class Away(ob.track.MLflow):
        def put(self, values: dict[str, float], when: float, samples: int) -> None:
            if samples >= 8:
                raise ConnectionError("nobody answers")
            super().put(values, when, samples)

    uri = (tmp_path / "mlruns").as_uri()
    with pytest.warns(RuntimeWarning, match="nobody answers"):
        run = small_run(Away(uri=uri, every=1))
    assert run.summary().samples == 96


@pytest.mark.parametrize(
    ("make", "name", "remedy"),
    [
        (ob.track.MLflow, "mlflow", r"pip install offbeat\[mlflow\]"),
        (ob.track.WandB, "wandb", "pip install wandb"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(
    make: Any, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ob.ConfigError, match=remedy):
        make()


class FakeRun:
    """What `wandb.init` gives, as far as it is used."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.summary: dict[str, float] = {}
        self.codes: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        assert not self.codes, "it is finished"
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    fake = SimpleNamespace(asked=[], run=FakeRun())

    def init(**options: Any) -> FakeRun:
        fake.asked.append(options)
        return fake.run  # type: ignore[no-any-return]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_is_told_config_curves_and_summary(wandb: Any) -> None:
    run = small_run(ob.track.WandB("mine", name="a", params={"lr": 0.01}, mode="offline", every=1))
    (asked,) = wandb.asked
    config = asked.pop("config")
    assert asked == {"project": "mine", "name": "a", "mode": "offline"}
    assert {"workers": 3, "lr": 0.01}.items() <= config.items()
    assert wandb.run.axes == [("samples", None), ("*", "samples")]
    losses = [row for row in wandb.run.logged if "train/loss" in row]
    assert [row["train/loss"] for row in losses] == [step.loss for step in run.history.steps]
    assert [row["samples"] for row in losses] == [4 * n for n in range(1, 25)]
    assert [row["time"] for row in losses] == pytest.approx(
        [step.time for step in run.history.steps], abs=1e-5
    )
    assert wandb.run.summary["final/samples"] == 96
    assert wandb.run.codes == [0]


def test_wandb_hears_of_a_failure(wandb: Any) -> None:
    with pytest.raises(RuntimeError):
        small_run(ob.track.WandB(), StopAt(5, RuntimeError("on purpose")))
    assert wandb.run.codes == [1]


def test_settings_become_one_level_of_texts() -> None:
    assert tracker.flat({"a": {"b": {"c": 1}}, "d": None}) == {"a.b.c": "1", "d": "None"}
