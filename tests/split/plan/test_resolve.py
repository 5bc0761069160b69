"""From a layout to the cut of a model: names and owners, and every refusal with its remedy."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.discipline.course import as_course
from offbeat.split.layout import as_layout
from offbeat.split.plan.blocks import find
from offbeat.split.plan.cut import Cut, ProcessTensors
from offbeat.split.plan.resolve import RunAround, resolve
from tests.split.models import WIDTH, WORDS, Carrying, Opaque, Tied, codes, rows

LEAD = RunAround(as_course(ob.parse("asp")), 8)


def cut_at(model: nn.Module, text: str, starts: tuple[int, ...]) -> Cut:
    return Cut.of(as_layout(text), model, find(model), starts)


# ---------------------------------------------------------------- what a cut says


def test_a_tied_parameter_belongs_to_the_first_stage_that_has_it() -> None:
    cut = cut_at(Tied(3), "pp=3", (0, 2, 5))
    assert cut.layout.split == ("layers.1", "head")
    assert cut.stages == 3
    mine = ["layers.0.inner.0.bias", "layers.0.inner.0.weight", "place", "token.weight"]
    assert sorted(cut.owned(0)) == mine
    assert cut.owned(2) == []
    assert cut.borrowed(2) == [ProcessTensors("head.weight", "token.weight", 0)]
    assert cut.borrowed(0) == cut.borrowed(1) == []
    assert cut.borrowers(0) == [("token.weight", 2)]
    assert cut.borrowers(1) == cut.borrowers(2) == []
    assert cut.ties() == ["token.weight"]


def test_tables_are_of_stages_that_own_anything() -> None:
    cut = cut_at(Tied(3), "pp=3", (0, 2, 5))
    assert cut.groups() == (tuple(cut.owned(0)), tuple(cut.owned(1)))
    assert cut.tables_of([0]) == [0]
    assert cut.tables_of([1]) == [1]
    assert cut.tables_of([2]) == []
    assert cut.tables_of([0, 1, 2]) == [0, 1]
    bare = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    late = cut_at(bare, "pp=3", (0, 1, 2))
    assert late.groups() == (("1.weight", "1.bias"), ("2.weight", "2.bias"))
    assert [late.tables_of([stage]) for stage in range(3)] == [[], [0], [1]]


def test_every_trained_parameter_is_owned_once_and_none_that_is_frozen() -> None:
    model = Carrying()
    model.second.requires_grad_(False)
    for starts in ((0, 1), (0, 2, 4), (0, 1, 2, 3)):
        cut = cut_at(model, f"pp={len(starts)}", starts)
        owned = [name for stage in range(cut.stages) for name in cut.owned(stage)]
        wanted = [name for name, p in model.named_parameters() if p.requires_grad]
        assert sorted(owned) == sorted(wanted)


def test_processes_take_stages_in_turns() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    cut = cut_at(model, "pp=2,schedule=interleaved", (0, 1, 2, 3))
    assert [cut.process_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert cut.stages_of(0) == [0, 2]
    assert cut.stages_of(1) == [1, 3]


def test_a_stage_has_parameters_of_its_own_over_the_memory_of_the_model() -> None:
    model = Tied(3)
    cut = cut_at(model, "pp=2", (0, 2))
    first, last = cut.stage(model, 0), cut.stage(model, 1)
    token, head = dict(first.named_parameters())["token.weight"], last.get_parameter("head.weight")
    assert token is not head
    assert token is not model.token.weight
    assert token.data_ptr() == head.data_ptr() == model.token.weight.data_ptr()
    head.sum().backward()
    assert token.grad is None
    assert model.token.weight.grad is None


def test_copies_of_a_stage_share_buffers_and_nothing_else() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    cut = cut_at(model, "pp=2", (0, 1))
    one = cut.stage(model, 1)
    other = cut.stage(model, 1, buffers_of=one)
    one.train()
    other.train()
    other(torch.randn(4, 2))
    assert torch.equal(*(dict(s.named_buffers())["1.running_mean"] for s in (one, other)))
    assert dict(one.named_buffers())["1.running_mean"].abs().max() > 0
    assert model[1].running_mean.abs().max() == 0
    assert one.get_parameter("1.weight") is not other.get_parameter("1.weight")


# ---------------------------------------------------------------- settling


def sample_of(model: nn.Module) -> Callable[[], Any]:
    return lambda: codes()[:4].repeat(2, 1) if isinstance(model, Tied) else rows(8)


def settled(text: str, model: nn.Module, around: RunAround = LEAD) -> Cut:
    return resolve(text, model, around, sample_of(model))


def test_a_split_that_is_measured_is_settled_as_names() -> None:
    """So that every process and every replay cuts at the same place, whatever they measure."""
    model = Carrying().double()
    for split in ("time", "parameters", "count"):
        cut = settled(f"pp=2,split={split}", model)
        assert isinstance(cut.layout.split, tuple)
        again = settled(str(cut.layout), model)
        assert again.starts == cut.starts
        assert again.layout == cut.layout
        assert (cut.predicted is None) == (split == "count")


def test_a_dataset_smaller_than_a_batch_is_no_reason_to_refuse() -> None:
    """Its only batch is a short one, and these are allowed."""
    model = Carrying().double()
    for split in ("time", "count", "end"):
        cut = resolve(
            f"pp=2,microbatches=4,split={split}",
            model,
            RunAround(as_course(ob.parse("asp")), 8),
            lambda: rows(3),
        )
        assert cut.stages == 2


def test_replicas_are_no_part_of_the_cut() -> None:
    assert settled("replicas=3,pp=2,split=count", Carrying().double()).layout.replicas == 1


def test_microbatches_alone_leave_the_model_whole() -> None:
    cut = settled("microbatches=4", Opaque().double())
    assert cut.starts == (0,)
    assert cut.owned(0) == ["one.weight", "one.bias", "two.weight", "two.bias"]


AROUND = {
    "a loss of the whole model": (
        RunAround(as_course(ob.parse("asp")), 8, whole_loss=True),
        "pp=2",
        "write the loss as loss(output, target), or leave layout out",
    ),
    "accumulate": (
        RunAround(as_course(ob.parse("asp")), 8, accumulate=2),
        "pp=2,microbatches=4",
        "write layout='microbatches=8' alone",
    ),
    "hogwild": (
        RunAround(as_course(ob.parse("hogwild")), 8),
        "pp=2",
        "use asp, or leave layout out",
    ),
    "local steps under stash": (
        RunAround(as_course(ob.parse("local:2")), 8),
        "pp=2,schedule=stash",
        "use bsp, ssp, asp or soft, or schedule=1f1b",
    ),
    "backup workers under 2bw": (
        RunAround(as_course(ob.BSP(backup=1)), 8),
        "pp=2,schedule=2bw",
        "bsp:backup=1 drops one: write schedule=1f1b",
    ),
    "leaving out under 2bw": (
        RunAround(as_course(ob.parse("asp")), 8, skips=True),
        "pp=2,schedule=2bw",
        "nonfinite='skip' leaves out one: write schedule=1f1b",
    ),
    "a codec": (
        RunAround(as_course(ob.parse("asp")), 8, codec=True),
        "pp=2",
        "leave codec out, or write pp=1",
    ),
    "a norm at the worker": (
        RunAround(as_course(ob.parse("local:2")), 8, clips_norm=True),
        "pp=2,split=end",
        "use clip=ob.Clip(value=...), or a discipline that sends gradients",
    ),
}


@pytest.mark.parametrize("kind", AROUND)
def test_what_does_not_go_with_a_layout_is_refused_with_its_remedy(kind: str) -> None:
    around, text, remedy = AROUND[kind]
    with pytest.raises(ob.ConfigError) as caught:
        settled(text, Carrying().double(), around)
    assert str(caught.value).endswith(remedy)


def test_ties_are_refused_where_stages_make_steps_of_their_own() -> None:
    model = Tied(3)
    with pytest.raises(ob.ConfigError, match=r"token\.weight is tied over several stages, which"):
        settled("pp=2,split=layers.1", model, RunAround(as_course(ob.parse("easgd:2")), 8))
    settled("pp=2,split=layers.1", model, RunAround(as_course(ob.parse("asp")), 8))


def test_a_stage_without_parameters_is_refused_where_it_would_make_steps() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).double()
    with pytest.raises(ob.ConfigError, match="stage 1 has no parameters of its own to train"):
        settled("pp=3,split=count", model, RunAround(as_course(ob.parse("local:2")), 9))
    settled("pp=2,split=1", model, RunAround(as_course(ob.parse("local:2")), 8))


# ---------------------------------------------------------------- as a user meets them


class Wrapped(nn.Module):
    """Looks like a wrapper that merges gradients while the backward pass goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.inner(value)
        return result


Wrapped.__name__ = "DistributedDataParallel"


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


def wrapped() -> nn.Module:
    return nn.Sequential(Wrapped(), nn.Tanh(), nn.Linear(WIDTH, 2)).double()


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "more stages than blocks": (
        chain,
        {"layout": "pp=4"},
        ["the model has 3 blocks, too few for 4 stages", "write pp=3 or less"],
    ),
    "too few blocks for interleaved": (
        chain,
        {"layout": "pp=2,schedule=interleaved"},
        ["too few for pp=2 processes with 2 stages each", "or schedule=1f1b"],
    ),
    "microbatches that do not divide the batch": (
        chain,
        {"layout": "pp=2,microbatches=3"},
        ["a batch of 8 does not divide into 3 microbatches", "microbatches=2 or a batch size of 9"],
    ),
    "a name that is not there": (
        chain,
        {"layout": "pp=2,split=layers.2"},
        ["there is no block 'layers.2'", "the model has 0, 1, 2"],
    ),
    "fewer microbatches than stages": (
        chain,
        {"layout": "pp=3,microbatches=2"},
        ["needs at least 3 microbatches, not 2", "write microbatches=3, or schedule=gpipe"],
    ),
    "fewer microbatches than stages under 2bw": (
        chain,
        {"layout": "pp=2,microbatches=1,schedule=2bw"},
        ["needs at least 2 microbatches, not 1", "or schedule=stash"],
    ),
    "wrappers under zero-bubble": (
        wrapped,
        {"layout": "pp=2,schedule=zero-bubble"},
        ["wrapped in DistributedDataParallel", "unwrap them, or write schedule=1f1b"],
    ),
    "workers and replicas that differ": (
        chain,
        {"layout": "replicas=3,pp=2", "workers": 2},
        ["workers=2, but the layout has replicas=3", "leave one of them out"],
    ),
    "a cluster and replicas that differ": (
        chain,
        {"layout": "replicas=3,pp=2", "cluster": "1ms,2ms", "workers": None, "engine": "sim"},
        ["the cluster describes 2", "leave workers out"],
    ),
    "a loss of the whole model": (
        chain,
        {"layout": "pp=2", "loss": ob.BatchLoss(lambda model, batch: model(batch[0]).sum())},
        ["ob.BatchLoss calls the whole model", "write the loss as loss(output, target)"],
    ),
    "a codec": (
        chain,
        {"layout": "pp=2", "codec": "int8"},
        ["leave codec out, or write pp=1"],
    ),
    "overlap with an asynchronous pipeline": (
        chain,
        {"layout": "pp=2,schedule=2bw", "overlap": True},
        ["overlaps by itself: leave overlap out"],
    ),
    "an asynchronous pipeline in the simulator": (
        chain,
        {"layout": "pp=2,schedule=2bw", "engine": "sim"},
        ["use engine='local', or schedule=1f1b"],
    ),
    "a model that does not say its blocks": (
        lambda: Opaque().double(),
        {"layout": "pp=2"},
        ["its blocks are not known", 'layout_blocks = ["one", "two"]'],
    ),
    "no layout at all": (
        chain,
        {"layout": 2},
        ["a layout must be an ob.Layout or a string such as 'pp=2,microbatches=8'"],
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bad_input_is_refused_before_any_process(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, options, told = REFUSED[kind]

    def fork() -> int:
        raise AssertionError("a process is started")

    monkeypatch.setattr(os, "fork", fork)
    data = TensorDataset(rows(16), torch.zeros(16, 2, dtype=torch.float64))
    given: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "workers": 1 if "replicas" not in str(options["layout"]) else None,
        "batch_size": 8,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
    } | options
    with pytest.raises(ob.ConfigError) as caught:
        ob.train(make(), data, given.pop("loss"), **given)
    for words in told:
        assert words in str(caught.value)


def test_the_nearest_name_is_suggested() -> None:
    data = TensorDataset(codes()[:4], torch.zeros(4, 4, dtype=torch.int64))
    with pytest.raises(ob.ConfigError, match=r"no block 'layer\.1' \(did you mean 'layers\.1'\?\)"):
        ob.train(
            Tied(3), data, lambda o, t: o.sum() / WORDS, layout="pp=2,split=layer.1", batch_size=4
        )


class Halve(nn.Module):
    """Writes in place what it is given."""

    def forward(self, value: Tensor) -> Tensor:
        return value.mul_(0.5)


@pytest.mark.parametrize("split", ["time", "count"])
def test_the_sample_is_not_written_by_blocks_that_write_in_place(split: str) -> None:
    model = nn.Sequential(Halve(), nn.Linear(WIDTH, WIDTH), Halve(), nn.Linear(WIDTH, 2)).double()
    sample = rows(8)
    ob.explain(f"pp=2,split={split}", model, sample)
    resolve(f"pp=2,split={split}", model, LEAD, lambda: sample)
    assert torch.equal(sample, rows(8))
