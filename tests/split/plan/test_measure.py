"""The profiler: what it counts, and that it leaves no trace; times come from a clock of ours."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import offbeat as ob
from offbeat.split.plan.blocks import find, whole
from offbeat.split.plan.costs import BlockCost, Machines, Profile, held
from offbeat.split.plan.measure import REPEATS, WARM_UP, profile, state_copies
from tests.split.models import WIDTH, Carrying, nested, rows

FLOAT = 4


def ticking(steps: list[float]) -> Callable[[], float]:
    """A clock whose readings come in pairs, the next of `steps` apart."""
    readings = (sum(steps[: (n + 1) // 2]) for n in count())
    return lambda: next(readings)


def test_times_are_medians_after_the_warm_up() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    passes = WARM_UP + 3
    # Of each pass: forward of both blocks, then backward of the second and of the first.
    steps = [[100.0] * 4] * WARM_UP + [[1, 2, 3, 4], [50, 2, 3, 5], [2, 20, 3, 60]]
    assert len(steps) == passes
    clock = ticking([float(step) for one in steps for step in one])
    found = profile(model, find(model), torch.ones(3, 2), repeats=3, clock=clock)
    assert [(block.forward, block.backward) for block in found.blocks] == [(2, 5), (2, 3)]
    assert found.times == (7, 5)
    assert found.samples == 3


def test_bytes_of_a_small_model() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False))
    model[2].weight.requires_grad_(False)
    one, two, three = profile(model, find(model), torch.ones(3, 4), repeats=1).blocks
    assert (one.parameters, one.trained) == (40 * FLOAT, 40 * FLOAT)
    assert (three.parameters, three.trained) == (16 * FLOAT, 0)
    assert (one.input, one.output, one.returned) == (12 * FLOAT, 24 * FLOAT, 24 * FLOAT)
    # The first keeps its input alone. The second keeps its output, and the third, whose weights
    # are frozen, nothing.
    assert (one.kept, two.kept, three.kept) == (0, 24 * FLOAT, 0)


def test_what_only_the_next_block_keeps_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    found = profile(model, find(model), torch.ones(3, 4), repeats=1)
    assert [block.kept for block in found.blocks] == [24 * FLOAT, 24 * FLOAT, 0]
    assert found.activations(0, 3) == (12 + 24 + 24) * FLOAT
    assert found.activations(1, 3) == (24 + 24) * FLOAT


def test_values_of_many_parts_and_numbers_of_other_kinds() -> None:
    model = Carrying().double()
    found = profile(model, find(model), rows(), repeats=1)
    begin, middle, *_ = found.blocks
    one = 5 * WIDTH * 8
    assert (begin.input, begin.output, begin.returned) == (one, 2 * one, 2 * one)
    assert middle.output == 2 * one


def test_whole_numbers_send_no_gradient_back() -> None:
    class Pair(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return value * 2, value.argmax(1)

    class Use(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0].gather(1, pair[1][:, None])

    model = nn.Sequential(nn.Linear(2, 4), Pair(), Use())
    found = profile(model, find(model), torch.ones(3, 2), repeats=1).blocks[1]
    assert (found.output, found.returned) == (12 * FLOAT + 3 * 8, 12 * FLOAT)


def test_half_precision_halves_what_crosses() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8))
    full = profile(model, find(model), torch.ones(3, 4), repeats=1)
    half = profile(model, find(model), torch.ones(3, 4), "bf16", repeats=1)
    assert half.blocks[0].output * 2 == full.blocks[0].output
    assert half.blocks[0].parameters == full.blocks[0].parameters


def test_no_trace_is_left() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(), nested())
    model[2].eval()
    model(torch.randn(4, WIDTH)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    profile(model, find(model), torch.randn(4, WIDTH), repeats=1)
    torch.set_rng_state(random)
    seen = torch.rand(1)
    torch.set_rng_state(random)
    profile(model, find(model), torch.ones(4, WIDTH), repeats=1)
    assert torch.equal(torch.rand(1), seen)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    after = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, after, strict=True))
    assert [module.training for module in model.modules()] == modes


def test_a_whole_model_is_one_block() -> None:
    model = nn.Linear(2, 2)
    (only,) = profile(model, whole(model), torch.ones(1, 2)).blocks
    assert only.parameters == 6 * FLOAT
    assert REPEATS > 1
    with pytest.raises(ob.ConfigError, match="repeats must be at least 1"):
        profile(model, whole(model), torch.ones(1, 2), repeats=0)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (None, 0),
    ],
)
def test_state_of_optimisers(optimizer: Callable[..., torch.optim.Optimizer], copies: int) -> None:
    assert state_copies(optimizer) == copies


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        (3, "must be what the model takes for one batch"),
        (torch.tensor(1.0), "first dimension of samples"),
        ((torch.ones(2, 2), torch.ones(3, 2)), "have 2 and 3 samples"),
    ],
)
def test_samples_that_are_no_batch(sample: Tensor, told: str) -> None:
    with pytest.raises(ob.ConfigError, match=told):
        ob.explain("pp=1", nn.Linear(2, 2), sample)


def test_what_a_process_holds() -> None:
    costs = (BlockCost("a", 1, 1, 100, 80, 30, 7, 9, 9), BlockCost("b", 1, 1, 10, 10, 3, 9, 1, 1))
    found = held(Profile(costs, 4), 0, 2, state_copies=2, in_flight=3)
    assert (found.parameters, found.gradients, found.state) == (110, 90, 180)
    assert found.activations == 3 * (7 + 30 + 3)
    assert found.total == 110 + 90 + 180 + 120
    assert Machines((1.0,)).transfer(10**9) == 0
    assert Machines((1.0,), bandwidth=100).transfer(50) == 0.5
