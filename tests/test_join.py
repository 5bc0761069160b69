"""A script's own loop, alone: the bits of plain PyTorch, and mistakes that name their remedy."""

import copy
import random
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offbeat as ob
from offbeat.engine.hosts.torchrun import HostsTorchrun
from offbeat.engine.script_hosts import TorchrunHost
from offbeat.folder.checkpoint import RunFolder
from offbeat.join import Member, join
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.contract.common import (
    MOMENTUM,
    Problem,
    assert_close,
    assert_same_bits,
    mlp,
    named,
    optimizer_for,
    plain,
    problem,
)
from tests.contract.test_one_worker import CHANGES, GRADIENTS, OPTIMIZERS, Frozen, Normed, Unused

SGD = partial(torch.optim.SGD, lr=0.1)


def alone(
    what: Problem,
    discipline: Any = "bsp",
    rule: Any = MOMENTUM,
    epochs: int = 2,
    stop_at: int | None = None,
    record: bool = False,
    **more: Any,
) -> tuple[nn.Module, Member]:
    """The loop of a script; `more` goes to optimizer or to join."""
    mine = {key: more.pop(key) for key in ("schedule", "clip", "groups") if key in more}
    model = copy.deepcopy(what.model)
    with join(discipline=discipline, **more) as run:
        assert run.replica(model) is model
        optimizer = run.optimizer(rule, **mine)
        for index, (x, y) in enumerate(run.batches(what.data, batch_size=4, epochs=epochs)):
            if index == stop_at:
                raise KeyboardInterrupt
            loss = what.loss(model(x), y)
            loss.backward()
            if record:
                run.record(loss)
            optimizer.step()
            optimizer.zero_grad()
    return model, run


# ---------------------------------------------------------------- the bits


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("make", [Normed, Unused, Frozen])
def test_gradient_disciplines_are_plain_pytorch(name: str, make: Any) -> None:
    what = problem(make, samples=22)
    for rule in OPTIMIZERS.values():
        model, _ = alone(what, GRADIENTS[name], rule, seed=5)
        assert_same_bits(model, plain(what, rule, seed=5))


@pytest.mark.parametrize("name", CHANGES)
def test_change_disciplines_are_plain_pytorch_to_rounding(name: str) -> None:
    what = problem(Unused, samples=22)
    for rule in OPTIMIZERS.values():
        assert_close(alone(what, CHANGES[name], rule)[0], plain(what, rule))


@pytest.mark.parametrize("name", named(1))
def test_every_discipline_is_what_a_function_trains(name: str) -> None:
    what, discipline = problem(Normed, samples=23), named(1)[name]
    rule = optimizer_for(discipline)
    same = ob.train(
        copy.deepcopy(what.model), what.data, what.loss, discipline=discipline, optimizer=rule,
        workers=1, batch_size=4, epochs=2, engine="sim",
    )  # fmt: skip
    model, run = alone(what, discipline, rule or SGD)
    assert_same_bits(model, same.model)
    assert run.version == same.summary().updates


def test_hogwild_alone_is_plain_pytorch() -> None:
    what = problem()
    assert_same_bits(alone(what, "hogwild", MOMENTUM)[0], plain(what, MOMENTUM))


def test_schedule_clip_and_groups() -> None:
    what = problem(samples=23)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

    def groups(model: Any) -> list[dict[str, Any]]:
        return [
            {"params": list(model[2].parameters()), "lr": 0.2},
            {"params": list(model[0].parameters())},
        ]

    model, _ = alone(
        what, epochs=3, schedule=ob.Schedule(halve), clip=ob.Clip(norm=0.3), groups=groups
    )
    same = plain(what, MOMENTUM, epochs=3, schedule=halve, clip=0.3, groups=groups)
    assert_same_bits(model, same)


def test_the_script_decides_which_modules_train() -> None:
    what = problem(Normed)
    model = copy.deepcopy(what.model).eval()
    with join() as run:
        run.replica(model)
        optimizer = run.optimizer(SGD)
        for x, y in run.batches(what.data, batch_size=4):
            what.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert int(model[1].num_batches_tracked) == 0


# ---------------------------------------------------------------- what the script sees


def test_epoch_version_rank_and_workers() -> None:
    what = problem(samples=8)
    model = copy.deepcopy(what.model)
    seen = []
    with join() as run:
        run.replica(model)
        optimizer = run.optimizer(SGD)
        assert (run.rank, run.workers, run.version, run.epoch) == (0, 1, 0, 0)
        for x, y in run.batches(what.data, batch_size=4, epochs=2):
            before = run.version
            what.loss(model(x), y).backward()
            optimizer.step()
            seen.append((run.epoch, before, run.version))
            optimizer.zero_grad()
    assert seen == [(0, 0, 1), (0, 1, 2), (1, 2, 3), (1, 3, 4)]


def test_after_a_step_the_model_holds_it() -> None:
    what = problem()
    model, other = copy.deepcopy(what.model), copy.deepcopy(what.model)
    rule = SGD(other.parameters())
    with join() as run:
        run.replica(model)
        optimizer = run.optimizer(SGD)
        for x, y in run.batches(what.data, batch_size=4):
            for net in (model, other):
                what.loss(net(x), y).backward()
            optimizer.step()
            rule.step()
            assert_same_bits(model, other)
            assert model[0].weight.grad is not None
            optimizer.zero_grad()
            rule.zero_grad()
            assert model[0].weight.grad is None


class Noisy(Dataset[Any]):
    """Draws from all three sources of chance."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])


def children() -> list[str]:
    """The names of the processes below this one."""
    of = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [Path(f"/proc/{pid}/comm").read_text() for pid in of]


def draws(disturb: int, readers: int = 0) -> list[Any]:
    torch.manual_seed(disturb)
    random.seed(disturb)
    np.random.seed(disturb)
    model, found = nn.Linear(3, 1), []
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=readers)
    with join(seed=3) as run:
        run.replica(model)
        optimizer = run.optimizer(SGD)
        for x in run.batches(loader):
            model(x).sum().backward()
            optimizer.step()
            found.append((x, torch.rand(2), random.random(), np.random.rand()))
    return found


def assert_same_draws(mine: list[Any], others: list[Any]) -> None:
    for one, other in zip(mine, others, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert one[2:] == other[2:]


def test_chance_depends_on_the_seed_and_the_samples_alone() -> None:
    assert_same_draws(draws(1), draws(2))


def test_a_script_alone_has_readers_too_and_they_change_no_chance() -> None:
    assert_same_draws(draws(1), draws(1, readers=2))
    assert not [child for child in children() if "offbeat reader" in child]


# ---------------------------------------------------------------- a folder


def test_the_log_has_the_loss_if_it_is_recorded(tmp_path: Path) -> None:
    for record in (True, False):
        folder = tmp_path / str(record)
        alone(problem(), record=record, out=folder)
        records = [r for r in read(folder / "log.jsonl") if isinstance(r, Updated)]
        losses = [record.parts[0].loss for record in records]
        assert len(losses) == 12
        assert all((loss is not None and loss > 0) == record for loss in losses)
        assert (folder / "summary.json").exists()


class Signal(ob.Listener):
    """Sends this process a signal when a version is made, which is in the middle of a step."""

    def __init__(self, what: signal.Signals, version: int):
        self.what, self.version = what, version

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == self.version:
            signal.raise_signal(self.what)


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_step_saves_after_it(
    tmp_path: Path, what: signal.Signals
) -> None:
    data, rule = problem(), SGD
    whole, _ = alone(data, "asp", rule)
    before = signal.getsignal(what)
    with pytest.raises(KeyboardInterrupt) as caught:
        alone(data, "asp", rule, out=tmp_path / "run", listeners=[Signal(what, 5)])
    assert isinstance(caught.value, SystemExit) == (what == signal.SIGTERM)
    assert signal.getsignal(what) == before
    loaded = RunFolder(tmp_path / "run").load()
    assert loaded is not None
    assert loaded[1]["store"]["version"] == 5
    model, _ = alone(data, "asp", rule, out=tmp_path / "run", resume=True)
    assert_same_bits(model, whole)


@pytest.mark.parametrize("discipline", ["asp", "ssp:2", "soft:1", "local:2", "easgd:2"])
def test_a_stopped_run_goes_on(tmp_path: Path, discipline: str) -> None:
    what, rule = problem(), SGD
    whole, _ = alone(what, discipline, rule)
    with pytest.raises(KeyboardInterrupt):
        alone(what, discipline, rule, stop_at=8, out=tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()
    model, _ = alone(what, discipline, rule, out=tmp_path / "run", resume=True)
    applied = [
        (lease.epoch, position)
        for record in read(tmp_path / "run" / "log.jsonl")
        if isinstance(record, Updated)
        for part in record.parts
        for lease in part.leases
        for position in range(lease.start, lease.stop)
    ]
    assert sorted(applied) == [(epoch, n) for epoch in range(2) for n in range(24)]
    if discipline in ("asp", "ssp:2", "soft:1"):  # nothing but gradients was under way
        assert_same_bits(model, whole)


def test_another_run_is_not_gone_on_with(tmp_path: Path) -> None:
    alone(problem(), out=tmp_path / "run")
    with pytest.raises(ob.CheckpointError, match="epochs is 3 here and 2 in the run"):
        alone(problem(), epochs=3, out=tmp_path / "run", resume=True)


# ---------------------------------------------------------------- mistakes


def member() -> tuple[Member, nn.Module, Any]:
    run = join()
    model = run.replica(nn.Linear(3, 2).double())
    return run, model, run.optimizer(SGD)


def test_a_step_before_any_batch() -> None:
    _, _, optimizer = member()
    with pytest.raises(ob.ConfigError, match=r"for x, y in run\.batches"):
        optimizer.step()


def test_two_steps_for_one_batch() -> None:
    run, model, optimizer = member()
    batches = run.batches(problem().data, batch_size=4)
    x, _ = next(batches)
    model(x).sum().backward()
    optimizer.step()
    with pytest.raises(ob.ConfigError, match="one step for each batch"):
        optimizer.step()


def test_a_batch_without_a_step() -> None:
    run, _, _ = member()
    batches = run.batches(problem().data, batch_size=4)
    next(batches)
    with pytest.raises(ob.ConfigError, match="larger batch_size"):
        next(batches)


def test_a_loop_over_epochs_around_it() -> None:
    run, model, optimizer = member()
    for x, _ in run.batches(problem().data, batch_size=4):
        model(x).sum().backward()
        optimizer.step()
    assert run.version == 6
    with pytest.raises(ob.ConfigError, match=r"pass epochs=3 to batches; run\.epoch says"):
        run.batches(problem().data, batch_size=4)


def test_batches_before_replica_or_optimizer() -> None:
    run = join()
    with pytest.raises(ob.ConfigError, match=r"model = run\.replica"):
        run.batches(problem().data)
    run.replica(nn.Linear(3, 2))
    with pytest.raises(ob.ConfigError, match=r"optimizer = run\.optimizer"):
        run.batches(problem().data)


def test_a_loader_says_what_batches_would_be_told() -> None:
    what = problem(samples=22)
    model = copy.deepcopy(what.model)
    with join(seed=5) as run:
        run.replica(model)
        optimizer = run.optimizer(MOMENTUM)
        for x, y in run.batches(DataLoader(what.data, batch_size=4, shuffle=True), epochs=2):
            what.loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits(model, plain(what, MOMENTUM, seed=5))


def test_a_loader_and_its_loop_that_disagree() -> None:
    run, _, _ = member()
    with pytest.raises(ob.ConfigError, match="batch_size is 4, and 2 in the DataLoader"):
        run.batches(DataLoader(problem().data, batch_size=2), batch_size=4)


def test_other_mistakes() -> None:
    run, model, _ = member()
    with pytest.raises(ob.ConfigError, match="replica is called once"):
        run.replica(model)
    with pytest.raises(ob.ConfigError, match="optimizer is called once"):
        run.optimizer(SGD)
    with pytest.raises(ob.ConfigError, match="before its step"):
        run.record(1.0)
    with pytest.raises(ob.ConfigError, match=r"model = run\.replica"):
        join().optimizer(SGD)
    with pytest.raises(ob.ConfigError, match="Module"):
        join().replica(3)  # type: ignore[type-var]
    with pytest.raises(ob.ConfigError, match="did you mean 'discipline'"):
        join(disciplin="asp")  # type: ignore[call-arg]


def test_a_loss_that_is_no_number_ends_the_run() -> None:
    run, model, optimizer = member()
    batches = run.batches(problem().data, batch_size=4)
    x, _ = next(batches)
    model(x).sum().backward()
    run.record(float("nan"))
    with pytest.raises(ob.RunError, match="the loss is nan at worker 0"):
        optimizer.step()


CHANGES_LATE = {
    "unfrozen": (lambda model: model[0].requires_grad_(True), "'0.weight' was frozen when the run"),
    "replaced": (lambda model: model.__setitem__(2, nn.Linear(4, 2).double()), "'2.weight' is new"),
    "added": (lambda model: model.append(nn.Linear(2, 2).double()), "'4.weight' is new"),
    "removed": (lambda model: model.pop(3), "'3.weight' is gone"),
}


@pytest.mark.parametrize("name", CHANGES_LATE)
def test_a_run_trains_the_parameters_of_its_beginning(name: str) -> None:
    what = problem(lambda: nn.Sequential(*mlp(), nn.Linear(2, 2)))  # type: ignore[misc]
    change, words = CHANGES_LATE[name]
    what.model[0].requires_grad_(False)  # type: ignore[index]
    run = join()
    model = run.replica(what.model)
    optimizer = run.optimizer(SGD)
    batches = run.batches(what.data, batch_size=4)
    for _ in range(2):
        model(next(batches)[0]).sum().backward()
        optimizer.step()
    change(model)
    model(next(batches)[0]).sum().backward()
    with pytest.raises(ob.ConfigError, match=words):
        optimizer.step()


def test_a_layer_may_rest_for_a_while() -> None:
    what = problem()
    run = join()
    model = run.replica(what.model)
    optimizer = run.optimizer(SGD)
    first = model[0].weight.detach().clone()  # type: ignore[index]
    for index, (x, y) in enumerate(run.batches(what.data, batch_size=4)):
        model[0].requires_grad_(index >= 2)  # type: ignore[index]
        what.loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, first) == (index < 2)  # type: ignore[index]


def test_torchruns_environment_says_who_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
        "TORCHELASTIC_RUN_ID": "one", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234",
    }  # fmt: skip
    for key, value in words.items():
        monkeypatch.setenv(key, value)
    run = join()
    assert (run.rank, run.workers) == (3, 4)
    assert run._host == TorchrunHost(3, 4, "one", 1234)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert join()._host == HostsTorchrun(3, 4, "one", "10.0.0.7", 1234)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert join().workers == 1
