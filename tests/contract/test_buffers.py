"""Buffers outlive whoever has learnt them: killed, resumed, begun with another run, joined late."""

import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.engine.sim.compute_times import Constant
from offbeat.log.log import read
from offbeat.log.records import Joined, Lost, Updated
from tests.contract.common import Problem, Stop, run
from tests.contract.real import Gate, Once, held_at, strike

WORKERS, BATCH, EPOCHS, SAMPLES = 2, 6, 6, 240
STEPS = SAMPLES * EPOCHS // BATCH // WORKERS  # of each worker, if they share the work
LATE = STEPS - 10  # not enough steps are left to learn the statistics anew
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.5)


class Centred(nn.Module):
    """Takes a running mean away in training too, so that gradients tell what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((2,), 20.0))
        self.register_buffer("calls", torch.tensor(2**53 + 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
        return x - self.mean


def normed() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(2, momentum=0.05), nn.Linear(2, 4))


def centred() -> nn.Module:
    return nn.Sequential(Centred(), nn.Linear(2, 4))


def clusters_of_points(make: Any = normed) -> Problem:
    """Four groups, far from zero and from each other: whoever knows where their middle is tells
    them apart, and nobody else.
    """
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(SAMPLES) % 4
    corner = torch.stack([label % 2, label // 2], 1) * 2.0 - 1.0
    noise = 0.2 * torch.randn(SAMPLES, 2, generator=generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    return Problem(model, TensorDataset(20 + corner + noise, label), F.cross_entropy)


def points(got: ob.Run, what: Problem) -> float:
    inputs, label = what.data.tensors
    found = got.model.eval()(inputs).argmax(1)
    return 100 * (found == label).double().mean().item()


def train(engine: str, what: Problem, discipline: str = "bsp", **options: Any) -> ob.Run:
    options = {"batch_size": BATCH, "epochs": EPOCHS, "optimizer": SGD} | options
    if "cluster" not in options:
        options.setdefault("workers", WORKERS)
    return run(engine, what, discipline, **options)


class Dying:
    """A loss over which workers die, each once, in whichever of their processes computes it."""

    def __init__(self, workers: tuple[int, ...], step: int):
        self.step, self.count = step, 0
        self.once = {worker: Once(signal.SIGKILL) for worker in workers}

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        words = Path("/proc/self/comm").read_text().split()
        number = words[1].partition(".")[0] if words[0] == "offbeat" else ""
        if number.isdigit():
            self.count += 1
            if self.count == self.step and int(number) in self.once:
                self.once[int(number)]()
        return F.cross_entropy(output, label)


class KillServer(ob.Listener):
    """Kills the server at a version; workers wait at their last steps until it is dead."""

    def __init__(self, version: int):
        self.version, self.gate = version, Gate()

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == self.version:
            if not self.gate.is_open():
                strike("server", signal.SIGKILL)
            self.gate.open()


class StopAt(ob.Listener):
    """Stops the run at a version."""

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == LATE:
            raise Stop


def failing(workers: tuple[int, ...], at: float) -> ob.Cluster:
    """Those die at that second, and come back a little later."""
    died = (ob.Failure(at, returns_after=0.011),)
    return ob.Cluster(
        tuple(
            ob.Machine(Constant(0.01), failures=died if worker in workers else ())
            for worker in range(WORKERS)
        ),
        patience=0.005,
    )


def killed(engine: str, what: Problem, who: tuple[int, ...], **options: Any) -> ob.Run:
    """A run of which these workers die, shortly before the end."""
    if engine == "sim":
        return train(engine, what, cluster=failing(who, 0.01 * LATE - 0.005), **options)
    step = LATE if options.get("workers") != 1 else 2 * STEPS - 10
    return train(engine, what._replace(loss=Dying(who, step)), **options)


@pytest.fixture(scope="module")
def undisturbed() -> float:
    what = clusters_of_points()
    return points(train("sim", what), what)


def test_undisturbed_it_learns_what_it_has_to(undisturbed: float) -> None:
    assert undisturbed > 99


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)])
def test_killed_workers_lose_no_statistics(engine, who, undisturbed, tmp_path):
    what = clusters_of_points()
    got = killed(engine, what, who, out=tmp_path / "run")
    assert got.summary().lost >= len(who)
    assert abs(points(got, what) - undisturbed) <= 0.5
    assert ob.replay(tmp_path / "run", *what).identical


SPLIT = "pp=2,split=1,microbatches=1"


@pytest.mark.parametrize(
    "options",
    [
        {"via": "allreduce"},
        {"shards": 2},
        {"workers": 1},
        {"layout": f"{SPLIT},schedule=gpipe", "workers": 1},
        {"layout": f"{SPLIT},schedule=stash", "workers": 1, "discipline": "asp"},
    ],
)
def test_nor_do_they_wherever_store_and_model_are(local_only, options, undisturbed, tmp_path):
    what = clusters_of_points()
    got = killed(local_only, what, (0, 1), out=tmp_path / "run", **options)
    assert got.summary().lost >= 1
    assert abs(points(got, what) - undisturbed) <= 0.5
    assert ob.replay(tmp_path / "run", *what).identical


def killing_the_server(what: Problem, **options: Any) -> ob.Run:
    """A run whose server dies shortly before the end; workers wait until it has."""
    kill = KillServer(LATE)

    class Waiting(Dying):
        def __call__(self, *batch: torch.Tensor) -> torch.Tensor:
            self.count += 1
            if self.count == LATE + 2:
                kill.gate.wait()
            return F.cross_entropy(*batch)

    waiting = what._replace(loss=Waiting((), 0))
    return train("local", waiting, listeners=[kill], checkpoint_every=5, **options)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kept", ["memory", "folder"])
def test_a_killed_server_loses_none(local_only, kept, shards, undisturbed, tmp_path):
    """From what it left in memory, or from its last checkpoint where several processes serve."""
    what = clusters_of_points()
    out = None if kept == "memory" else tmp_path / "run"
    got = killing_the_server(what, shards=shards, out=out)
    assert abs(points(got, what) - undisturbed) <= 0.5


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("discipline", ["bsp", "asp"])
def test_a_server_that_takes_over_has_the_same_bits_of_them(
    local_only, discipline, shards, tmp_path
):
    what, out = clusters_of_points(centred), tmp_path / "run"
    got = killing_the_server(what, discipline=discipline, shards=shards, out=out)
    assert sum(isinstance(record, Joined) for record in read(out / "log.jsonl")) == 2 * WORKERS
    assert ob.replay(out, *what).check().compared == got.summary().updates


def test_one_that_comes_late_begins_with_what_the_others_know(sim_only, undisturbed, tmp_path):
    """On real processes everybody is waited for at first; there, one that died comes late."""
    what = clusters_of_points()
    steady = Constant(0.01)
    machines = [ob.Machine(steady), ob.Machine(steady), ob.Machine(steady, joins_at=1.0)]
    got = train(sim_only, what, cluster=ob.Cluster(tuple(machines)), out=tmp_path / "run")
    assert got.summary().per_worker[2].steps
    assert abs(points(got, what) - undisturbed) <= 0.5
    assert ob.replay(tmp_path / "run", *what).identical


def test_a_run_that_goes_on_has_them(engine, undisturbed, tmp_path):
    what, out = clusters_of_points(), tmp_path / "run"
    with suppress(Stop), held_at(LATE):
        train(engine, what, out=out, checkpoint_every=5, listeners=[StopAt()])
    assert not (out / "model.safetensors").exists()
    got = train(engine, clusters_of_points(), out=out, checkpoint_every=5, resume=True)
    assert abs(points(got, what) - undisturbed) <= 0.5
    assert ob.replay(out, *what).identical


def test_a_run_that_begins_with_another_has_them(engine, undisturbed, tmp_path):
    """At rate 0 nothing else changes, so it has learnt what the earlier one had."""
    what, still = clusters_of_points(), partial(SGD, lr=0.0)
    train(engine, clusters_of_points(), out=tmp_path / "first")
    some = what._replace(data=TensorDataset(*what.data[:24]))
    options = {"start": tmp_path / "first", "optimizer": still, "epochs": 1}
    got = train(engine, some, out=tmp_path / "second", **options)
    assert abs(points(got, what) - undisturbed) <= 0.5
    assert ob.replay(tmp_path / "second", *some).identical


@pytest.mark.parametrize("discipline", ["asp", "local:3", "soft:2", "gossip", "easgd:2"])
def test_gradients_that_depend_on_them_replay_to_the_bit(engine, discipline, tmp_path):
    """Whoever joins again computes with the mean, in the run and in its replay."""
    what = clusters_of_points(centred)
    got = killed(engine, what, (0, 1), discipline=discipline, out=tmp_path / "run")
    records = list(read(tmp_path / "run" / "log.jsonl"))
    assert sum(isinstance(record, Lost) for record in records) >= 1
    assert all(record.averaged for record in records if isinstance(record, Joined))
    assert ob.replay(tmp_path / "run", *what).check().compared == got.summary().updates
    assert abs(got.model[0].mean - 20).max() < 1
    assert got.model[0].calls.item() > 2**53 + LATE // 2
