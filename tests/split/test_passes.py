"""One stage at work: graphs that end where it ends, and backward passes in two halves."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offbeat.split.passes import Passes

WIDTH = 4


def wide() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Beside(nn.Module):
    """A weight that joins the way from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.alone = wide(), nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.inner(value) * self.alone.exp()
        return result


class Off(Beside):
    """A weight that is not on the way from the input at all."""

    def forward(self, value: Tensor) -> Any:
        return self.inner(value), self.alone.exp()


class Twice(nn.Module):
    """One weight that is used two times, and a way past it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = wide()

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = value + self.inner(self.inner(value).tanh())
        return result


class Pair(nn.Module):
    """Takes a pair and gives a dict; one of its outputs needs no input at all."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = wide(), wide()

    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, Any]:
        return {"a": self.one(pair[0]), "b": [self.two(pair[1]) + pair[0]], "c": "word"}


def frozen() -> nn.Module:
    model = nn.Sequential(wide(), nn.Tanh(), wide())
    model[0].requires_grad_(False)
    return model


STAGES = {
    "chain": lambda: nn.Sequential(wide(), nn.Tanh(), wide()),
    "beside": Beside,
    "twice": Twice,
    "norm": lambda: nn.Sequential(nn.LayerNorm(WIDTH), wide()),
    "in place": lambda: nn.Sequential(nn.ReLU(inplace=True), wide()),
    "frozen": frozen,
    "no weights": nn.Tanh,
    "all frozen": lambda: wide().requires_grad_(False),
}


def values(seed: int, taught: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)
    return made.requires_grad_(taught)


def made(kind: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return STAGES[kind]().double()


def gradients(stage: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in stage.named_parameters()}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, mine in one.items():
        theirs = other[name]
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taught", [True, False])
@pytest.mark.parametrize("kind", STAGES)
def test_two_halves_of_a_backward_pass_are_one(kind: str, taught: bool) -> None:
    """Over several microbatches, the second halves of which come late: gradients add up."""
    whole, split = Passes(made(kind)), Passes(made(kind))
    for key in range(3):
        entered, back = values(key, taught), values(9 + key, taught=False)
        out = whole.forward(key, entered)
        assert torch.equal(out, split.forward(key, entered))
        grads = [back] if out.requires_grad else []
        wanted = whole.backward(key, grads)
        found = split.backward_input(key, grads)
        assert_equal(dict(enumerate(wanted)), dict(enumerate(found)))
    for key in range(3):
        split.backward_weight(key)
    assert_equal(gradients(whole.stage), gradients(split.stage))
    assert not whole.flights
    assert not split.flights


def test_a_weight_off_the_way_from_the_input_makes_passes_whole() -> None:
    """torch finds weights from the input on, and would leave this one out."""
    stage = Off().double()
    whole, split = Passes(copy.deepcopy(stage)), Passes(stage)
    for key in range(3):
        seeds = [values(5, taught=False), values(6, taught=False)[0]]
        whole.forward(key, values(key))
        split.forward(key, values(key))
        wanted = whole.backward(key, seeds)
        found = split.backward_input(key, seeds)
        assert_equal(dict(enumerate(wanted)), dict(enumerate(found)))
        split.backward_weight(key)
        assert split.halves is False
    assert_equal(gradients(whole.stage), gradients(split.stage))
    ordinary = Passes(made("chain"))
    ordinary.forward(0, values(0))
    ordinary.backward_input(0, [values(5, taught=False)])
    assert ordinary.halves is True


def test_the_second_half_is_really_put_off() -> None:
    passes = Passes(made("chain"))
    for key in range(2):
        passes.forward(key, values(key))
        passes.backward_input(key, [values(5, taught=False)])
    assert all(gradient is None for gradient in gradients(passes.stage).values())
    passes.backward_weight(0)
    passes.backward_weight(1)
    assert all(gradient is not None for gradient in gradients(passes.stage).values())


def test_a_graph_ends_where_the_stage_ends() -> None:
    first, second = Passes(made("chain")), Passes(made("norm"))
    handed = first.forward(0, values(0, taught=False))
    assert handed.is_leaf
    assert handed.requires_grad
    out = second.forward(0, handed, cost=lambda output: output.square().mean())
    assert out.shape == ()
    back = second.backward(0, [])
    first.backward(0, back)
    whole = nn.Sequential(made("chain"), made("norm"))
    whole(values(0, taught=False)).square().mean().backward()
    assert_equal(gradients(whole[0]), gradients(first.stage))
    assert_equal(gradients(whole[1]), gradients(second.stage))


@pytest.mark.parametrize("taught", [True, False])
def test_what_came_in_is_not_written_by_a_stage_that_begins_in_place(taught: bool) -> None:
    passes, entered = Passes(made("in place")), values(0, taught)
    before = entered.detach().clone()
    passes.forward(0, entered)
    assert torch.equal(entered, before)


def test_tensors_in_containers_have_gradients_in_their_order() -> None:
    stage = Pair().double()
    passes, one, two = Passes(stage), values(1), values(2)
    out = passes.forward("key", (one, two))
    assert out["c"] == "word"
    seeds = [values(3, taught=False), values(4, taught=False)]
    back = passes.backward("key", seeds)
    same = stage((one, two))
    wanted = torch.autograd.grad([same["a"], same["b"][0]], [one, two], seeds)
    assert_equal(dict(enumerate(wanted)), dict(enumerate(back)))


def test_an_output_that_nobody_behind_made_use_of() -> None:
    stage = Pair().double()
    passes = Passes(stage)
    passes.forward(0, (values(1), values(2)))
    back = passes.backward(0, [values(3, taught=False), None])
    assert back[0] is not None
    assert back[1] is None
    assert stage.two.weight.grad is None
    passes.forward(1, (values(1), values(2)))
    assert passes.backward(1, [None, None]) == [None, None]


def test_bf16_computes_in_bf16_and_leaves_parameters_alone() -> None:
    stage = wide()
    passes = Passes(stage, "bf16")
    out = passes.forward(0, torch.ones(2, WIDTH))
    assert out.dtype == torch.bfloat16
    passes.backward(0, [torch.ones(2, WIDTH, dtype=torch.bfloat16)])
    assert stage.weight.dtype == torch.float32
    assert stage.weight.grad is not None
    assert stage.weight.grad.dtype == torch.float32
