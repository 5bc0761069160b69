"""A script's optimiser is PyTorch's: schedulers, hooks and settings act on the rule elsewhere."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR, StepLR

import offbeat as ob
from offbeat.data.reader import Reader
from offbeat.engine.script import Script
from offbeat.engine.sim.scripts import replay_script, simulate_script
from offbeat.folder.checkpoint import RunFolder
from offbeat.join import Member, join
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.contract.common import Problem, assert_close, assert_same_bits, problem
from tests.engine.sim.test_scripts import LOOP

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=0.01)
STEPS = 12
Attach = Callable[[torch.optim.Optimizer], Any]


@pytest.fixture(autouse=True)
def closed() -> Any:
    """Runs that a test has left open give signals back here, in the main thread."""
    yield
    gc.collect()


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)


def warm_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return SequentialLR(optimizer, [warm, CosineAnnealingLR(optimizer, 9)], milestones=[3])


SCHEDULERS: dict[str, Attach] = {
    "one cycle": one_cycle,
    "cosine": warm_then_cosine,
    "step": lambda optimizer: StepLR(optimizer, 5, 0.5),
}


def groups(model: Any) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [
        {"params": weights, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 0.02},
    ]


def trained(what: Problem, make: Any, attach: Attach, discipline: str = "bsp") -> nn.Module:
    model = copy.deepcopy(what.model)
    with join(discipline=discipline) as run:
        run.replica(model)
        optimizer = run.optimizer(make(model))
        scheduler = attach(optimizer)
        for x, y in run.batches(what.data, batch_size=4, epochs=2):
            what.loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


def plain(what: Problem, make: Any, attach: Attach) -> nn.Module:
    model = copy.deepcopy(what.model)
    optimizer = make(model)
    scheduler = attach(optimizer)
    inputs, target = what.data.tensors
    for epoch in range(2):
        for rows in Reader(what.data, 0).order(epoch).split(4):
            what.loss(model(inputs[rows]), target[rows]).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rule", [SGD, ADAM], ids=["sgd", "adamw"])
def test_a_scheduler_of_pytorchs_acts_as_in_a_plain_loop(name: str, rule: Any) -> None:
    what = problem()
    for make in (lambda m: rule(m.parameters()), lambda m: rule(groups(m))):
        assert_same_bits(trained(what, make, SCHEDULERS[name]), plain(what, make, SCHEDULERS[name]))


def test_local_steps_have_the_rate_of_each_step() -> None:
    what = problem()
    make = lambda m: SGD(groups(m))  # noqa: E731
    for discipline in ("local:3", "average:2", "hogwild"):
        assert_close(trained(what, make, one_cycle, discipline), plain(what, make, one_cycle))


# ---------------------------------------------------------------- simulated, and replayed

CYCLED = LOOP.replace(
    "    for step,",
    "    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=12)\n"
    "    for step,",
).replace("        optimizer.step()", "        optimizer.step(); scheduler.step()")


def cycled(folder: Path, in_loop: str = "pass", text: str = CYCLED) -> Script:
    path = folder / "loop.py"
    path.write_text(text.replace("BEFORE", "").replace("AFTER", "").replace("IN_LOOP", in_loop))
    return Script(path)


def updates(folder: Path) -> list[Updated]:
    return [record for record in read(folder / "log.jsonl") if isinstance(record, Updated)]


@pytest.mark.parametrize(
    "asked",
    [
        {"discipline": "bsp"},
        {"discipline": "asp"},
        {"discipline": "ssp:2", "shards": 2},
        {"discipline": "soft:2"},
        {"discipline": "local:2"},
        {"discipline": "easgd:2"},
        {"discipline": "gossip"},
    ],
    ids=lambda asked: asked["discipline"],
)
def test_a_contribution_takes_its_rate_along_and_a_replay_obeys(
    tmp_path: Path, asked: dict[str, Any]
) -> None:
    what, out = cycled(tmp_path), tmp_path / "run"
    simulate_script(what, ob.Cluster.parse("20ms,25ms,80ms"), {**asked, "out": out})
    told = [part.settings for record in updates(out) for part in record.parts]
    rates = [settings[0]["lr"] for settings in told if settings is not None]
    assert len(set(rates)) > 1
    found = replay_script(what, RunFolder(out))
    assert found.identical
    assert found.compared > 0


def test_a_replay_has_the_rates_of_the_log_and_not_of_the_script(tmp_path: Path) -> None:
    """What set them may be something that does not come again, such as a clock."""
    look = "import pathlib, sys; rate = pathlib.Path(sys.argv[0] + '.rate').read_text()"
    what = cycled(tmp_path, f"{look}; optimizer.param_groups[0]['lr'] = float(rate)", LOOP)
    rate = Path(f"{what.path}.rate")
    rate.write_text("0.01")
    simulate_script(what, ob.Cluster.equal(2), {"discipline": "asp", "out": tmp_path / "run"})
    rate.write_text("0.02")
    assert replay_script(what, RunFolder(tmp_path / "run")).identical


# ---------------------------------------------------------------- what it can do


def member(rule: Any = SGD, **more: Any) -> tuple[Member, Any, Any]:
    run = join()
    model = run.replica(problem().model)
    return run, model, run.optimizer(rule, **more)


def test_it_is_an_optimizer_with_hooks_and_a_state_dict() -> None:
    run, model, optimizer = member()
    assert isinstance(optimizer, torch.optim.Optimizer)
    told: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    for x, y in run.batches(problem().data, batch_size=12):
        problem().loss(model(x), y).backward()
        optimizer.step()
        assert model[0].weight.grad is not None
        optimizer.zero_grad(set_to_none=False)
        assert not model[0].weight.grad.any()
        optimizer.zero_grad()
        assert model[0].weight.grad is None
    assert told == ["before", "after"] * 2
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_closure_computes_the_loss_once() -> None:
    what = problem()
    run, model, optimizer = member()
    same = copy.deepcopy(what.model)
    rule = SGD(same.parameters())
    for x, y in run.batches(what.data, batch_size=4):

        def closure(net: Any, forget: Any, x: Any = x, y: Any = y) -> Any:
            forget.zero_grad()
            loss = what.loss(net(x), y)
            loss.backward()
            return loss

        mine = optimizer.step(partial(closure, model, optimizer))
        assert torch.equal(mine, rule.step(partial(closure, same, rule)))
    assert_same_bits(model, same)


@pytest.mark.parametrize("key", ["lr", "momentum", "weight_decay", "nesterov"])
def test_every_plain_setting_may_be_written(key: str) -> None:
    value = {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1, "nesterov": True}[key]

    def attach(optimizer: torch.optim.Optimizer) -> Any:
        class Late:
            count = 0

            def step(self) -> None:
                self.count += 1
                if self.count == 4:
                    optimizer.param_groups[0][key] = value

        return Late()

    make = lambda m: SGD(groups(m))  # noqa: E731
    assert_same_bits(trained(problem(), make, attach), plain(problem(), make, attach))


def test_betas_come_back_as_they_were() -> None:
    def attach(optimizer: torch.optim.Optimizer) -> Any:
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS)  # moves the first of Adam's

    make = lambda m: torch.optim.Adam(m.parameters())  # noqa: E731
    assert_same_bits(trained(problem(), make, attach), plain(problem(), make, attach))


# ---------------------------------------------------------------- what is refused, and when


def test_an_optimiser_that_cannot_be_taken_apart() -> None:
    other = nn.Linear(2, 2)
    with pytest.raises(ob.ConfigError, match="not the replica's: make it of model"):
        member(SGD(other.parameters()))
    model = problem().model
    rule = SGD(model.parameters())
    model(problem().data[:][0]).sum().backward()
    rule.step()
    run = join()
    run.replica(model)
    with pytest.raises(ob.ConfigError, match="has made steps"):
        run.optimizer(rule)
    rule = SGD(model.parameters())
    StepLR(rule, 1)
    with pytest.raises(ob.ConfigError, match=r"to what run\.optimizer returns"):
        run.optimizer(rule)
    with pytest.raises(ob.ConfigError, match="has its groups already"):
        run.optimizer(SGD(model.parameters()), groups=groups)


def test_a_schedule_and_a_scheduler() -> None:
    halve = ob.Schedule(partial(StepLR, step_size=1, gamma=0.5))
    run, _, optimizer = member(schedule=halve)
    StepLR(optimizer, 1)
    with pytest.raises(ob.ConfigError, match="follows the schedule="):
        run.batches(problem().data, batch_size=4)
    run, model, optimizer = member(schedule=halve)
    seen = []
    for x, y in run.batches(problem().data, batch_size=12, epochs=2):
        seen.append(optimizer.param_groups[0]["lr"])
        problem().loss(model(x), y).backward()
        optimizer.step()
    assert seen == [0.1, 0.1, 0.05, 0.05]
    assert optimizer.param_groups[0]["lr"] == 0.025


def test_a_rate_under_a_rule_of_the_disciplines() -> None:
    run = join(discipline="asup")
    run.replica(problem().model)
    optimizer = run.optimizer(SGD)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.raises(ob.ConfigError, match="brings its own rule"):
        run.batches(problem().data, batch_size=4)


def test_groups_and_state_that_would_be_lost() -> None:
    run, model, optimizer = member()
    with pytest.raises(ob.ConfigError, match="pass all groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    rule = SGD(model.parameters())
    model(problem().data[:][0]).sum().backward()
    rule.step()
    with pytest.raises(ob.ConfigError, match="lies in the store"):
        optimizer.load_state_dict(rule.state_dict())
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(ob.ConfigError, match="lr of a group must be a number"):
        run.batches(problem().data, batch_size=4)
