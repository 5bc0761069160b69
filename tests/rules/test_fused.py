"""The tensors of a small model as one vector: the same bits, the same state by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from offbeat.model.table import Entry, Flat, Table
from offbeat.optim import BlockMomentum, DelayedNesterov, RMSMomentum
from offbeat.rules.fused import FEW
from offbeat.rules.updater import Recipe, Updater

Factory = Callable[..., torch.optim.Optimizer]
RULES: dict[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "decay": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "adam": partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99)),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rms-momentum": partial(RMSMomentum, lr=0.01),
    "rms-decay": partial(RMSMomentum, lr=0.01, weight_decay=0.01),
    "block": partial(BlockMomentum, momentum=0.5),
    "block-nesterov": partial(BlockMomentum, momentum=0.5, nesterov=True),
    "delayed": partial(DelayedNesterov, delay=3, c=0.2),
}
every_rule = pytest.mark.parametrize("factory", RULES.values(), ids=RULES.keys())
# No size is a whole number of cache lines or of the processor's vectors.
SHAPES = {"a": (1,), "b": (7, 5), "c.weight": (3, 11, 3, 3), "c.bias": (13,), "d": (301,)}


def table(shapes: dict[str, tuple[int, ...]] = SHAPES) -> Table:
    return Table.of([Entry(name, shape, torch.float32, "shared") for name, shape in shapes.items()])


def filled(seed: int, of: Table | None = None) -> Flat:
    flat = Flat(of or table())
    generator = torch.Generator().manual_seed(seed)
    for view in flat.views.values():
        view.copy_(torch.randn(view.shape, generator=generator))
    return flat


def made(factory: Factory, flat: Flat, together: bool) -> Updater:
    recipe = Recipe(factory, ((tuple(flat.views), {}),))
    return Updater(recipe, flat.views, flat if together else None)


def is_fused(updater: Updater) -> bool:
    return updater._fused is not None


def step(updater: Updater, number: int, without: str | None = None) -> None:
    gradient, rate = filled(100 + number), 1.0 if number % 2 else 0.3
    if without is None:
        updater.step_along(gradient, rate)
        return
    views: dict[str, Tensor | None] = {n: v for n, v in gradient.views.items() if n != without}
    updater.step(views, rate)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@every_rule
def test_the_vector_has_the_bits_of_its_tensors(factory: Factory) -> None:
    joined, apart = filled(0), filled(0)
    one, other = made(factory, joined, True), made(factory, apart, False)
    assert is_fused(one)
    for number in range(7):
        step(one, number)
        step(other, number)
        same(joined.views, apart.views)
        same(one.tensors_of_state(), other.tensors_of_state())
    assert is_fused(one)


@every_rule
def test_a_tensor_without_a_gradient_goes_its_own_way(factory: Factory) -> None:
    joined, apart = filled(0), filled(0)
    one, other = made(factory, joined, True), made(factory, apart, False)
    for number in range(6):
        without = "b" if number == 3 else None
        step(one, number, without)
        step(other, number, without)
    same(joined.views, apart.views)
    same(one.tensors_of_state(), other.tensors_of_state())
    assert not is_fused(one)


@every_rule
def test_a_saved_state_goes_on_together_or_apart(factory: Factory) -> None:
    first = filled(0)
    one = made(factory, first, True)
    for number in range(4):
        step(one, number)
    saved = {path: tensor.clone() for path, tensor in one.tensors_of_state().items()}
    kept = first.clone()
    for number in range(4, 7):
        step(one, number)
    for together in (True, False):
        again = kept.clone()
        other = made(factory, again, together)
        step(made(factory, filled(5), together), 0)  # what another has learnt is its own
        other.load_state(saved)
        other.load_meta(one.meta())
        for number in range(4, 7):
            step(other, number)
        same(first.views, again.views)
        same(one.tensors_of_state(), other.tensors_of_state())


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.1), ("momentum", 0.5)])
def test_settings_may_change_between_two_steps(key: str, value: float) -> None:
    joined, apart = filled(0), filled(0)
    one, other = made(RULES["sgd"], joined, True), made(RULES["sgd"], apart, False)
    for number in range(6):
        for updater in (one, other):
            updater.rule.param_groups[0][key] = value if number > 2 else 0.0
            step(updater, number)
        same(joined.views, apart.views)
    same(one.tensors_of_state(), other.tensors_of_state())


def test_states_that_have_parted_stay_apart() -> None:
    joined, apart = filled(0), filled(0)
    source = made(RULES["adam"], filled(0), False)
    step(source, 0)
    step(source, 1, without="c.bias")  # has made one step less than the others
    saved = {path: tensor.clone() for path, tensor in source.tensors_of_state().items()}
    one, other = made(RULES["adam"], joined, True), made(RULES["adam"], apart, False)
    for updater in (one, other):
        updater.load_state(saved)
        step(updater, 2)
        step(updater, 3)
    assert not is_fused(one)
    same(joined.views, apart.views)
    same(one.tensors_of_state(), other.tensors_of_state())


def test_the_state_of_one_name_is_a_part_of_the_whole() -> None:
    flat = filled(0)
    updater = made(RULES["momentum"], flat, True)
    step(updater, 0)
    held = updater.tensors_of_state()["b/momentum_buffer"]
    before = held.clone()
    step(updater, 1)
    assert not torch.equal(held, before)
    assert held.shape == flat.views["b"].shape


@pytest.mark.parametrize(
    "odd",
    [
        {"factory": partial(torch.optim.RMSprop, lr=0.1)},  # not known to work element by element
        {"factory": partial(torch.optim.Adam, lr=torch.tensor(0.1))},
        {"factory": partial(torch.optim.SGD, lr=0.1, foreach=True)},
        {"groups": ((("a",), {}), (("b",), {"lr": 0.2}))},
        {"shapes": {"a": (3,), "b": ()}},
        {"shapes": {"a": (3,), "b": (FEW // 4,)}},
        {"shapes": {"a": (3,)}},
    ],
)
def test_what_is_not_joined(odd: dict[str, Any]) -> None:
    flat = filled(0, table(odd.get("shapes", {"a": (3,), "b": (2, 2)})))
    groups = odd.get("groups", ((tuple(flat.views), {}),))
    updater = Updater(Recipe(odd.get("factory", RULES["sgd"]), groups), flat.views, flat)
    assert not is_fused(updater)
    updater.step_along(filled(1, flat.table))


def test_whoever_watches_the_rule_sees_tensors() -> None:
    seen = []

    def watched(groups: Any) -> torch.optim.Optimizer:
        rule = torch.optim.SGD(groups, lr=0.1)
        rule.register_step_pre_hook(lambda r, *_: seen.append(len(r.param_groups[0]["params"])))
        return rule

    flat = filled(0)
    step(made(watched, flat, True), 0)
    assert seen == [len(SHAPES)]
