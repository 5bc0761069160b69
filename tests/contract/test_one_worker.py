"""One worker of any discipline is plain PyTorch: bit for bit where gradients travel."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import offbeat as ob
from tests.contract.common import (
    MOMENTUM,
    SGD,
    assert_close,
    assert_same_bits,
    covering,
    plain,
    problem,
    run,
)

GRADIENTS = {
    "bsp": ob.BSP(),
    "soft": ob.SoftSync(1),
    "ssp": ob.SSP(0),
    "ssp-slack": ob.SSP(3),
    "asp": ob.ASP(),
    "inverse": ob.ASP(ob.Inverse()),
    "poly": ob.ASP(ob.Polynomial(0.5)),
    "dc": ob.ASP(ob.DelayCompensation(0.5)),
    "dc-adaptive": ob.ASP(ob.AdaptiveDelayCompensation()),
    "gap": ob.ASP(ob.GapAware()),
    "gossip": ob.Gossip(),
    "accumulated": ob.Discipline(ob.Accumulated(1, 1)),
}
# Those that send changes, with what makes the store add the change as it is.
CHANGES = {
    "local": ob.LocalSGD(3),
    "average": ob.Average(3),
    "average-keep": ob.Average(2, "keep"),
    "diloco": ob.DiLoCo(3, lr=1.0, momentum=0.0),
    "fedbuff": ob.FedBuff(1, every=3),
    "async-local": ob.AsyncLocalSGD(3, lr=1.0, momentum=0.0),
}
RESETTING = {"bmuf": ob.BMUF(3, momentum=0.0), "reset": ob.LocalSGD(3, "reset")}

ADAM = partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1)
OPTIMIZERS = {
    "sgd": SGD,
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": ADAM,
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}


class Normed(nn.Sequential):
    """Batch-norm statistics: state that is no parameter."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


class Unused(nn.Module):
    """A parameter that never gets a gradient: weight decay must not move it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(inputs)


class Frozen(nn.Sequential):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self[0].requires_grad_(False)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    first, last = list(model[0].parameters()), list(model[2].parameters())
    return [{"params": last, "lr": 0.2}, {"params": first, "weight_decay": 0.3}]


@pytest.mark.parametrize(
    ("engine", "name", "optimizer"), covering(GRADIENTS, OPTIMIZERS), indirect=["engine"]
)
def test_gradient_disciplines_bit_for_bit(engine, name, optimizer):
    what, rule = problem(), OPTIMIZERS[optimizer]
    got = run(engine, what, GRADIENTS[name], workers=1, optimizer=rule, seed=5)
    assert_same_bits(got.model, plain(what, rule, seed=5))
    assert got.summary().staleness_max == 0


@pytest.mark.parametrize(
    ("engine", "name", "make"), covering(GRADIENTS, [Normed, Unused, Frozen]), indirect=["engine"]
)
def test_other_models_bit_for_bit(engine, name, make):
    what = problem(make, samples=22)  # and a last batch of two
    got = run(engine, what, GRADIENTS[name], workers=1, optimizer=ADAM)
    assert_same_bits(got.model, plain(what, ADAM))


def test_those_models_are_what_they_are_meant_to_be(engine):
    what = problem(Unused)
    got = run(engine, what, ob.ASP(), workers=1, optimizer=ADAM)
    assert torch.equal(got.model.idle.weight, what.model.idle.weight)
    assert not torch.equal(got.model.used.weight, what.model.used.weight)
    normed = run(engine, problem(Normed), ob.ASP(), workers=1, optimizer=ADAM)
    assert int(normed.model[1].num_batches_tracked) == 12
    frozen = problem(Frozen)
    trained = run(engine, frozen, ob.ASP(), workers=1, optimizer=ADAM)
    assert torch.equal(trained.model[0].weight, frozen.model[0].weight)


@pytest.mark.parametrize("name", GRADIENTS)
def test_settings_bit_for_bit(engine, name):
    """Schedule per epoch, clipping, groups, a short last batch and accumulation at once."""
    what = problem(samples=23)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    rule = OPTIMIZERS["momentum"]
    got = run(
        engine, what, GRADIENTS[name], workers=1, optimizer=rule, epochs=3,
        schedule=ob.Schedule(halve), clip=ob.Clip(norm=0.3), groups=_groups, accumulate=2,
    )  # fmt: skip
    same = plain(what, rule, epochs=3, schedule=halve, clip=0.3, groups=_groups, accumulate=2)
    assert_same_bits(got.model, same)


@pytest.mark.parametrize("setting", ["schedule", "clip", "groups", "accumulate"])
def test_each_setting_matters(engine, setting):
    """So that the test above says something of each."""
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    value = {
        "schedule": ob.Schedule(halve),
        "clip": ob.Clip(norm=0.3),
        "groups": _groups,
        "accumulate": 2,
    }[setting]
    with_it = run(engine, problem(samples=23), "asp", workers=1, **{setting: value})
    without = run(engine, problem(samples=23), "asp", workers=1)
    assert with_it.parameter_hash != without.parameter_hash


@pytest.mark.parametrize(
    ("engine", "name", "optimizer", "make"),
    covering(CHANGES, OPTIMIZERS, [Frozen, Unused]),
    indirect=["engine"],
)
def test_change_disciplines_to_rounding(engine, name, optimizer, make):
    what, rule = problem(make, samples=22), OPTIMIZERS[optimizer]
    got = run(engine, what, CHANGES[name], workers=1, optimizer=rule, seed=7)
    assert_close(got.model, plain(what, rule, seed=7))


@pytest.mark.parametrize("name", CHANGES)
def test_settings_of_change_disciplines_to_rounding(engine, name):
    """Blocks that end with the epoch, so that the schedule moves at the same step."""
    what = problem(samples=23)
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    got = run(
        engine, what, CHANGES[name], workers=1, optimizer=MOMENTUM, epochs=3,
        schedule=ob.Schedule(halve), clip=ob.Clip(norm=0.3), groups=_groups,
    )  # fmt: skip
    same = plain(what, MOMENTUM, epochs=3, schedule=halve, clip=0.3, groups=_groups)
    assert_close(got.model, same)


@pytest.mark.parametrize("name", RESETTING)
def test_a_reset_updater_loses_nothing_that_sgd_has(engine, name):
    what = problem(samples=22)
    got = run(engine, what, RESETTING[name], workers=1, optimizer=SGD)
    assert_close(got.model, plain(what, SGD))
    moving = run(engine, what, RESETTING[name], workers=1, optimizer=MOMENTUM)
    with pytest.raises(AssertionError):  # with momentum it does
        assert_close(moving.model, plain(what, MOMENTUM))


@pytest.mark.parametrize("make", [Normed, Unused, Frozen])
def test_downpour_is_adagrad(engine, make):
    what = problem(make, samples=22)
    got = run(engine, what, ob.Downpour(1, 1, lr=0.03), workers=1)
    assert_same_bits(got.model, plain(what, partial(torch.optim.Adagrad, lr=0.03)))


@pytest.mark.parametrize("make", [Normed, Unused, Frozen])
def test_asup_is_momentum_over_scaled_gradients(engine, make):
    what = problem(make, samples=22)
    got = run(engine, what, ob.ASUP(lr=0.002, momentum=0.7, rho=0.8), workers=1)
    rule = partial(ob.optim.RMSMomentum, lr=0.002, momentum=0.7, rho=0.8)
    assert_same_bits(got.model, plain(what, rule))
