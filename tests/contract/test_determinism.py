"""The same seed gives the same bits, whatever else is different."""

import copy
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import offbeat as ob
from offbeat.engine.sim.compute_times import Exponential, LogNormal
from tests.contract.common import NAMES, check_run, named, optimizer_for, problem, replay_as, run

ADAM = partial(torch.optim.AdamW, lr=0.01)
UNEVEN = ob.Cluster(
    (
        ob.Machine(Exponential(0.01), latency=0.001),
        ob.Machine(LogNormal(0.02, 0.5), bandwidth=1e5, failures=(ob.Failure(0.05, 0.06),)),
        ob.Machine(Exponential(0.015), pauses=(ob.Pause(0.03, 0.1),), joins_at=0.01),
    ),
    apply=0.001,
    patience=0.04,
)


def random_net() -> nn.Module:
    """Tensors of many sizes, batch norm, and dropout, so that chance has a part in it."""
    return nn.Sequential(
        nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Dropout(0.4), nn.Tanh(), nn.Linear(7, 5),
        nn.ReLU(), nn.Linear(5, 2),
    )  # fmt: skip


def _outcome(engine: str, name: str, out: Path, **options: Any) -> tuple[bytes, dict[str, Any]]:
    discipline = named(3)[name]
    what = problem(random_net, samples=36)
    options = {"optimizer": optimizer_for(discipline, ADAM), "cluster": UNEVEN} | options
    got = run(engine, what, discipline, test=what.data, out=out, **options)
    return (out / "log.jsonl").read_bytes(), got.summary().to_dict()


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(sim_only, name, tmp_path):
    """Only virtual time puts several workers in the same order twice."""
    engine = sim_only
    log, figures = _outcome(engine, name, tmp_path / "one", codec="int8", seed=1)
    torch.manual_seed(99)  # whatever the user's own random numbers are
    random.seed(99)
    assert _outcome(engine, name, tmp_path / "two", codec="int8", seed=1) == (log, figures)
    other_log, other = _outcome(engine, name, tmp_path / "three", codec="int8", seed=2)
    assert other["parameter_hash"] != figures["parameter_hash"]
    assert other_log != log


@pytest.mark.parametrize(
    "name", ["bsp", "asp-gap", "downpour-rare-push", "average", "bmuf", "easgd", "async-local"]
)
def test_one_real_worker_repeats_itself(local_only, name):
    """With one worker there is only one order, so its bits are those of the seed."""
    discipline = named(1)[name]
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(99 + len(found))  # whatever the user's own random numbers are
        got = run(
            local_only, problem(random_net, samples=36), discipline, workers=1, codec="int8",
            seed=seed, epochs=1, optimizer=optimizer_for(discipline, ADAM),
        )  # fmt: skip
        found.append(got.parameter_hash)
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("name", ["asp", "bsp", "average"])
def test_the_number_of_threads_does_not_matter(sim_only, name, tmp_path):
    """Real workers compute with as many threads as they are told; replay takes as many."""
    engine = sim_only
    before = torch.get_num_threads()
    try:
        outcomes = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outcomes.append(_outcome(engine, name, tmp_path / str(threads)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert outcomes[0] == outcomes[1]


_CHILD = """
import sys
from pathlib import Path
from tests.contract.test_determinism import _outcome
print(_outcome(sys.argv[1], "asp-gap", Path(sys.argv[2]))[1]["parameter_hash"])
"""


def test_the_environment_does_not_matter(sim_only, tmp_path):
    """A whole process with another number of OpenMP threads arrives at the same hash.

    In virtual time: two real runs of several workers differ anyway.
    """
    engine = sim_only
    root = Path(__file__).parents[2]
    found = set()
    for threads in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, engine, str(tmp_path / threads)],
            cwd=root,
            env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert found == {_outcome(engine, "asp-gap", tmp_path / "here")[1]["parameter_hash"]}


PLACEMENTS = [
    1, 2, 5, ob.BySize(3), ob.ByCount(1), ob.ByCount(3), ob.ByCount(8), ob.ByWeight((1.0, 4.0)),
    ob.ByWeight((5.0, 1.0, 2.0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "clip"),
    [(name, ob.Clip(norm=0.2)) for name in NAMES]
    + [(name, clip) for name in ("asp", "bsp", "local") for clip in (None, ob.Clip(value=0.05))],
)
def test_shards_do_not_matter(sim_only, name, clip):
    """The same bits however the parameters are spread over the store's shards."""
    engine = sim_only  # two real runs differ by their order; see the next test
    discipline = named(3)[name]
    what = problem(random_net, samples=36)
    found = {}
    for placement in PLACEMENTS if name in ("asp", "bsp", "local") else PLACEMENTS[::4]:
        got = run(
            engine, what, discipline, cluster=UNEVEN, shards=placement, codec="topk:0.3",
            optimizer=optimizer_for(discipline, ADAM), clip=clip, epochs=1,
        )  # fmt: skip
        found[str(placement)] = got.parameter_hash
    assert len(set(found.values())) == 1, found


@pytest.mark.parametrize("name", ["asp", "bsp", "local", "easgd", "asp-gap"])
def test_shards_do_not_matter_to_real_processes(local_only, name, tmp_path):
    """What was computed over three shards is the same over any number of them."""
    what, discipline = problem(random_net, samples=36), named(2)[name]
    run(
        local_only, what, discipline, workers=2, shards=3, codec="topk:0.3", epochs=1,
        optimizer=optimizer_for(discipline, ADAM), out=tmp_path / "run",
    )  # fmt: skip
    check_run(tmp_path / "run", what, epochs=1)
    for shards in (1, 2, 5):
        replay_as(tmp_path / "run", what, shards=shards).check()


def test_the_users_things_are_left_alone(engine):
    what = problem(random_net)
    before = copy.deepcopy(what.model)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    got = run(engine, what, "asp", cluster=UNEVEN, optimizer=ADAM, test=what.data)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2][1])
    assert got.model.training
    assert all(p.grad is None for p in got.model.parameters())
    moved = [
        not torch.equal(a, b)
        for a, b in zip(got.model.parameters(), before.parameters(), strict=True)
    ]
    assert all(moved)
