"""What a model or a dataset draws, from whichever generator, depends on seed and lease alone."""

import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import offbeat as ob
from offbeat.data.reader import Reader
from tests.contract.common import Problem, check_run, problem, run
from tests.engine.local.common import children

DRAWS: dict[str, Callable[[], float]] = {
    "python": lambda: random.random(),
    "numpy": lambda: np.random.rand(),
    "torch": lambda: torch.rand(()).item(),
}


class Noisy(nn.Module):
    """Draws one number for each batch, while it learns."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.5 + self.draw()) if self.training else x


def noisy(draw: str, samples: int = 24) -> Problem:
    def net() -> nn.Module:
        first, second = Noisy(DRAWS[draw]), Noisy(DRAWS[draw])
        return nn.Sequential(
            nn.Linear(3, 4), first, nn.Tanh(), nn.Linear(4, 4), second, nn.Linear(4, 2)
        )

    return problem(net, samples=samples)


def _seed(value: int) -> None:
    """Let the generators of this process stand anywhere."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"layout": "pp=1,microbatches=2"}], ids=str)
def test_a_model_that_draws_is_replayed(engine, draw, how, tmp_path):
    what = noisy(draw)
    _seed(1)
    one = run(engine, what, "asp", workers=2, out=tmp_path / "run", **how)
    _seed(2)
    check_run(tmp_path / "run", what)
    if engine == "sim":
        assert run(engine, what, "asp", workers=2, **how).parameter_hash == one.parameter_hash


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize(
    "layout",
    [
        "pp=2,microbatches=2,split=count",
        "pp=3,microbatches=3,split=count,schedule=zero-bubble",
        "pp=2,microbatches=1,split=count,schedule=stash",
    ],
)
def test_stages_that_draw_are_replayed(local_only, draw, layout, tmp_path):
    what = noisy(draw)
    run(local_only, what, "bsp", workers=1, layout=layout, out=tmp_path / "run", batch_size=6)
    check_run(tmp_path / "run", what)


class Shared(nn.Module):
    """Draws where it is whole, where it is in parts, and where it is whole again."""

    layout_shards: ClassVar = {"up": "column", "down": "row"}

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.noise = Noisy(draw)
        self.up, self.down, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.noise(torch.tanh(self.up(self.noise(x))))
        result: Tensor = self.head(self.noise(self.down(inner)))
        return result


@pytest.mark.parametrize("draw", DRAWS)
def test_shards_that_draw_are_replayed(local_only, draw, tmp_path):
    what = problem(lambda: Shared(DRAWS[draw]), samples=24)
    run(local_only, what, "asp", workers=1, layout="tp=2", out=tmp_path / "run")
    check_run(tmp_path / "run", what)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_generators_of_the_caller_stay_where_they_are(sim_only, draw):
    expected = {}
    for trains in (False, True):
        _seed(5)
        if trains:
            run(sim_only, noisy(draw), "asp", workers=2)
        expected[trains] = [drawn() for drawn in DRAWS.values()]
    assert expected[True] == expected[False]


# ---------------------------------------------------------------- datasets that draw


class Sometimes(Dataset):
    """Draws for a few samples only, none of which is in the batch that is tried first."""

    def __init__(self, draw: str, samples: int = 40) -> None:
        self.inside, self.draw = problem(samples=samples).data, DRAWS[draw]
        reader = Reader(self.inside)
        self.quiet = set(reader.order(0)[:8].tolist())

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.inside[index]
        return inputs if index in self.quiet else inputs + self.draw(), target


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 2))


@pytest.mark.parametrize("draw", DRAWS)
def test_data_that_draws_for_some_samples_only(engine, draw, tmp_path):
    what = problem(dropping)._replace(data=Sometimes(draw))
    got = run(engine, what, "asp", workers=2, out=tmp_path / "run")
    check_run(tmp_path / "run", what)
    assert "input_queue" not in got.summary().overlap  # nothing was read ahead, unasked


def test_data_that_draws_is_not_read_ahead(local_only):
    what = problem(dropping)._replace(data=Sometimes("torch"))
    what.data.quiet.clear()
    with pytest.raises(ob.ConfigError, match="prefetch=True, but the dataset draws"):
        run(local_only, what, "asp", workers=2, prefetch=True)
    assert not children()
