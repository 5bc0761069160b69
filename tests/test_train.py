"""The front door: mistakes are found before anything is written, and bad numbers are handled."""

import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import offbeat as ob
from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.folder.checkpoint import RunFolder
from offbeat.folder.tensors import load_tensors
from offbeat.log import log
from offbeat.log.records import Entry, Evaluated, Updated
from offbeat.report.tables import figures

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 3, generator=GENERATOR), torch.arange(24) % 2
DATA = TensorDataset(X, Y)
SGD = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def train(**changes: Any) -> ob.Run:
    """A small run that works, but for what is changed."""
    settings: dict[str, Any] = {
        "model": net(), "data": DATA, "loss": F.cross_entropy, "optimizer": SGD, "workers": 3,
        "batch_size": 4, "epochs": 2, "shuffle": False,
    }  # fmt: skip
    settings |= changes
    return ob.train(**settings)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty dataset": ({"data": TensorDataset(X[:0], Y[:0])}, "the dataset is empty"),
    "batch larger than data": (
        {"batch_size": 25}, "a batch of 25 is larger than the dataset of 24 samples"),
    "accumulated batch larger than data": (
        {"batch_size": 8, "accumulate": 4}, "a batch of 32 is larger than the dataset of 24"),
    "no workers": ({"workers": 0}, "workers must be a whole number of at least 1, not 0"),
    "negative workers": ({"workers": -2}, "workers must be a whole number of at least 1, not -2"),
    "half workers": ({"workers": 1.5}, r"workers must be a whole number of at least 1, not 1\.5"),
    "no epochs": ({"epochs": 0}, "epochs must be a whole number of at least 1, not 0"),
    "negative epochs": ({"epochs": -1}, "epochs must be .* at least 1, not -1"),
    "half an epoch": ({"epochs": 0.5}, r"epochs must be a whole number .* not 0\.5"),
    "no batch": ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
    "negative batch": ({"batch_size": -4}, "batch_size must be .* at least 1, not -4"),
    "negative seed": ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
    "more than the workers": (
        {"discipline": "soft:4"}, "cannot gather 4 contributions from 3 workers"),
    "all backup": ({"discipline": "bsp:backup=3"}, "backup=3 leaves nobody .* backup=2 or less"),
    "unknown discipline": ({"discipline": "sspp:3"}, r"unknown discipline 'sspp' \(did you mean"),
    "no discipline": ({"discipline": 3}, "a discipline is a value like"),
    "unknown weigh": ({"discipline": "asp:weigh=old"}, "unknown weigh 'old'.* there are constant"),
    "unknown codec": ({"codec": "topkk:0.1"}, r"unknown codec 'topkk:0\.1' \(did you mean 'topk'"),
    "unknown option": ({"clipp": None}, r"unknown option 'clipp' \(did you mean 'clip'\?\); there"),
    "unknown engine": ({"engine": "simm"}, "unknown engine 'simm'.*'sim'"),
    "nothing to train": (
        {"model": nn.Linear(3, 2).requires_grad_(False)}, "the model has no trainable parameter"),
    "no model": ({"model": "net"}, r"model must be a torch\.nn\.Module, not str"),
    "loss of many numbers": (
        {"loss": partial(F.cross_entropy, reduction="none")}, "the loss must be one number"),
    "wrong output": (
        {"model": nn.Linear(3, 2), "loss": F.l1_loss, "data": TensorDataset(X, X)},
        "does not fit the loss with targets of"),
    "wrong input": ({"model": nn.Linear(4, 2)}, "the model does not take inputs of shape"),
    "an optimiser": (
        {"optimizer": torch.optim.Adam(net().parameters())},
        r"pass a factory such as partial\(torch\.optim\.Adam, lr=\.\.\.\), not an optimiser"),
    "two rules": ({"discipline": "asup"}, "asup brings its own rule, so optimizer= would be ign"),
    "no rule": ({"optimizer": None}, "bsp applies your optimiser: pass optimizer=partial"),
    "no local rule": (
        {"discipline": "local:4", "optimizer": None}, "local:4 makes local steps: pass optimizer="),
    "a stream": ({"data": Stream()}, "the stream Stream does not say how many samples"),
    "hogwild": (
        {"discipline": "hogwild", "engine": "sim"}, "hogwild writes shared memory in place"),
    "hogwild without a rule": (
        {"discipline": "hogwild", "optimizer": None}, "hogwild .*"),
    "other number of workers": (
        {"cluster": "20ms,20ms"}, "workers=3, but the cluster describes 2: leave workers out"),
    "too many shards": ({"shards": 9}, "9 shards for 2 tensors: use between 1 and 2 shards"),
    "no shards": ({"shards": 0}, "shards must be a whole number of at least 1"),
    "no parts": ({"accumulate": 0}, "accumulate must be a whole number of at least 1"),
    "wrong nonfinite": ({"nonfinite": "ignore"}, "nonfinite must be 'stop' or 'skip'"),
    "hash never": ({"hash_every": 0}, "hash_every must be a whole number of at least 1"),
    "test never": ({"evaluate_every": 0}, "evaluate_every must be a whole number of at least 1"),
    "save never": ({"checkpoint_every": 0}, "checkpoint_every must be a whole number"),
    "empty test set": ({"test": TensorDataset(X[:0], Y[:0])}, "the test set is empty"),
    "policy of nothing": ({"policies": {"running_*": "local"}}, "the model has no tensor of that"),
    "plateau": (
        {"schedule": ob.Schedule(torch.optim.lr_scheduler.ReduceLROnPlateau)}, "needs a metric"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_found_before_anything_is_written(case: str, tmp_path: Path) -> None:
    changes, says = BAD[case]
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=says):
        train(out=out, **changes)
    assert not out.exists()


def test_an_existing_folder_is_left_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(out=out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="exists and is not empty: pass resume=True"):
        train(out=out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_resume_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match="resume=True needs out="):
        train(resume=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"epochs": 3}, "epochs is 3 here and 2 in the run"),
     ({"optimizer": MOMENTUM}, r"optimizer is torch\.optim\.SGD\(lr=0\.1, momentum=0\.9\) here"),
     ({"seed": 1}, "seed is 1 here and 0 in the run"),
     ({"model": nn.Linear(3, 2, bias=False)}, r"the model has nothing where the run has bias \(2,"),
     ({"discipline": "asp"}, "discipline is asp here and bsp in the run")],
)  # fmt: skip
def test_another_run_cannot_be_resumed(changes: Any, says: str, tmp_path: Path) -> None:
    train(out=tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"is another run: {says}"):
        train(out=tmp_path / "run", resume=True, **changes)


def test_beginning_with_another_model_names_the_tensor(tmp_path: Path) -> None:
    train(out=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match=r"is of another model: 'parameters/weight' is \(2, 3"
    ):
        train(model=nn.Linear(3, 3), start=tmp_path / "run")
    with pytest.raises(CheckpointError, match="has no checkpoint to begin with"):
        train(start=tmp_path / "nothing")


def test_beginning_with_an_earlier_run_goes_on_from_its_parameters(tmp_path: Path) -> None:
    first = train(out=tmp_path / "run")
    second = train(start=tmp_path / "run", optimizer=partial(torch.optim.SGD, lr=0.0))
    assert second.parameter_hash == first.parameter_hash


def test_beginning_with_another_rule(tmp_path: Path) -> None:
    train(out=tmp_path / "run", optimizer=MOMENTUM)
    for kind in (torch.optim.Adam, torch.optim.Adagrad):
        with pytest.warns(
            RuntimeWarning, match=f"that rule was SGD and this one is {kind.__name__}"
        ):
            train(start=tmp_path / "run", optimizer=partial(kind, lr=0.01))


# ---------------------------------------------------------------- what a run leaves


def test_the_users_model_is_trained_and_random_numbers_are_not_touched() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    memory = [p.data_ptr() for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    run = ob.train(model, DATA, F.cross_entropy, optimizer=SGD, workers=2, batch_size=4)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index, union-attr]
    assert not any(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True]
    assert run.model is model
    assert [p.data_ptr() for p in model.parameters()] == memory


def test_a_run_folder_holds_log_model_and_summary(tmp_path: Path) -> None:
    run = train(out=tmp_path / "run", test=DATA)
    folder = RunFolder(tmp_path / "run")
    assert run.folder == folder.path
    saved = load_tensors(folder.model_file)
    assert all(torch.equal(saved[n], t) for n, t in run.model.state_dict().items())
    updates = [record for record in log.read(folder.log_file) if isinstance(record, Updated)]
    assert updates[-1].hash == run.parameter_hash
    assert len(updates) == run.summary().updates == len(run.history.steps)
    assert folder.summary_file.exists()
    assert run.history.tests[-1].accuracy == run.summary().accuracy


def test_local_rules_with_state_made_at_construction() -> None:
    """Adagrad makes its state when it is made; a reset at a sync must not take it away."""
    run = train(discipline="bmuf:2", optimizer=partial(torch.optim.Adagrad, lr=0.1))
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_shard_whose_parameters_get_no_gradient() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    model = Branch()
    run = train(model=model, shards=ob.ByCount(2))
    assert torch.equal(run.model.unused.weight, model.unused.weight)  # type: ignore[union-attr, arg-type]


# ---------------------------------------------------------------- numbers that are none

BROKEN = X.clone()
BROKEN[13] = torch.nan
POISON = TensorDataset(BROKEN, Y)


def test_a_loss_that_is_no_number_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError) as caught:
        train(data=POISON, out=out, discipline="asp", checkpoint_every=1, engine="sim")
    says = str(caught.value)
    assert "the loss is nan at worker 0, version" in says
    assert "epoch 0, samples 12 to 15" in says
    loaded = RunFolder(out).load()
    assert loaded is not None
    tensors, meta = loaded
    assert meta["store"]["version"] >= 1
    assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())
    assert [record for record in log.read(RunFolder(out).log_file)]  # noqa: C416


def test_a_loss_that_is_no_number_in_a_worker_process_stops_the_run() -> None:
    says = r"the loss is nan at worker \d, .*epoch \d, samples 12 to 15"
    with pytest.raises(RunError, match=says):
        train(data=POISON, discipline="asp", engine="local")


def test_parameters_that_blow_up_are_never_saved(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError, match="the loss is"):
        train(loss=F.mse_loss, data=TensorDataset(X, X[:, :2]), out=out, checkpoint_every=1,
              engine="sim",
              optimizer=partial(torch.optim.SGD, lr=1e12), epochs=20)  # fmt: skip
    loaded = RunFolder(out).load()
    assert loaded is not None
    weights = [t for name, t in loaded[0].items() if name.startswith("store/parameters")]
    assert weights
    assert all(torch.isfinite(t).all() for t in weights)


class Watch(ob.Listener):
    def __init__(self) -> None:
        self.skipped: list[tuple[int, int]] = []

    def see(self, record: Entry) -> None:
        if isinstance(record, Updated):
            for part in record.parts:
                if part.skipped:
                    self.skipped += [(lease.epoch, lease.start) for lease in part.leases]


@pytest.mark.parametrize(
    ("discipline", "rest"),
    [("bsp", {}), ("bsp:backup=1", {}), ("ssp:0", {}), ("ssp:2", {}), ("asp", {}), ("soft:2", {}),
     ("asp:weigh=dc", {}), ("asp:weigh=gap", {}), ("asup", {"optimizer": None}),
     ("asp", {"codec": "topk:0.5"}), ("asp", {"codec": "int8"}), ("bsp", {"clip": ob.Clip(1.0)}),
     ("local:1", {}), ("local:1", {"optimizer": MOMENTUM}), ("average:1", {"optimizer": MOMENTUM}),
     ("easgd:1", {})],
)  # fmt: skip
def test_skip_leaves_out_the_bad_contribution_and_nothing_else(
    discipline: str, rest: dict[str, Any]
) -> None:
    watch = Watch()
    run = train(data=POISON, discipline=discipline, nonfinite="skip", listeners=[watch], **rest)
    made = run.summary()
    if discipline == "bsp:backup=1":
        assert set(watch.skipped) <= {(0, 12), (1, 12)}
    else:
        assert sorted(watch.skipped) == [(0, 12), (1, 12)]  # free workers may come in any order
        assert made.skipped == 2
        assert [epoch["skipped"] for epoch in made.ledger] == [4, 4]
        assert [epoch["applied"] for epoch in made.ledger] == [20, 20]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())
    assert made.train_loss is not None
    assert np.isfinite(made.train_loss)


def test_skip_keeps_statistics_finite() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    run = train(model=model, data=POISON, discipline="asp", nonfinite="skip", test=DATA)
    assert all(torch.isfinite(t.double()).all() for t in run.model.state_dict().values())
    assert run.summary().loss is not None
    assert np.isfinite(run.summary().loss)


def test_a_run_with_skipped_contributions_can_be_read_again(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(data=POISON, out=out, nonfinite="skip", discipline="asp")
    records = list(log.read(RunFolder(out).log_file))
    assert sum(p.skipped for r in records if isinstance(r, Updated) for p in r.parts) == 2


def test_a_gradient_that_is_no_number_is_not_applied_in_silence() -> None:
    """The loss is fine, its gradient is not: √ at 0."""
    data = TensorDataset(torch.zeros(4, 3), torch.zeros(4))
    model = nn.Linear(3, 1, bias=False)
    loss = ob.BatchLoss(lambda m, batch: m(batch[0]).abs().sqrt().mean())
    with pytest.raises(RunError, match="worker 0, version 0"):
        train(model=model, data=data, loss=loss, workers=1, epochs=1)


# ---------------------------------------------------------------- a metric of one's own


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_metric_is_taken_at_every_test(engine: str, tmp_path: Path) -> None:
    def spread(model: nn.Module, test: Any) -> float:
        return float(model(test.tensors[0]).std())

    metric = ob.Metric("spread", spread, higher_is_better=False)
    found = train(engine=engine, test=DATA, metric=metric, out=tmp_path / "run")
    tests = [r for r in log.read(tmp_path / "run" / "log.jsonl") if isinstance(r, Evaluated)]
    # Real processes leave a test out while the tester is still busy with the one before.
    assert len(tests) == 2 if engine == "sim" else 1 <= len(tests) <= 2
    assert [t.metric for t in tests] == [t.metric for t in found.history.tests]
    assert found.summary().metric == tests[-1].metric is not None
    with torch.no_grad():
        assert tests[-1].metric == spread(found.model.eval(), DATA)
    assert RunFolder(tmp_path / "run").config()["metric"] == {"name": "spread", "higher": False}
    assert repr(found).startswith(f"<Run: bsp on 3 workers, {found.summary().updates} updates in ")
    assert len(repr(found)) < 300


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_several_metrics_are_in_log_summary_and_folder(engine: str, tmp_path: Path) -> None:
    def top(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(outputs.max())

    metric = {"top": top, "perplexity": "perplexity"}
    found = train(engine=engine, test=DataLoader(DATA, 4), metric=metric, out=tmp_path / "run")
    tests = [r for r in log.read(tmp_path / "run" / "log.jsonl") if isinstance(r, Evaluated)]
    with torch.no_grad():
        assert tests[-1].metric == top(found.model.eval()(DATA.tensors[0]), DATA.tensors[1])
    summary = found.summary()
    assert summary.metrics == tests[-1].metrics == {"perplexity": math.exp(summary.loss)}
    config = RunFolder(tmp_path / "run").config()
    assert config["metric"] == {"name": "top", "higher": True}
    assert config["metrics"] == [{"name": "perplexity", "higher": False}]
    rows = dict(figures(summary))
    assert rows["top"].endswith("on the test set")
    assert rows["perplexity"] == f"{summary.metrics['perplexity']:.4g} on the test set"


@pytest.mark.parametrize("engine", ["sim", "local"])
def test_a_metric_that_is_no_number_is_named(engine: str) -> None:
    metric = ob.Metric("scores", lambda model, test: model(test.tensors[0]))
    with pytest.raises(RunError, match="the metric scores returned Tensor: return one number"):
        train(engine=engine, test=DATA, metric=metric)
