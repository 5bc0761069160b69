"""Parameters in bfloat16 and float16: to the last bit it does not matter where a tensor lies."""

import copy
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.data.reader import Reader
from tests.contract.common import Problem, assert_same_bits, check_run, run

HALVES = [torch.bfloat16, torch.float16]
RULES = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.03, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.01, eps=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-4),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.01, eps=1e-4),
}


def net() -> nn.Module:
    """Sizes that leave a rest whatever the width of a vector."""
    return nn.Sequential(nn.Linear(3, 19), nn.Tanh(), nn.Linear(19, 7), nn.Tanh(), nn.Linear(7, 2))


def halves(dtype: torch.dtype, samples: int = 40) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = net().to(dtype)
        inputs, target = torch.randn(samples, 3).to(dtype), torch.randn(samples, 2).to(dtype)
    return Problem(model, TensorDataset(inputs, target))


def plain(what: Problem, optimizer: Any, epochs: int = 2, clip: float | None = None) -> nn.Module:
    model = copy.deepcopy(what.model)
    rule = optimizer(model.parameters())
    for epoch in range(epochs):
        for rows in Reader(what.data, 0).order(epoch).split(4):
            inputs, target = (tensor[rows] for tensor in what.data.tensors)
            rule.zero_grad()
            F.mse_loss(model(inputs), target).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            rule.step()
    return model


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_one_worker_is_plain_pytorch(sim_only, dtype, rule, clip):
    what = halves(dtype)
    limit = None if clip is None else ob.Clip(norm=clip)
    got = run(sim_only, what, "asp", workers=1, optimizer=RULES[rule], clip=limit)
    assert_same_bits(got.model, plain(what, RULES[rule], clip=clip))


@pytest.mark.parametrize("shards", [1, 3, 5])
@pytest.mark.parametrize("dtype", HALVES)
def test_one_real_worker_is_plain_pytorch(local_only, dtype, shards):
    what = halves(dtype)
    got = run(local_only, what, "bsp", workers=1, shards=shards, optimizer=RULES["momentum"])
    assert_same_bits(got.model, plain(what, RULES["momentum"]))


NAMES = ["bsp", "soft:2", "asp:weigh=dc(0.5)", "average:2", "diloco:2", "bmuf:2", "asup:2"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", NAMES)
def test_shards_change_no_bit(sim_only, name, dtype):
    what, found = halves(dtype), []
    optimizer = None if name.startswith("asup") else RULES["momentum"]
    for shards in (1, 2, 3, 5):
        got = run(sim_only, what, name, workers=3, shards=shards, optimizer=optimizer)
        found.append(got.parameter_hash)
    assert len(set(found)) == 1


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_a_log_replays(engine, shards, dtype, rule, tmp_path):
    what = halves(dtype)
    for name in ("bsp", "soft:2"):
        out = tmp_path / name
        run(engine, what, name, workers=3, shards=shards, optimizer=RULES[rule], out=out)
        check_run(out, what)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["bsp", "average:2"])
def test_all_reduce_makes_the_same_bits(local_only, workers, dtype, name, tmp_path):
    what = halves(dtype)
    run(
        local_only, what, name, via="allreduce", workers=workers, optimizer=RULES["momentum"],
        out=tmp_path / "run",
    )  # fmt: skip
    check_run(tmp_path / "run", what)  # with a store


@pytest.mark.parametrize(
    "layout", ["pp=2,microbatches=2,split=count", "pp=3,microbatches=1,split=count,schedule=stash"]
)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_split_replica_replays(local_only, layout, dtype, tmp_path):
    what = halves(dtype)
    run(
        local_only, what, "asp", workers=2, layout=layout, shards=2, optimizer=RULES["momentum"],
        out=tmp_path / "run",
    )  # fmt: skip
    check_run(tmp_path / "run", what)


class Shared(nn.Module):
    layout_shards: ClassVar = {"up": "gathered"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 22), nn.Linear(22, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return result


def test_parts_of_a_tensor_replay_or_are_refused(local_only, tmp_path):
    what = halves(torch.bfloat16)._replace(model=Shared().bfloat16())
    how: dict[str, Any] = {"workers": 2, "layout": "tp=2", "optimizer": RULES["momentum"]}
    run(local_only, what, "asp", out=tmp_path / "run", **how)
    check_run(tmp_path / "run", what)
    with pytest.raises(ob.ConfigError, match=r"'up.weight' has fewer than 32 bits"):
        run(local_only, what, "local:2", **how)


def test_a_run_of_old_replays_as_it_began(sim_only, tmp_path, monkeypatch):
    what = halves(torch.bfloat16)
    how: dict[str, Any] = {"workers": 3, "optimizer": RULES["momentum"]}
    with monkeypatch.context() as before:
        before.setattr("offbeat.config.describe.NUMERICS", 2)
        old = run(sim_only, what, "bsp", out=tmp_path / "run", **how)
    check_run(tmp_path / "run", what)
    assert old.parameter_hash != run(sim_only, what, "bsp", **how).parameter_hash
