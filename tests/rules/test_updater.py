"""A rule over named tensors behaves as the PyTorch optimiser it is."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import offbeat as ob
from offbeat.errors import ConfigError
from offbeat.optim import BlockMomentum, DelayedNesterov, RMSMomentum
from offbeat.rules.schedule import Schedule, Shown
from offbeat.rules.updater import Clip, Recipe, Updater, groups_of, rule_factory

Factory = Callable[..., torch.optim.Optimizer]
RULES: dict[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99)),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rms-momentum": partial(RMSMomentum, lr=0.01),
    "block": partial(BlockMomentum, momentum=0.5),
    "block-nesterov": partial(BlockMomentum, momentum=0.5, nesterov=True),
    "delayed": partial(DelayedNesterov, delay=3),
}
every_rule = pytest.mark.parametrize("factory", RULES.values(), ids=RULES.keys())
NAMES = ("a", "b.c")


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 3, generator=generator) for name in NAMES}


def gradients(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return {name: torch.randn(4, 3, generator=generator) for name in NAMES}


def recipe(factory: Factory, **rest: Any) -> Recipe:
    return Recipe(factory, ((NAMES, {}),), **rest)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@every_rule
def test_a_step_is_the_optimisers_own(factory: Factory) -> None:
    plain = tensors()
    reference = factory(plain.values())
    mine = tensors()
    updater = Updater(recipe(factory), mine)
    for step in range(7):
        for name, gradient in gradients(step).items():
            plain[name].grad = gradient.clone()
        reference.step()
        updater.step(gradients(step))
    assert same(plain, mine)
    assert all(tensor.grad is None for tensor in mine.values())


@every_rule
def test_the_state_goes_into_named_tensors_and_back(factory: Factory) -> None:
    one = tensors()
    first = Updater(recipe(factory), one)
    for step in range(4):
        first.step(gradients(step))
    saved = {path: tensor.clone() for path, tensor in first.tensors_of_state().items()}
    other = {name: tensor.clone() for name, tensor in one.items()}
    second = Updater(recipe(factory), other)
    second.load_state(saved)
    second.load_meta(first.meta())
    for step in range(4, 8):
        first.step(gradients(step))
        second.step(gradients(step))
    assert same(one, other)
    assert all(path.rpartition("/")[0] in NAMES for path in saved)


@every_rule
def test_a_loaded_state_shares_no_memory(factory: Factory) -> None:
    first = Updater(recipe(factory), tensors())
    first.step(gradients(0))
    saved = {path: tensor.clone() for path, tensor in first.tensors_of_state().items()}
    second = Updater(recipe(factory), tensors())
    second.load_state(first.tensors_of_state())
    second.step(gradients(1))
    assert same(saved, first.tensors_of_state())


@every_rule
def test_reset_forgets_the_state_and_keeps_the_rate(factory: Factory) -> None:
    mine = tensors()
    updater = Updater(recipe(factory, schedule=Schedule(partial(StepLR, step_size=1))), mine)
    for step in range(3):
        updater.step(gradients(step))
    updater.advance(0, 1)
    rate = updater.rule.param_groups[0]["lr"]
    updater.reset()
    assert updater.rule.param_groups[0]["lr"] == rate
    fresh = {name: tensor.clone() for name, tensor in mine.items()}
    reference = Updater(recipe(factory), fresh)
    for group in reference.rule.param_groups:
        group["lr"] = rate
    updater.step(gradients(9))
    reference.step(gradients(9))
    assert same(mine, fresh)


@every_rule
def test_an_empty_state_is_that_of_a_rule_not_yet_used(factory: Factory) -> None:
    mine, fresh = tensors(), tensors()
    updater, reference = Updater(recipe(factory), mine), Updater(recipe(factory), fresh)
    updater.load_state({})
    updater.step(gradients(0))
    reference.step(gradients(0))
    assert same(mine, fresh)


@every_rule
def test_the_rate_of_one_step_is_scaled_and_restored(factory: Factory) -> None:
    mine, plain = tensors(), tensors()
    updater = Updater(recipe(factory), mine)
    before = [group["lr"] for group in updater.rule.param_groups]
    updater.step(gradients(0), rate=0.5)
    assert [group["lr"] for group in updater.rule.param_groups] == before
    reference = factory(plain.values(), lr=before[0] * 0.5)
    for name, gradient in gradients(0).items():
        plain[name].grad = gradient
    reference.step()
    assert same(mine, plain)


def test_a_tensor_without_a_gradient_is_left_alone() -> None:
    mine = tensors()
    updater = Updater(recipe(partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)), mine)
    updater.step({"a": gradients(0)["a"]})
    assert not torch.equal(mine["a"], tensors()["a"])
    assert torch.equal(mine["b.c"], tensors()["b.c"])


def test_only_the_tensors_of_a_shard_are_taken() -> None:
    mine = {"a": tensors()["a"]}
    updater = Updater(recipe(RULES["momentum"]), mine)
    assert updater.names == ["a"]
    updater.step(gradients(0))
    assert list(updater.tensors_of_state()) == ["a/momentum_buffer"]


def test_state_of_tensors_elsewhere_is_ignored() -> None:
    whole = Updater(recipe(RULES["momentum"]), tensors())
    whole.step(gradients(0))
    part = Updater(recipe(RULES["momentum"]), {"a": tensors()["a"]})
    part.load_state(whole.tensors_of_state())
    assert list(part.tensors_of_state()) == ["a/momentum_buffer"]


def test_the_value_of_a_rule_that_looks_ahead_is_where_it_really_is() -> None:
    mine = tensors()
    updater = Updater(recipe(RULES["block-nesterov"]), mine)
    updater.step(gradients(0))
    expected = tensors()["a"] - gradients(0)["a"]
    torch.testing.assert_close(updater.value("a"), expected)
    torch.testing.assert_close(mine["a"], expected - 0.5 * gradients(0)["a"])
    plain = Updater(recipe(RULES["sgd"]), mine)
    assert plain.value("a") is mine["a"]


# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize(("per", "moves"), [("epoch", 2), ("version", 5)])
def test_a_schedule_moves_per_epoch_or_version(per: Any, moves: int) -> None:
    schedule = Schedule(partial(ExponentialLR, gamma=0.5), per)
    updater = Updater(recipe(RULES["sgd"], schedule=schedule), tensors())
    updater.step(gradients(0))
    updater.advance(version=5, epoch=2)
    assert updater.moved == moves
    assert updater.rule.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**moves)
    updater.advance(version=5, epoch=2)
    assert updater.moved == moves


def test_a_schedule_goes_on_where_it_was() -> None:
    schedule = Schedule(partial(ExponentialLR, gamma=0.5))
    first = Updater(recipe(RULES["adam"], schedule=schedule), tensors())
    first.step(gradients(0))
    first.advance(0, 3)
    second = Updater(recipe(RULES["adam"], schedule=schedule), tensors())
    second.load_meta(first.meta())
    assert second.rates() == first.rates()
    assert isinstance(second.rule.param_groups[0]["betas"], tuple)
    second.rule.step()  # the scheduler wants a step before it moves
    for updater in (first, second):
        updater.advance(0, 5)
    assert second.rates() == first.rates()


def test_schedules_and_staleness_work_together() -> None:
    schedule = Schedule(partial(ExponentialLR, gamma=0.5))
    mine = tensors()
    updater = Updater(recipe(RULES["sgd"], schedule=schedule), mine)
    updater.rule.step()
    updater.advance(0, 1)
    updater.step(gradients(0), rate=0.5)
    torch.testing.assert_close(mine["a"], tensors()["a"] - 0.025 * gradients(0)["a"])
    assert updater.rule.param_groups[0]["lr"] == 0.05


def _warm(rule: torch.optim.Optimizer) -> LRScheduler:
    """Two schedulers, of which the second moves for the first time when the first is over."""
    return SequentialLR(rule, [ConstantLR(rule, 0.1, 5), ExponentialLR(rule, 0.5)], [2])


@pytest.mark.parametrize("factory", [_warm, partial(ExponentialLR, gamma=0.5)])
def test_a_schedule_moves_before_any_step_without_a_warning(factory: Any) -> None:
    schedule = Schedule(factory, "version")
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    shown = Shown(partial(torch.optim.SGD, [parameter], lr=1.0), schedule)
    updater = Updater(
        Recipe(partial(torch.optim.SGD, lr=1.0), ((("a",), {}),), schedule), tensors()
    )
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)
    scheduler = factory(plain)
    for version in range(5):
        updater.advance(version, 0)
        rate = plain.param_groups[0]["lr"]
        assert shown.groups(version, 0, 0)[0]["lr"] == updater.rates()[0]["lr"] == rate
        plain.step()
        scheduler.step()
    assert torch.equal(parameter, torch.ones(2))  # what only shows makes no step


def test_what_a_schedule_may_be() -> None:
    with pytest.raises(ConfigError, match="per 'version' or per 'progress', not 'step'"):
        Schedule(partial(StepLR, step_size=1), per="step")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs a metric"):
        Updater(recipe(RULES["sgd"], schedule=Schedule(ReduceLROnPlateau)), tensors())


def test_a_rule_without_a_rate_is_refused() -> None:
    class Odd(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    with pytest.raises(ConfigError, match="Odd has no learning rate named lr"):
        Updater(recipe(Odd), tensors())


# ---------------------------------------------------------------- clipping


@given(st.integers(0, 1000), st.floats(0.01, 100))
def test_clipping_the_norm_is_pytorchs_to_the_bit(seed: int, norm: float) -> None:
    mine = [gradient * 10 for gradient in gradients(seed).values()]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, norm)
    Clip(norm=norm)(mine)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, mine, strict=True))  # type: ignore[arg-type]


def test_clipping_elements_is_pytorchs() -> None:
    mine = list(gradients(0).values())
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in mine]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_value_(parameters, 0.3)
    Clip(value=0.3)(mine)
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters, mine, strict=True))  # type: ignore[arg-type]


def test_a_small_gradient_and_no_gradient_pass() -> None:
    Clip(norm=1.0)([])
    small = [torch.tensor([0.25])]
    Clip(norm=1.0, value=1.0)(small)
    assert small[0].item() == 0.25


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_limits_are_positive(limit: float) -> None:
    with pytest.raises(ConfigError, match="a clipping limit must be positive"):
        Clip(norm=limit)
    with pytest.raises(ConfigError, match="a clipping limit must be positive"):
        Clip(value=limit)


# ---------------------------------------------------------------- groups and rules


def test_parameter_groups_keep_their_settings() -> None:
    model = nn.Linear(3, 2)
    groups = groups_of(
        model,
        lambda m: [{"params": [m.weight], "weight_decay": 0.1}, {"params": m.bias, "lr": 0.5}],
    )
    assert groups == ((("weight",), {"weight_decay": 0.1}), (("bias",), {"lr": 0.5}))
    made = Recipe(RULES["sgd"], groups)
    updater = Updater(made, {name: p.detach() for name, p in model.named_parameters()})
    rates = [(g["lr"], g["weight_decay"]) for g in updater.rule.param_groups]
    assert rates == [(0.1, 0.1), (0.5, 0)]


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="parameter 'bias' is in 0 parameter groups, not in one"):
        groups_of(model, lambda m: [{"params": [m.weight]}])
    with pytest.raises(ConfigError, match="parameter 'weight' is in 2 parameter groups"):
        groups_of(model, lambda m: [{"params": m.parameters()}, {"params": [m.weight]}])
    model.bias.requires_grad_(False)
    assert groups_of(model, lambda m: [{"params": m.parameters()}]) == ((("weight",), {}),)


def test_the_rule_a_discipline_brings() -> None:
    def made(discipline: ob.Discipline) -> torch.optim.Optimizer:
        return rule_factory(discipline.for_workers(4), None)([torch.zeros(1)])

    adagrad = made(ob.Downpour(lr=0.5))
    assert isinstance(adagrad, torch.optim.Adagrad)
    assert adagrad.defaults["lr"] == 0.5
    asup = made(ob.ASUP(lr=0.02, momentum=0.8, rho=0.7))
    assert isinstance(asup, RMSMomentum)
    assert [asup.defaults[k] for k in ("lr", "momentum", "rho")] == [0.02, 0.8, 0.7]
    bmuf = made(ob.BMUF(nesterov=True))
    assert isinstance(bmuf, BlockMomentum)
    assert (bmuf.defaults["momentum"], bmuf.defaults["nesterov"]) == (0.75, True)
    delayed = made(ob.AsyncLocalSGD())
    assert isinstance(delayed, DelayedNesterov)
    assert delayed.defaults["delay"] == 4
    diloco = made(ob.DiLoCo())
    assert isinstance(diloco, torch.optim.SGD)
    assert [diloco.defaults[k] for k in ("lr", "momentum", "nesterov")] == [0.7, 0.9, True]


def test_your_optimiser_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"ssp:3 applies your optimiser: pass optimizer=partial"):
        rule_factory(ob.SSP(3), None)
    assert rule_factory(ob.SSP(3), RULES["sgd"]) is RULES["sgd"]


# ---------------------------------------------------------------- whose state it is


def _meta(factory: Factory, **rest: Any) -> Any:
    """As a checkpoint has it."""
    return json.loads(json.dumps(Updater(recipe(factory, **rest), tensors()).meta()))


@every_rule
def test_a_rule_knows_its_own_state_whatever_its_rate(factory: Factory) -> None:
    other = Updater(recipe(partial(factory, lr=0.001)), tensors())
    assert other.unlike(_meta(factory)) is None
    older = {key: value for key, value in _meta(factory).items() if key != "settings"}
    assert other.unlike(older) is None


def test_a_rule_knows_the_state_of_another() -> None:
    mine = Updater(recipe(RULES["momentum"]), tensors())
    assert mine.unlike(_meta(RULES["adam"])) == "that rule was Adam and this one is SGD"
    assert mine.unlike(_meta(RULES["sgd"])) == "momentum was 0 and is 0.9"
    grouped = Recipe(RULES["momentum"], (((NAMES[0],), {}), ((NAMES[1],), {"momentum": 0.1})))
    theirs = json.loads(json.dumps(Updater(grouped, tensors()).meta()))
    assert mine.unlike(theirs) == "it had 2 kinds of parameter groups and this one has 1"


def test_a_schedule_does_not_make_another_rule_of_it() -> None:
    moving = Schedule(partial(CyclicLR, base_lr=0.1, max_lr=1.0), "version")
    mine = Updater(recipe(RULES["momentum"]), tensors())
    assert mine.unlike(_meta(RULES["momentum"], schedule=moving)) is None


# ---------------------------------------------------------------- schedules of fixed length


def _cycle(rule: torch.optim.Optimizer, total: int = 6) -> OneCycleLR:
    return OneCycleLR(rule, max_lr=0.3, total_steps=total)


def test_a_schedule_of_fixed_length_ends_with_its_last_rate() -> None:
    updater = Updater(recipe(RULES["sgd"], schedule=Schedule(_cycle, "version")), tensors())
    rates = []
    for version in range(12):
        updater.advance(version, 0)
        rates.append(updater.rule.param_groups[0]["lr"])
    plain = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler, wanted = _cycle(plain), []
    for _ in range(6):
        wanted.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert rates == wanted + wanted[-1:] * 6
    assert updater.moved == 11
    late = Updater(recipe(RULES["sgd"], schedule=Schedule(_cycle, "version")), tensors())
    late.advance(11, 0)
    assert late.rule.param_groups[0]["lr"] == rates[-1]
    late.load_meta(updater.meta())
    late.advance(13, 0)
    assert late.rule.param_groups[0]["lr"] == rates[-1]


def test_one_of_fixed_length_inside_another_ends_too() -> None:
    def chained(rule: torch.optim.Optimizer) -> SequentialLR:
        return SequentialLR(rule, [ConstantLR(rule, 0.5, 2), _cycle(rule)], [2])

    updater = Updater(recipe(RULES["sgd"], schedule=Schedule(chained, "version")), tensors())
    rates = []
    for version in range(20):
        updater.advance(version, 0)
        rates.append(updater.rule.param_groups[0]["lr"])
    assert len(set(rates[:8])) > 4
    assert len(set(rates[8:])) == 1


def test_a_schedule_that_fails_is_not_one_that_ends() -> None:
    def broken(step: int) -> float:
        if step > 2:
            raise ValueError("no rate for that")
        return 1.0

    schedule = Schedule(partial(LambdaLR, lr_lambda=broken), "version")
    updater = Updater(recipe(RULES["sgd"], schedule=schedule), tensors())
    with pytest.raises(ValueError, match="no rate for that"):
        updater.advance(5, 0)
