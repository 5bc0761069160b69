"""Trials of a layout leave no trace: no buffer, no counter in Python, no generator has moved."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.setup import cut_of, make_job
from offbeat.data.reader import Reader
from offbeat.engine.local.verify import verify
from tests.contract.common import asked


class Counting(nn.Module):
    """A layer that counts its calls in every way, and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("new", torch.zeros(()))
        self.seen = 0
        self.list: list[int] = []

    def forward(self, value: Tensor) -> Tensor:
        assert isinstance(self.calls, Tensor)
        self.calls += 1
        self.new = self.new + 1
        self.seen += 1
        self.list.append(self.seen)
        random.random()
        np.random.rand()
        torch.rand(())
        return value + 0 * self.layer(value)


class Shared(nn.Module):
    """One whose layers processes can share."""

    layout_shards = {"up": "column", "down": "row"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.counts = nn.Linear(4, 8), nn.Linear(8, 4), Counting()

    def forward(self, value: Tensor) -> Tensor:
        return self.counts(self.down(F.relu(self.up(value))))


def chance() -> tuple[Any, ...]:
    numbers = np.random.get_state()
    return random.getstate(), numbers[1].tolist(), numbers[2], torch.get_rng_state().tolist()


def of(model: nn.Module) -> list[Any]:
    return [
        (int(m.calls), float(m.new), m.seen, m.list, m.training)  # type: ignore[arg-type]
        for m in model.modules()
        if isinstance(m, Counting)
    ]


DATA = TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("layout", ["pp=2", "pp=2,split=time", "pp=2,split=parameters", "tp=2"])
def test_a_model_that_is_cut_has_not_counted_anything(layout: str) -> None:
    model = Shared() if "tp" in layout else nn.Sequential(Counting(), nn.Linear(4, 4), Counting())
    next(m for m in model.modules() if isinstance(m, Counting)).eval()
    before = (of(model), chance())
    wanted = asked(model, DATA, F.mse_loss, "bsp", SGD, 1, 4, 1, layout=layout)
    assert cut_of(wanted, Reader(DATA, 0, True, None)) is not None
    assert (of(model), chance()) == before


def test_an_explanation_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(Counting(), nn.Linear(4, 4), Counting())
    model[0].eval()
    before = (of(model), chance())
    ob.explain("pp=2", model, torch.ones(4, 4))
    assert (of(model), chance()) == before


def test_so_does_a_look_whether_a_split_model_finds_the_same() -> None:
    model = nn.Sequential(Counting(), nn.Linear(4, 4), Counting())
    wanted = asked(model, DATA, F.mse_loss, "bsp", SGD, 1, 4, 1, layout="pp=2")
    job = make_job(wanted)
    before = (of(job.content.model), chance())  # type: ignore[union-attr]
    verify(job)
    assert (of(job.content.model), chance()) == before  # type: ignore[union-attr]
