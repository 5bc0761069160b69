"""A loop in a loop: epochs around batches, with schedulers and validation in between."""

import copy
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

import offbeat as ob
from offbeat.data.reader import Reader
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.join import join
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.contract.common import assert_same_bits, problem

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)
EPOCHS = 3


@pytest.fixture(autouse=True)
def closed() -> Any:
    """Runs that a test has left open give signals back here, in the main thread."""
    yield
    gc.collect()


NESTED = """
import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(0)
data = TensorDataset(torch.randn(44, 3), torch.randn(44, 2))
with ob.join(seed=7) as run:
    model = run.replica(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    scheduler = run.scheduler(OneCycleLR(optimizer, max_lr=0.02, total_steps=33))
    batches = run.batches(data, batch_size=4, epochs=3)
    for epoch in batches.epochs():
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            assert run.epoch == epoch
        IN_EPOCH
AFTER
"""


def script(folder: Path, in_epoch: str = "pass", after: str = "") -> Script:
    path = folder / "train.py"
    path.write_text(NESTED.replace("IN_EPOCH", in_epoch).replace("AFTER", after))
    return Script(path)


def updates(folder: Path) -> list[Updated]:
    return [record for record in read(folder / "log.jsonl") if isinstance(record, Updated)]


@pytest.mark.parametrize("per", ["batch", "epoch"])
@pytest.mark.parametrize("rule", [SGD, ADAM], ids=["sgd", "adamw"])
def test_alone_it_is_the_plain_loop(rule: Any, per: str) -> None:
    what = problem(samples=22)
    steps = 6 * EPOCHS if per == "batch" else EPOCHS

    def plain() -> Any:
        model = copy.deepcopy(what.model)
        optimizer = rule(model.parameters())
        scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
        inputs, target = what.data.tensors
        for epoch in range(EPOCHS):
            for rows in Reader(what.data, 0).order(epoch).split(4):
                optimizer.zero_grad()
                what.loss(model(inputs[rows]), target[rows]).backward()
                optimizer.step()
                if per == "batch":
                    scheduler.step()
            if per == "epoch":
                scheduler.step()
        return model

    model = copy.deepcopy(what.model)
    seen = []
    with join() as run:
        run.replica(model)
        optimizer = run.optimizer(rule(model.parameters()))
        scheduler = run.scheduler(OneCycleLR(optimizer, max_lr=0.2, total_steps=steps), per=per)
        batches = run.batches(what.data, batch_size=4, epochs=EPOCHS)
        assert len(batches) == 6
        for epoch in batches.epochs():
            for x, y in batches:
                optimizer.zero_grad()
                what.loss(model(x), y).backward()
                optimizer.step()
                if per == "batch":
                    scheduler.step()
            if per == "epoch":
                scheduler.step()
            seen.append(epoch)
            model.eval()  # validation in between
            model.train()
    assert seen == [0, 1, 2]
    assert_same_bits(model, plain())


CLUSTERS = {"equal": "20ms,20ms", "unequal": "20ms,25ms,80ms"}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("discipline", ["bsp", "asp", "ssp:2", "local:3", "soft:2"])
def test_one_scheduler_has_one_meaning(tmp_path: Path, discipline: str, cluster: str) -> None:
    """Whoever sends it: the rate is that of the samples that all had done when it was computed."""
    what, out = script(tmp_path), tmp_path / "run"
    asked = {"discipline": discipline, "out": out}
    simulate_script(what, ob.Cluster.parse(CLUSTERS[cluster]), asked)
    parameter = torch.nn.Parameter(torch.zeros(1))
    rule = torch.optim.SGD([parameter], lr=0.05, momentum=0.5)
    plain = OneCycleLR(rule, max_lr=0.02, total_steps=33)
    rates = []
    for _ in range(33):
        rates.append(rule.param_groups[0]["lr"])
        rule.step()
        plain.step() if len(rates) < 33 else None
    done = {0: 0}  # batches by version
    for record in updates(out):
        leases = sum(len(part.leases) for part in record.parts)
        done[record.version] = done[record.version - 1] + leases
        for part in record.parts:
            assert part.settings is not None
            assert part.settings[0]["lr"] == rates[min(done[part.base], 32)]
    assert replay_script(what, RunFolder(out)).identical


def test_a_schedule_by_progress_is_the_same_scheduler_at_the_store() -> None:
    what = problem()
    halve = partial(StepLR, step_size=2, gamma=0.5)
    options: dict[str, Any] = {
        "discipline": "asp", "cluster": "20ms,30ms", "engine": "sim", "batch_size": 4, "epochs": 2,
        "optimizer": SGD, "schedule": ob.Schedule(halve, per="progress"),
    }  # fmt: skip
    by_progress = ob.train(copy.deepcopy(what.model), what.data, what.loss, **options)
    options["schedule"] = ob.Schedule(halve, per="version")  # which is the same under asp
    assert_same_bits(
        ob.train(copy.deepcopy(what.model), what.data, what.loss, **options).model,
        by_progress.model,
    )


@pytest.mark.parametrize(("discipline", "expected"), [("bsp", 17), ("asp", 33), ("local:2", 9)])
def test_how_many_updates_to_expect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], discipline: str, expected: int
) -> None:
    what = script(tmp_path, after="print(run.expected_updates)")
    run = simulate_script(what, ob.Cluster.equal(2), {"discipline": discipline})
    assert capsys.readouterr().out.split() == [str(expected)] * 2
    assert abs(run.summary().updates - expected) <= 3  # an epoch's last round may be smaller


@pytest.mark.parametrize("discipline", ["bsp", "asp", "local:2"])
def test_an_end_after_validation_is_for_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], discipline: str
) -> None:
    stop = "run.stop() if run.rank == 1 and epoch == 1 else None"
    what = script(tmp_path, stop, "print(run.rank, run.epoch, run.version)")
    run = simulate_script(what, ob.Cluster.equal(3), {"discipline": discipline})
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert {row[2] for row in rows} == {str(run.summary().updates)}
    assert rows[1][1] == "1"
    assert run.summary().ledger[0]["applied"] == 44
    assert len(run.summary().ledger) < 3 or run.summary().ledger[2]["applied"] < 44


def test_a_resumed_loop_begins_in_its_epoch(tmp_path: Path) -> None:
    def loop(stop: bool, **more: Any) -> tuple[Any, list[int], list[float]]:
        what = problem()
        model, seen, rates = what.model, [], []
        with join(out=tmp_path / "run", **more) as run:
            run.replica(model)
            optimizer = run.optimizer(SGD(model.parameters()))
            scheduler = run.scheduler(OneCycleLR(optimizer, max_lr=0.2, total_steps=18))
            batches = run.batches(what.data, batch_size=4, epochs=EPOCHS)
            for epoch in batches.epochs():
                for index, (x, y) in enumerate(batches):
                    seen.append(epoch)
                    rates.append(optimizer.param_groups[0]["lr"])
                    if stop and (epoch, index) == (1, 2):
                        raise KeyboardInterrupt
                    optimizer.zero_grad()
                    what.loss(model(x), y).backward()
                    optimizer.step()
                    scheduler.step()
        return model, seen, rates

    with pytest.raises(KeyboardInterrupt):
        loop(True)
    model, seen, rates = loop(False, resume=True)
    assert seen == [1] * 4 + [2] * 6
    rule = SGD([torch.nn.Parameter(torch.zeros(1))])
    plain = OneCycleLR(rule, max_lr=0.2, total_steps=18)
    expected = []
    for _ in range(17):
        expected.append(rule.param_groups[0]["lr"])
        rule.step()
        plain.step()
    assert rates[:-1] == expected[8:]
    assert model.training


# ---------------------------------------------------------------- mistakes


def test_mistakes_around_a_scheduler() -> None:
    what = problem()
    run = join()
    model = run.replica(what.model)
    rule = SGD(model.parameters())
    with pytest.raises(ob.ConfigError, match=r"what run\.optimizer returned"):
        run.scheduler(StepLR(rule, 1))
    optimizer = run.optimizer(SGD(model.parameters()))
    with pytest.raises(ob.ConfigError, match=r"what run\.optimizer returned"):
        run.scheduler(StepLR(rule, 1))
    with pytest.raises(ob.ConfigError, match="depends on the step alone"):
        run.scheduler(ReduceLROnPlateau(optimizer))
    with pytest.raises(ob.ConfigError, match="per 'batch' or per 'epoch'"):
        run.scheduler(StepLR(optimizer, 1), per="step")  # type: ignore[arg-type]
    run.scheduler(StepLR(optimizer, 1))
    batches = run.batches(what.data, batch_size=4)
    with pytest.raises(ob.ConfigError, match="before the loop"):
        run.scheduler(StepLR(optimizer, 1))
    x, y = next(batches)
    what.loss(model(x), y).backward()
    optimizer.step()
    with pytest.raises(ob.ConfigError, match="pass per='epoch'"):
        next(batches)


def test_an_epoch_without_a_loop() -> None:
    what = problem()
    run = join()
    model = run.replica(what.model)
    run.optimizer(SGD(model.parameters()))
    epochs = run.batches(what.data, batch_size=4, epochs=2).epochs()
    next(epochs)
    with pytest.raises(ob.ConfigError, match="for x, y in batches inside"):
        next(epochs)
