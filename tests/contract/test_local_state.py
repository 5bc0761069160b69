"""The state of local optimisers, averaged: one that has never used a parameter has none of it."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.folder.checkpoint import RunFolder
from offbeat.model.table import under
from tests.contract.common import Problem, check_run, run

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.01)


class Branching(nn.Module):
    """Uses a branch for batches that ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.branch = nn.Linear(3, 2), nn.Linear(3, 2)
        self.never = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.trunk(x[:, 1:])
        return y + self.branch(x[:, 1:]) if x[0, 0] > 0 else y


def branching(asking: list[int], batches: int) -> Problem:
    """Batches of 4, of which some ask for the branch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = torch.randn(4 * batches, 4, dtype=torch.float64)
        y = torch.randn(4 * batches, 2, dtype=torch.float64)
        model = Branching().double()
    x[:, 0] = torch.tensor([float(row // 4 in asking) for row in range(len(x))])
    return Problem(model, TensorDataset(x, y), F.mse_loss)


def kept(folder: Any) -> dict[str, torch.Tensor]:
    found = RunFolder(folder).load()
    assert found is not None
    return under("store/updater/", found[0])


VARIANTS = [("sim", {}), ("local", {}), ("local", {"shards": 3}), ("local", {"via": "allreduce"})]


@pytest.mark.parametrize("asking", [[0], [1]])
@pytest.mark.parametrize(("engine", "options"), VARIANTS)
def test_what_one_worker_alone_has_learnt_is_kept(engine, options, asking, tmp_path):
    """Half of it would be less momentum than anybody has, and none would be none."""
    what, out = branching(asking, batches=4), tmp_path / "run"
    run(
        engine, what, "average:1", optimizer=MOMENTUM, workers=2, epochs=1, shuffle=False, out=out,
        checkpoint_every=1, **options,
    )  # fmt: skip
    (number,) = asking
    first = branching(asking, batches=4).model  # as it was
    x, y = (tensor[4 * number : 4 * number + 4] for tensor in what.data.tensors)
    F.mse_loss(first(x), y).backward()
    found = kept(out)
    assert torch.equal(found["branch.weight/momentum_buffer"], first.branch.weight.grad)
    assert torch.equal(found["branch.bias/momentum_buffer"], first.branch.bias.grad)
    assert not any(name.startswith("never") for name in found)
    check_run(out, what, 1)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM])
@pytest.mark.parametrize(("engine", "options"), VARIANTS)
def test_a_replay_knows_who_had_what(engine, options, optimizer, tmp_path):
    what, out = branching([1, 5, 6], batches=9), tmp_path / "run"
    run(engine, what, "average:2", optimizer=optimizer, workers=3, out=out, **options)
    check_run(out, what)
    assert {name.partition(".")[0] for name in kept(out)} == {"trunk", "branch"}


def test_where_stages_are_processes_of_their_own(local_only, tmp_path):
    """Each of them has told what it has; the first layer is frozen out of some batches."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y + self.rare(x) if x[0, 0] > 0 else y

    what = branching([1], batches=4)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(First(), nn.Linear(4, 2)).double()
    what, out = what._replace(model=copy.deepcopy(model)), tmp_path / "run"
    run(
        local_only, what, "average:1", optimizer=MOMENTUM, workers=2, epochs=1, shuffle=False,
        out=out, layout="pp=2,split=1,schedule=gpipe,microbatches=1",
    )  # fmt: skip
    assert ob.replay(out, *what).identical
    x, y = (tensor[4:8] for tensor in what.data.tensors)
    F.mse_loss(model(x), y).backward()
    assert torch.equal(kept(out)["0.rare.weight/momentum_buffer"], model[0].rare.weight.grad)
