"""Which modules are shared among processes: by the names of `layout_shards`, or an error."""

from typing import ClassVar

import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.split import tensor_shards as shards
from offbeat.split.layout import Layout
from offbeat.split.one_process import check
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.explain import check as check_layout
from offbeat.split.plan.measure import profile


class Pair(nn.Module):
    """Two Linear modules that are shared, and what is between them."""

    layout_shards: ClassVar = {"up": "column", "down": "row"}

    def __init__(self, between: nn.Module | None = None, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.between = between or nn.GELU()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(self.between(self.up(value)))
        return result


class Words(nn.Module):
    """An embedding and a head that share a weight."""

    layout_shards: ClassVar = {"token": "row", "head": "gathered", "layers.*.up": "column"}

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Pair() for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.token.weight

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        value = self.token(codes)
        for layer in self.layers:
            value = layer(value)
        result: torch.Tensor = self.head(value)
        return result


def plan(model: nn.Module, **words: str) -> nn.Module:
    model.layout_shards = {name.replace("_", "."): word for name, word in words.items()}
    return model


def tried(model: nn.Module, sample: torch.Tensor, count: int = 2) -> None:
    layout = Layout(tp=count)
    cut = Cut.of(layout, model, check_layout(layout, model, len(sample)), (0,))
    found = shards.find(model, count)
    check(Cut(layout, cut.blocks, cut.starts, cut.held, shards=found), model, sample)


def test_names_of_annotated_modules_inside_have_their_prefix():
    found = shards.find(Words(), 2)
    assert found.words["layers.1.up"] == "column"
    assert found.words["layers.1.down"] == "row"
    assert found.dims["layers.0.up.weight"] == 0
    assert found.dims["layers.0.up.bias"] == 0
    assert found.dims["layers.0.down.weight"] == 1
    assert "layers.0.down.bias" not in found.dims
    assert found.dims["token.weight"] == 0


def test_parts_are_views_that_cover_the_whole():
    found = shards.find(Pair(), 2)
    whole = torch.arange(32.0).view(4, 8)
    parts = [found.own("down.weight", whole, shard) for shard in range(2)]
    assert torch.equal(torch.cat(parts, 1), whole)
    assert found.shape("down.weight", (4, 8)) == (4, 4)
    assert found.own("down.weight", torch.tensor(3.0), 1) == 3.0  # a counter of an optimiser
    assert found.own("down.bias", whole, 1) is whole


@pytest.mark.parametrize(
    ("model", "count", "told"),
    [
        (nn.Sequential(nn.Linear(2, 2)), 2, r"tp=2 needs to know .* Linear modules are 0"),
        (plan(Pair(), upp="column"), 2, r"'upp', which is no module of Pair \(did you mean 'up'"),
        (plan(Pair(), up="colum"), 2, r"'colum' of 'up' \(did you mean 'column'"),
        (plan(Pair(), between="column"), 2, r"'between', a GELU: only nn.Linear and nn.Embedding"),
        (Pair(), 3, r"size of 8, which does not divide by tp=3"),
        (plan(Words(), token="row"), 2, r"head and token share 'weight'"),
        (plan(Words(), token="column", head="gathered"), 2, r"share 'weight'"),
        (plan(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), **{"0": "row"}), 2, "max_norm"),
    ],
)
def test_plans_that_cannot_be(model, count, told):
    with pytest.raises(ob.ConfigError, match=told):
        shards.find(model, count)


def test_a_plan_must_be_a_dict():
    model = Pair()
    model.layout_shards = ["up"]
    with pytest.raises(ob.ConfigError, match="must be a dict"):
        shards.find(model, 2)


def test_plans_that_work_are_let_through():
    torch.manual_seed(0)
    tried(Pair(), torch.randn(3, 4))
    tried(Pair(), torch.randn(3, 4), 4)
    tried(Words(), torch.arange(6).view(3, 2))
    tried(plan(Pair(), down="row"), torch.randn(3, 4))  # of what is whole, each takes its part
    tried(plan(Words(), token="gathered", head="row"), torch.arange(6).view(3, 2))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (plan(Pair(), up="gathered", down="column"), "does not give what the whole model gives"),
        (Pair(nn.Softmax(-1)), "does not give what the whole model gives"),
        (Pair(nn.LayerNorm(8)), "fails .* write -1 for the number of heads"),
        (Pair(nn.PReLU()), "between.weight is used between a 'column' and a 'row'"),
    ],
)
def test_plans_that_would_compute_something_else(model, told):
    torch.manual_seed(0)
    with pytest.raises(ob.ConfigError, match=told):
        tried(model, torch.randn(3, 4))


# ---------------------------------------------------------------- what it costs


def test_what_can_be_shared_is_measured_and_divided():
    model, sample = plan(Words(), token="row", head="gathered"), torch.arange(6).view(3, 2)
    ticks = iter(range(10_000))
    blocks = check_layout(Layout(), model, 3)
    found = profile(model, blocks, sample, clock=lambda: next(ticks), words=shards.planned(model))
    (block,) = found.blocks
    pair = 4 * (8 * 4 + 8 + 4 * 8)  # bytes of up, its bias and down
    assert block.shared.parameters == block.shared.trained == 4 * 8 * 4 * 2 + 2 * pair
    values = 4 * 3 * 2 * 4  # bytes of what is between the blocks
    assert block.shared.summed == 3 * values  # of the embedding, and of down in both layers
    assert block.shared.joined == 2 * values  # eight words, where values have four numbers
    assert block.shared.returned == 3 * values  # to up in both layers, and to the head
    assert block.shared.time == pytest.approx(6 / 13)  # a tick in each module, and one before each

    half = block.divided(2, bandwidth=float("inf"))
    assert half.forward == pytest.approx(block.forward * (1 - 3 / 13))
    assert half.parameters == block.parameters - block.shared.parameters // 2
    assert half.exchanged == 3 * values + values + 3 * values
    slow = block.divided(2, bandwidth=1.0)
    assert slow.forward - half.forward == pytest.approx(4 * values)
    assert slow.backward - half.backward == pytest.approx(3 * values)
    assert block.divided(1, 1.0).seconds == block.seconds


def test_a_prediction_counts_what_is_shared():
    model, sample = Words(), torch.arange(6).view(3, 2)
    model.layout_blocks = ("token", "layers", "head")
    whole, half = (ob.explain(layout, model, sample) for layout in ("pp=1", "tp=2"))
    assert (whole.processes, half.processes) == (1, 2)
    assert half.per_process[0].memory.parameters < whole.per_process[0].memory.parameters
    assert half.per_process[0].sent > whole.per_process[0].sent == 0
    both = ob.explain("pp=2,tp=2,microbatches=3", model, sample)
    assert (both.processes, len(both.per_process)) == (4, 2)
