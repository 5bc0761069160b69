"""Computing in fewer bits: how far gradients are off, and how the scale of a loss is found."""

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.engine.local.split_worker import SplitWorker
from offbeat.model import precision as scale_module
from offbeat.model.precision import FIRST, LEAST, PATIENT, Scale
from offbeat.model.table import BySize, parameter_entries, place
from offbeat.split import passes as passes_module
from offbeat.split.channel import alone
from offbeat.split.layout import Layout
from offbeat.split.part import ALL, Part, PartSpec
from offbeat.split.passes import Passes
from offbeat.split.plan.blocks import whole
from offbeat.split.plan.cut import Cut
from offbeat.split.replica import PartReplica
from tests.contract.common import scratch

SGD = partial(torch.optim.SGD, lr=0.01)
# Of the largest element of a gradient; docs/layouts.md promises these.
ALLOWED = {"bf16": 0.03, "fp16": 0.01}


def problem(hidden: int = 32) -> tuple[nn.Module, TensorDataset]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(8, hidden), nn.Tanh(), nn.LayerNorm(hidden), nn.Linear(hidden, 4)
        )
        return model, TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))


def part(model: nn.Module, data: TensorDataset, loss: Any = F.cross_entropy, **layout: Any) -> Part:
    cut = Cut.of(Layout(**layout), model, whole(model), (0,))
    return Part(model, PartSpec(cut, ALL, alone(), Reader(data), loss))


def gradients(made: Part) -> dict[str, Tensor]:
    made.compute(Lease(0, 0, 64))
    return {name: p.grad for name, p in made.owned().items() if p.grad is not None}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_in_fewer_bits_are_near(precision):
    model, data = problem()
    wanted, found = gradients(part(model, data)), gradients(part(model, data, precision=precision))
    shares = []
    for name, gradient in wanted.items():
        assert found[name].dtype == torch.float32
        shares.append(((found[name] - gradient).abs().max() / gradient.abs().max()).item())
    assert 1e-5 < max(shares) < ALLOWED[precision]  # near, and really in fewer bits


def test_gradients_too_small_for_float16_survive():
    model, data = problem()

    def faint(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * 1e-7

    wanted = gradients(part(model, data, faint))["0.weight"]
    scaled = part(model, data, faint, precision="fp16")
    assert torch.allclose(gradients(scaled)["0.weight"], wanted, rtol=0, atol=0.01 * wanted.max())
    assert scaled.loss == pytest.approx(
        F.cross_entropy(model(data[:][0]), data[:][1]).item() * 1e-7, rel=0.01
    )
    scaled.scale.value = 1.0
    assert not gradients(scaled)["0.weight"].any()  # and without the scale they do not


def test_a_scale_halves_at_once_and_doubles_in_time():
    scale = Scale()
    assert scale.begin() == FIRST == 2.0**16
    scale.overflowed()
    assert [scale.begin() for _ in range(PATIENT)] == [FIRST / 2] * PATIENT
    assert scale.begin() == FIRST
    scale.overflowed()
    assert scale.begin() == FIRST / 2
    again = Scale()
    again.load_state(scale.state())
    assert again == scale


def test_a_scale_that_finds_no_end_says_so():
    scale = Scale(LEAST)
    with pytest.raises(ob.RunError, match=r"not finite even if .*precision=bf16"):
        scale.overflowed()


def test_a_checkpoint_has_the_scale():
    model, data = problem()
    tables = place(parameter_entries(model), BySize())
    one, other = (PartReplica(part(model, data, precision="fp16"), tables) for _ in range(2))
    one.recover({})
    other.load_state({name: tensor.clone() for name, tensor in one.state().items()})
    assert other.part.scale == Scale(FIRST / 2)


def test_autocast_is_of_the_device_where_the_tensors_are(monkeypatch):
    asked = []

    def note(device: str, dtype: torch.dtype) -> Any:
        asked.append((device, dtype))
        return nullcontext()

    monkeypatch.setattr(scale_module.torch, "autocast", note)
    Passes(nn.Linear(2, 2, device="meta"), "fp16").forward(0, torch.zeros(1, 2, device="meta"))
    assert asked == [("meta", torch.float16)]
    assert passes_module.autocast is scale_module.autocast


# ---------------------------------------------------------------- runs


def loud(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients overflow until the scale has been halved some times."""
    return F.cross_entropy(output, target) * 100


@pytest.mark.parametrize("layout", ["precision=fp16", "pp=2,precision=fp16"])
@pytest.mark.parametrize("discipline", ["asp", "local:2"])
def test_contributions_that_overflow_are_left_out(layout, discipline):
    model, data = problem()
    with scratch() as folder:
        done = ob.train(
            copy.deepcopy(model), data, loud, discipline=discipline,
            optimizer=partial(SGD, lr=1e-5), workers=1, batch_size=4, epochs=2, layout=layout,
            engine="local", out=folder / "run",
        )  # fmt: skip
        assert 0 < done.figures.skipped < 10
        assert sum(row["skipped"] for row in done.figures.ledger) > 0
        assert all(row["applied"] + row["skipped"] == 64 for row in done.figures.ledger)
        ob.replay(folder / "run", model, data, loud, optimizer=partial(SGD, lr=1e-5)).check()
        simulated = ob.train(
            model, data, loud, discipline=discipline, optimizer=partial(SGD, lr=1e-5), workers=1,
            batch_size=4, epochs=2, layout=layout, engine="sim",
        )  # fmt: skip
        assert simulated.figures.parameter_hash == done.figures.parameter_hash


def test_one_process_needs_no_group(monkeypatch):
    """With the same bits as without a layout, and large gradients stream out as there."""
    monkeypatch.setattr(SplitWorker, "group", None)
    model, data = problem(hidden=20_000)
    runs = [
        ob.train(
            copy.deepcopy(model), data, F.cross_entropy, optimizer=SGD, workers=2, batch_size=8,
            engine="local", **options,
        )
        for options in ({}, {"layout": "pp=1"}, {"layout": "precision=bf16"})
    ]  # fmt: skip
    plain, layout, half = (done.figures.parameter_hash for done in runs)
    assert plain == layout != half


def test_a_replica_in_one_process_streams_its_gradients():
    model, data = problem(hidden=40_000)
    tables = place(parameter_entries(model), BySize())
    assert PartReplica(part(model, data), tables).stream() is not None
    assert PartReplica(part(model, data, precision="bf16"), tables).stream() is not None
    assert PartReplica(part(model, data, precision="fp16"), tables).stream() is None
