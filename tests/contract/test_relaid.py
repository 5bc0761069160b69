"""Checkpoints know nothing of layouts: a run goes on with replicas split in another way."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.errors import CheckpointError
from offbeat.log.log import read
from offbeat.log.records import Relaid, Updated
from tests.contract.real import held_at

SAMPLES = 48


class Stops(ob.Listener):
    """Ends a run, as a kill would, at the first update after a checkpoint."""

    def __init__(self, version: int):
        self.version = version

    def see(self, record):
        if isinstance(record, Updated) and record.version >= self.version:
            raise KeyboardInterrupt


def task():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 3)
    )
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))
    return model, data, F.cross_entropy


def train(out: Path, epochs: int = 3, **more):
    return ob.train(
        *task(),
        discipline="asp",
        optimizer=partial(torch.optim.Adam, lr=0.01),
        workers=2,
        batch_size=8,
        epochs=epochs,
        checkpoint_every=3,
        hash_every=1,
        out=out,
        **more,
    )


def stopped(out: Path, version: int = 7, **more) -> None:
    with held_at(version), pytest.raises(KeyboardInterrupt):
        train(out, listeners=[Stops(version)], **more)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"layout": "pp=2,split=count"}, {}),
        ({"layout": "pp=2,split=count"}, {"layout": "pp=3,split=count,microbatches=4"}),
        ({"layout": "pp=2,split=count", "shards": 2}, {"layout": "microbatches=2", "shards": 1}),
        ({}, {"layout": "pp=2,schedule=2bw,split=count", "shards": 2}),
    ],
)
def test_a_run_goes_on_with_another_layout_and_replays(tmp_path, before, after):
    """Parameters and the rule's state are all there, and the log says from where on."""
    out = tmp_path / "run"
    stopped(out, **before)
    run = train(out, resume=True, **after)
    assert all(epoch["applied"] == SAMPLES for epoch in run.summary().ledger)
    told = [record for record in read(out / "log.jsonl") if isinstance(record, Relaid)]
    assert [record.layout is None for record in told] == ["layout" not in after]
    found = ob.replay(out, *task())
    assert found.identical, found.difference
    assert found.versions == 3 * SAMPLES // 8


def test_a_layout_that_changes_twice(tmp_path):
    out = tmp_path / "run"
    stopped(out, layout="pp=2,split=count")
    stopped(out, 13, resume=True, layout="pp=3,split=count,microbatches=4")
    train(out, resume=True, layout="pp=2,split=count")
    layouts = [r.layout for r in read(out / "log.jsonl") if isinstance(r, Relaid)]
    assert [layout.partition(",")[0] for layout in layouts] == ["pp=3", "pp=2"]
    assert ob.replay(out, *task()).identical


def test_the_same_layout_needs_no_word(tmp_path):
    out = tmp_path / "run"
    stopped(out, layout="pp=2,split=count")
    train(out, resume=True, layout="pp=2,split=count")
    assert not any(isinstance(record, Relaid) for record in read(out / "log.jsonl"))
    assert ob.replay(out, *task()).identical


def test_everything_else_must_still_be_the_same(tmp_path):
    out = tmp_path / "run"
    stopped(out, layout="pp=2,split=count")
    with pytest.raises(CheckpointError, match="seed is 1 here and 0 in the run"):
        train(out, resume=True, seed=1)


def test_a_simulation_keeps_its_layout(tmp_path):
    """Its workers are resumed in the middle of what they do."""
    out = tmp_path / "run"
    stopped(out, engine="sim", layout="pp=2,split=count")
    with pytest.raises(CheckpointError, match="layout is None here and pp=2"):
        train(out, resume=True, engine="sim")
