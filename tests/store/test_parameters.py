"""The store's numbers: one weighted step per update, whatever the sharding."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.codec import BF16, ErrorFeedback
from offbeat.data.lease import Lease
from offbeat.discipline.parts import Constant, DelayCompensation, GapAware, Weigh
from offbeat.errors import CheckpointError
from offbeat.log.records import Part
from offbeat.model.table import ByCount, BySize, Flat, Placement
from offbeat.rules.updater import Clip, Recipe, groups_of
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import Contribution

SGD = partial(torch.optim.SGD, lr=0.5)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def parameters(
    model: nn.Module,
    factory: Any = SGD,
    placement: Placement = BySize(1),  # noqa: B008
    weigh: Weigh = Constant(),  # noqa: B008
    clip: Clip | None = None,
    policies: dict[str, Any] | None = None,
) -> Parameters:
    recipe = Recipe(factory, groups_of(model, None), clip=clip)
    return Parameters(model, placement, recipe, weigh, policies)


def contribution(
    held: Parameters, seed: int, worker: int = 0, samples: int = 4, weight: float = 1.0, **rest: Any
) -> Contribution:
    flats = [Flat(table) for table in held.tables]
    for flat in flats:
        for name, view in flat.views.items():
            generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
            view.copy_(torch.randn(view.shape, generator=generator, dtype=torch.float64))
    part = Part(worker, 1, 0, 0, [Lease(0, 0, samples)], samples, weight=weight)
    part.skipped = rest.pop("skipped", False)
    return Contribution(part, flats, **rest)


def view(held: Parameters, name: str) -> Tensor:
    return next(flat.views[name] for flat in held.flats if name in flat.views)


def test_the_store_begins_with_the_models_parameters() -> None:
    model = net()
    held = parameters(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(view(held, name), parameter)
        assert view(held, name).data_ptr() != parameter.data_ptr()


def test_one_contribution_is_one_step() -> None:
    held = parameters(net())
    before = view(held, "0.weight").clone()
    one = contribution(held, 1)
    assert one.payload is not None
    assert held.update([one]) == 1.0
    assert torch.equal(view(held, "0.weight"), before - 0.5 * one.payload[0].views["0.weight"])


def test_several_are_weighted_by_samples_and_staleness() -> None:
    held = parameters(net())
    before = view(held, "2.bias").clone()
    one = contribution(held, 1, samples=6, weight=1.0)
    two = contribution(held, 2, worker=1, samples=2, weight=0.5)
    assert one.payload is not None
    assert two.payload is not None
    rate = held.update([one, two])
    assert rate == (6 + 1) / 8
    g1, g2 = (c.payload[0].views["2.bias"] for c in (one, two))
    torch.testing.assert_close(view(held, "2.bias"), before - 0.5 * (6 * g1 + 1 * g2) / 8)


def test_the_staleness_weight_acts_on_the_rate_not_on_a_normalised_gradient() -> None:
    held = parameters(net(), partial(torch.optim.Adam, lr=0.1))
    before = view(held, "2.bias").clone()
    held.update([contribution(held, 1, weight=0.25)])
    step = (view(held, "2.bias") - before).abs()
    torch.testing.assert_close(step, torch.full_like(step, 0.025), rtol=1e-4, atol=0)


def test_skipped_and_empty_contributions_change_nothing() -> None:
    held = parameters(net(), partial(torch.optim.SGD, lr=0.5, weight_decay=0.5, momentum=0.5))
    before = held.digest()
    assert held.update([contribution(held, 1, skipped=True)]) == 1.0
    assert held.update([contribution(held, 1, samples=0)]) == 1.0
    assert held.digest() == before


def test_a_skipped_one_does_not_dilute_the_others() -> None:
    one, other = parameters(net()), parameters(net())
    bad = contribution(one, 9, worker=1, skipped=True)
    assert bad.payload is not None
    bad.payload[0].views["2.bias"].fill_(torch.nan)
    one.update([contribution(one, 1), bad])
    other.update([contribution(other, 1)])
    assert one.digest() == other.digest()


@pytest.mark.parametrize("placement", [BySize(2), BySize(6), ByCount(3)])
@pytest.mark.parametrize("clip", [None, Clip(norm=0.5)])
@pytest.mark.parametrize("weigh", [Constant(), DelayCompensation(0.5), GapAware()])
def test_sharding_changes_no_bit(placement: Placement, clip: Clip | None, weigh: Weigh) -> None:
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    one = parameters(net(), factory, weigh=weigh, clip=clip)
    many = parameters(net(), factory, placement, weigh, clip)
    assert one.digest() == many.digest()
    for held in (one, many):
        held.remember(0, 0)
    for step in range(4):
        for held in (one, many):
            held.update([contribution(held, step), contribution(held, step + 9, worker=1)])
        assert one.digest() == many.digest(), f"step {step}"


def test_parameters_nobody_has_a_gradient_for_are_left_alone() -> None:
    held = parameters(net(), partial(torch.optim.SGD, lr=0.5, weight_decay=0.1))
    before = view(held, "0.bias").clone()
    other = view(held, "2.bias").clone()
    nothing = frozenset({"0.bias"})
    held.update([contribution(held, 1, absent=nothing | {"2.bias"}),
                 contribution(held, 2, worker=1, absent=nothing)])  # fmt: skip
    assert torch.equal(view(held, "0.bias"), before)
    assert not torch.equal(view(held, "2.bias"), other)


def test_what_travelled_is_what_is_applied() -> None:
    held = parameters(net())
    before = view(held, "2.bias").clone()
    one = contribution(held, 1)
    assert one.payload is not None
    feedback = ErrorFeedback(BF16())
    one.packed = {n: feedback.pack(n, v) for n, v in one.payload[0].views.items()}
    held.update([one])
    sent = one.payload[0].views["2.bias"].bfloat16().float()
    assert torch.equal(view(held, "2.bias"), before - 0.5 * sent)


def test_tied_and_frozen_parameters_come_out_as_they_went_in() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    frozen = model[2].weight.clone()
    held = parameters(model)
    held.update([contribution(held, 1)])
    held.export(model)
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, view(held, "0.weight"))
    assert torch.equal(model[2].weight, frozen)


def test_mixed_dtypes_are_updated_in_their_own_precision() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double(), nn.Linear(2, 2).half())
    held = parameters(model)
    one = contribution(held, 1)
    assert one.payload is not None
    before = {name: view(held, name).clone() for name in ("0.bias", "1.bias", "2.bias")}
    held.update([one])
    for name, dtype in (
        ("0.bias", torch.float32),
        ("1.bias", torch.float64),
        ("2.bias", torch.half),
    ):
        assert view(held, name).dtype is dtype
        gradient = one.payload[0].views[name]
        torch.testing.assert_close(view(held, name), before[name] - 0.5 * gradient)
    assert held.export(model)[2].bias.dtype is torch.half  # type: ignore[index]


def test_averaged_buffers_are_the_mean_over_workers() -> None:
    model = net()
    held = parameters(model)
    for worker, mean in ((0, 1.0), (1, 4.0)):
        statistics = {
            "1.running_mean": torch.full((4,), mean),
            "1.num_batches_tracked": torch.tensor(3 + worker),
        }
        held.update([contribution(held, worker, worker, statistics=statistics)])
    made = dict(held.export(net()).named_buffers())
    assert made["1.running_mean"].tolist() == [2.5] * 4
    assert made["1.num_batches_tracked"].item() == 3  # whole, as the first of two equals has it
    assert made["1.num_batches_tracked"].dtype is torch.int64
    assert made["1.running_var"].tolist() == [1.0] * 4  # nobody sent it
    held.forget(0)
    assert dict(held.export(net()).named_buffers())["1.running_mean"].tolist() == [4.0] * 4


def test_local_buffers_stay_what_they_were() -> None:
    held = parameters(net(), policies={"1.*": "local"})
    statistics = {"1.running_mean": torch.full((4,), 9.0)}
    held.update([contribution(held, 1, statistics=statistics)])
    assert dict(held.export(net()).named_buffers())["1.running_mean"].tolist() == [0.0] * 4


def test_the_workers_own_rules_are_averaged_by_samples() -> None:
    held = parameters(net())
    held.update([
        contribution(held, 1, 0, samples=3, updater={"x/momentum": torch.tensor([4.0])}),
        contribution(held, 2, 1, samples=1, updater={"x/momentum": torch.tensor([8.0])}),
    ])  # fmt: skip
    assert held.updater_state["x/momentum"].tolist() == [5.0]


@pytest.mark.parametrize("placement", [BySize(1), BySize(3)])
def test_the_state_goes_into_tensors_and_back(placement: Placement) -> None:
    factory = partial(torch.optim.Adam, lr=0.1)
    first = parameters(net(), factory, placement, DelayCompensation(0.1))
    first.remember(0, 0)
    statistics = {"1.running_mean": torch.full((4,), 9.0)}
    first.update([contribution(first, 1, statistics=statistics)])
    tensors = {path: tensor.clone() for path, tensor in first.state().items()}
    other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    second = parameters(other, factory, placement, DelayCompensation(0.1))
    second.load(tensors, first.meta())
    assert second.digest() == first.digest()
    for held in (first, second):
        held.update([contribution(held, 2)])
    assert second.digest() == first.digest()
    assert dict(second.export(net()).named_buffers())["1.running_mean"].tolist() == [9.0] * 4
    assert second.nbytes == first.nbytes


def test_a_state_fits_another_sharding_of_the_same_model() -> None:
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    first = parameters(net(), factory, BySize(1))
    first.update([contribution(first, 1)])
    second = parameters(net(), factory, BySize(3))
    second.begin_with(first.state(), first.meta(), "there")
    for held in (first, second):
        held.update([contribution(held, 2)])
    assert second.digest() == first.digest()


def test_beginning_with_another_rule_takes_what_fits() -> None:
    first = parameters(net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    first.update([contribution(first, 1)])
    adam = partial(torch.optim.Adam, lr=0.1)
    second = parameters(net(), adam)
    second.begin_with(first.state(), first.meta(), "there")
    assert second.digest() == first.digest()
    second.update([contribution(second, 2)])
    assert second.finite()


def test_beginning_with_another_model_names_the_first_tensor_that_differs() -> None:
    other = parameters(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
    with pytest.raises(CheckpointError, match=r"there is of another model: 'parameters/0\.weight'"):
        parameters(net()).begin_with(other.state(), other.meta(), "there")


def test_finite_looks_at_every_shard() -> None:
    held = parameters(net(), placement=BySize(3))
    assert held.finite()
    view(held, "2.bias")[0] = torch.inf
    assert not held.finite()


def test_a_state_that_some_lack_is_the_mean_over_the_others() -> None:
    held = parameters(net())
    held.update([
        contribution(held, 1, 0, samples=3, updater={}),
        contribution(held, 2, 1, samples=1, updater={"x/m": torch.tensor([8.0])}),
        contribution(held, 3, 2, samples=4, updater={"x/m": torch.tensor([3.0])}),
    ])  # fmt: skip
    assert held.updater_state["x/m"].tolist() == [4.0]
    assert held.unlearnt(["y/m", "x/m", "z/m"]) == [0, 2]
