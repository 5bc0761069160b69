"""A DataLoader in the place of a dataset: the run that its options would make, and its replay."""

import copy
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, WeightedRandomSampler

import offbeat as ob
from tests.contract.common import MOMENTUM, assert_same_bits, plain, problem


def test_one_worker_on_a_loader_is_plain_pytorch(engine: str) -> None:
    what = problem(samples=22)
    loader, test = DataLoader(what.data, batch_size=4, shuffle=True), DataLoader(what.data)
    run = ob.train(
        copy.deepcopy(what.model), loader, what.loss, test=test, optimizer=MOMENTUM, workers=1,
        epochs=2, seed=5, engine=engine,
    )  # fmt: skip
    assert_same_bits(run.model, plain(what, MOMENTUM, seed=5))
    assert run.summary().loss is not None


def test_a_weighted_run_says_so_and_replays(engine: str, tmp_path: Path) -> None:
    what = problem(samples=20)

    def loader(**more: Any) -> DataLoader:
        return DataLoader(what.data, sampler=WeightedRandomSampler([0.5, 2] * 10, 12), **more)

    run = ob.train(
        copy.deepcopy(what.model), loader(batch_size=4), what.loss, discipline="asp",
        optimizer=MOMENTUM, workers=2, epochs=2, engine=engine, out=tmp_path, hash_every=1,
    )  # fmt: skip
    again = (copy.deepcopy(what.model), loader(batch_size=4), what.loss)
    found = ob.replay(tmp_path, *again).check()
    assert found.versions == found.compared == 6
    assert [epoch["applied"] for epoch in run.summary().ledger] == [12, 12]
    with pytest.raises(ob.CheckpointError, match="order is None here and WeightedRandomSampler"):
        ob.replay(tmp_path, what.model, what.data, what.loss, shuffle=False)
    with pytest.raises(ob.ConfigError, match="batch_size is 4, and 3 in the DataLoader"):
        ob.replay(tmp_path, what.model, loader(batch_size=3), what.loss)
