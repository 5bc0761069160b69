"""Models in parts: found without tracing, named as before, and the same function."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offbeat as ob
from offbeat.recipes.chars import CharTransformer
from offbeat.recipes.mnist import ConvNet
from offbeat.recipes.resnet import ResNet50
from offbeat.split.plan import blocks as finding
from offbeat.split.plan.blocks import Block, Tie, find, ties, wrappers
from offbeat.split.stages import Stage, check_same, cut, tied_across
from offbeat.split.tree import mapped, tensors
from tests.split.models import WIDTH, Carrying, Opaque, Residual, Tied, codes, nested, rows

EXACT = 1e-12

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "nested": (nested, rows),
    "tied": (Tied, codes),
    "carrying": (Carrying, rows),
    "chars": (lambda: CharTransformer("abcdefghi", 4, 8, 2, 2), codes),
    "mnist": (ConvNet, lambda: torch.randn(2, 1, 28, 28, dtype=torch.float64)),
}


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model, sample = MODELS[name]
    return model().double(), sample()


def names(model: nn.Module) -> list[str]:
    return [block.name for block in find(model)]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def through(stages: list[Stage], value: Any) -> Tensor:
    """Forward, then backward stage by stage, with nothing but values passed between them."""
    passed: list[tuple[Any, Any]] = []
    for stage in stages:
        entered = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), value)
        # As after a transfer: what arrives is the stage's own to write to.
        value = stage(mapped(lambda t: t.clone() if t.requires_grad else t, entered))
        passed.append((entered, value))
    result: Tensor = value
    coming: list[Tensor | None] = [torch.ones_like(result)]
    for entered, left in reversed(passed):
        pairs = zip([t for t in tensors(left) if t.requires_grad], coming, strict=True)
        # A skip that a stage only passes on is a leaf, and its gradient is passed on as it came.
        known = [(tensor, grad) for tensor, grad in pairs if grad is not None]
        torch.autograd.backward([t for t, _ in known], [g for _, g in known])
        coming = [t.grad for t in tensors(entered) if t.requires_grad]
    return result.detach()


@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_the_other_are_the_model(name: str) -> None:
    model, sample = made(name)
    whole = model(sample)
    whole.backward(torch.ones_like(whole))
    wanted = gradients(model)
    blocks = find(model)
    for count in range(1, len(blocks) + 1):
        model.zero_grad()
        starts = [len(blocks) * stage // count for stage in range(count)]
        found = through(cut(model, blocks, starts), sample)
        assert torch.allclose(found, whole, rtol=0, atol=EXACT)
        got = gradients(model)
        assert got.keys() == wanted.keys()
        for key, gradient in got.items():
            assert torch.allclose(gradient, wanted[key], rtol=0, atol=EXACT), (count, key)


@pytest.mark.parametrize("name", MODELS)
def test_stages_share_out_the_state_under_its_full_names(name: str) -> None:
    model, _ = made(name)
    stages = cut(model, find(model), range(len(find(model))))
    state = model.state_dict()
    held = [key for stage in stages for key in stage.state_dict()]
    assert sorted(held) == sorted(state)
    for stage in stages:
        mine = stage.state_dict()
        assert all(mine[key].data_ptr() == state[key].data_ptr() for key in mine)
        stage.load_state_dict({key: torch.zeros_like(value) for key, value in mine.items()})
    assert all(not value.any() for value in model.state_dict().values())


def test_separate_copies_of_tied_stages_add_up_to_the_gradient() -> None:
    model, sample = made("tied")
    whole = model(sample)
    whole.backward(torch.ones_like(whole))
    blocks = find(model)
    found = ties(model, blocks)
    assert found == (Tie(("token.weight", "head.weight"), (0, 5)),)
    starts = [0, 2, 4]
    ((tie, held),) = tied_across(found, starts)
    assert (tie, held) == (found[0], (0, 2))
    assert tied_across(found, [0]) == []
    stages = [copy.deepcopy(stage) for stage in cut(model, blocks, starts)]
    for stage in stages:
        stage.zero_grad()
    through(stages, sample)
    parts = [dict(stages[s].named_parameters())[n] for s, n in zip(held, tie.names, strict=True)]
    total = sum(part.grad for part in parts if part.grad is not None)
    wanted = model.get_parameter("token.weight").grad
    assert wanted is not None
    assert torch.allclose(torch.as_tensor(total), wanted, rtol=0, atol=EXACT)
    assert all(not torch.allclose(p.grad, wanted) for p in parts if p.grad is not None)


def test_a_stage_moves_and_changes_mode_like_a_module() -> None:
    class Asking(nn.Module):
        layout_blocks = (("ask", "one"), "two")

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def ask(self, value: Tensor) -> Tensor:
            result: Tensor = self.one(value) if self.training else value
            return result

    stage = Stage(Asking(), find(Asking())[:1])
    value = torch.ones(1, 2)
    assert stage.eval()(value) is value
    assert stage.train()(value) is not value
    assert stage.double()(value.double()).dtype == torch.float64
    assert {name for name, _ in stage.named_modules()} == {"", "one"}


# ---------------------------------------------------------------- finding blocks


def test_blocks_in_the_order_they_run() -> None:
    assert names(nested()) == ["0.0", "0.1", "1", "2.0.0", "2.0.1", "2.1"]
    assert names(Tied()) == ["embed", "layers.0", "layers.1", "layers.2", "norm", "head"]
    assert names(Carrying()) == ["begin", "middle", "body.one", "body.two", "end"]
    again = nn.ReLU()
    assert names(nn.Sequential(again, nn.Tanh(), again)) == ["0", "1", "2"]
    assert names(nn.ModuleList([nn.ReLU(), nn.Tanh()])) == ["0", "1"]
    assert names(nn.ModuleDict({"a": nn.ReLU(), "b": nn.Tanh()})) == ["a", "b"]
    resnet = names(ResNet50(10))
    assert len(resnet) == 4 + 16 + 1
    assert resnet[4:6] == ["blocks.0", "blocks.1"]
    assert resnet[-1] == "classify"


def test_containers_that_do_more_than_run_in_order_stay_whole() -> None:
    class Twice(nn.Sequential):
        def forward(self, value: Tensor) -> Tensor:
            result: Tensor = super().forward(super().forward(value))
            return result

    hooked = nn.Sequential(nn.ReLU(), nn.Tanh())
    hooked.register_forward_hook(lambda module, given, made: made * 2)
    assert names(nn.Sequential(Twice(nn.ReLU(), nn.Tanh()), hooked)) == ["0", "1"]


def test_annotated_from_outside_with_a_function() -> None:
    model = Opaque()

    def both(owner: Any, value: Tensor) -> Tensor:
        result: Tensor = owner.one(value)
        return result

    model.layout_blocks = ["two", (both, "one")]
    assert names(model) == ["two", "both"]
    check_same(model, find(model), rows().float())


@pytest.mark.parametrize(
    ("annotation", "told"),
    [
        ([], "must list its blocks in order"),
        ("one", "must list its blocks in order"),
        (["one", "tow"], "'tow', which is no module of Opaque (did you mean 'two'?)"),
        (["one", "forward"], "write ('forward', ...) with the modules that it uses"),
        (["one", ("forwards", "two")], "no method of Opaque (did you mean 'forward'?)"),
        (["one", ("forward", "twoo")], "no parameter of Opaque (did you mean 'two'?)"),
        (["one", ()], "() in layout_blocks of Opaque is no block"),
        (["one", (3, "two")], "neither a method's name nor a function"),
        (["one"], "no block has 'two.weight': add its module to layout_blocks"),
    ],
)
def test_wrong_annotations(annotation: Any, told: str) -> None:
    model = Opaque()
    model.layout_blocks = annotation
    with pytest.raises(ob.ConfigError) as error:
        find(model)
    assert told in str(error.value)


def test_what_cannot_be_split_says_how_to_annotate() -> None:
    with pytest.raises(ob.ConfigError, match=r'layout_blocks = \["one", "two"\] in the class'):
        find(Opaque())
    with pytest.raises(
        ob.ConfigError, match="no modules inside, so it cannot be split: write pp=1"
    ):
        find(nn.Linear(2, 2))
    with pytest.raises(ob.ConfigError, match="is empty"):
        find(nn.Sequential())


def test_a_block_that_uses_more_than_it_says() -> None:
    model = Tied()
    model.layout_blocks = (("embed", "token"), ("later", "place"), "layers", "norm", "head")  # type: ignore[assignment]
    model.later = lambda value: value  # type: ignore[method-assign, assignment]
    stage = Stage(model, find(model)[:1])
    with pytest.raises(
        ob.ConfigError, match=r"'embed' uses 'place', .*add 'place' to its brackets"
    ):
        stage(codes())


def test_errors_inside_a_block_stay_what_they_are() -> None:
    def wrong(owner: Any, value: Any) -> Any:
        return value.missing

    model = Opaque()
    model.layout_blocks = [(wrong, "one"), "two"]
    with pytest.raises(AttributeError, match="missing"):
        Stage(model, find(model))(rows())


def test_blocks_may_draw_in_evaluation_mode_too() -> None:
    class Shaky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * (1 + random.random()) * float(np.random.rand()) + torch.rand(())

    model = nn.Sequential(Shaky(), nn.Linear(WIDTH, WIDTH), Shaky())
    check_same(model, find(model), torch.randn(3, WIDTH))


def test_blocks_that_are_another_function_are_refused() -> None:
    model = Opaque()
    model.layout_blocks = ["one", "two"]  # they run the other way round
    with pytest.raises(ob.ConfigError, match="do not give what the model gives"):
        check_same(model, find(model), torch.randn(3, WIDTH))
    noisy = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), Residual())
    before = copy.deepcopy(noisy.state_dict())
    check_same(noisy, find(noisy), torch.randn(3, WIDTH))
    assert noisy.training
    assert noisy[0].training
    assert all(torch.equal(before[key], value) for key, value in noisy.state_dict().items())


def test_wrappers_are_seen() -> None:
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = nn.Linear(2, 2)
    model = nn.Sequential(wrapped, nn.ReLU())
    assert wrappers(model) == ["DistributedDataParallel"]
    assert wrappers(nested()) == []
    with pytest.raises(ob.ConfigError, match="give the model itself"):
        find(wrapped)


def test_names_lead_to_the_first_block_inside() -> None:
    blocks = find(Tied())
    assert finding.number(blocks, "layers") == 1
    assert finding.number(blocks, "layers.2") == 3
    with pytest.raises(ob.ConfigError, match=r"no block 'layers.9' \(did you mean 'layers"):
        finding.number(blocks, "layers.9")
    many = [Block(f"b.{n}", (f"b.{n}",)) for n in range(20)]
    with pytest.raises(ob.ConfigError, match=r"b.3, ..., b.17"):
        finding.number(many, "x")
