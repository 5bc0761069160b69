"""A cost-only run takes exactly the time of a run with gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.engine.sim.compute_times import Constant, Exponential, Normal
from offbeat.errors import ConfigError

CLUSTER = ob.Cluster(
    (
        ob.Machine(Normal(0.02, 0.004), bandwidth=1e4, latency=0.001),
        ob.Machine(Exponential(0.03), bandwidth=2e4, pauses=(ob.Pause(0.1, 0.2),)),
        ob.Machine(Normal(0.05, 0.01), failures=(ob.Failure(0.15, 0.1),)),
        ob.Machine(Normal(0.02, 0.001), joins_at=0.05),
    ),
    apply=0.0005,
    patience=0.15,
)
STEPS, BATCH = 10, 2
MODEL_BYTES = 3 * 2 * 4 + 2 * 4


@pytest.mark.parametrize(
    "discipline",
    ["bsp", "bsp:backup=1", "soft:2", "ssp:2", "asp", "downpour:2,3", "asup", "local:4",
     "easgd:3", "async-local:4", "fedbuff:2,every=2"],
)  # fmt: skip
def test_an_estimate_is_the_run_without_the_numbers(discipline: str) -> None:
    samples = len(CLUSTER) * STEPS * BATCH
    data = TensorDataset(torch.randn(samples, 3), torch.arange(samples) % 2)
    own = discipline.partition(":")[0] in ("downpour", "asup")
    run = ob.train(
        nn.Linear(3, 2), data, F.cross_entropy, discipline=discipline, cluster=CLUSTER, seed=5,
        batch_size=BATCH, optimizer=None if own else partial(torch.optim.SGD, lr=0.01),
    ).summary()  # fmt: skip
    guess = ob.estimate(
        CLUSTER, discipline, steps=STEPS, batch_size=BATCH, model_bytes=MODEL_BYTES, seed=5
    )
    for field in (
        "seconds", "updates", "samples", "samples_per_second", "staleness_mean", "staleness_max",
        "staleness_counts", "wait_share", "dropped", "refused", "lost", "bytes_sent",
        "bytes_received", "per_worker", "ledger",
    ):  # fmt: skip
        assert getattr(guess, field) == getattr(run, field), field
    assert guess.engine == "cost only"
    assert guess.lost > 0


def test_a_step_takes_its_overhead_and_a_share_of_the_time_of_a_batch() -> None:
    machine = ob.Machine(Constant(0.02), overhead=0.001)
    half_as_fast = ob.Machine(Constant(0.04), overhead=0.003)
    cluster = ob.Cluster((machine, half_as_fast))
    equal = ob.estimate(cluster, "bsp", steps=2)
    assert [w.compute for w in equal.per_worker] == pytest.approx([0.042, 0.086])
    given = ob.estimate(cluster, "bsp", steps=2, shares=[3, 1])
    assert [w.compute for w in given.per_worker] == pytest.approx([0.062, 0.046])


@pytest.mark.parametrize("shares", ["speed", [4, 1, 1, 2]])
def test_an_estimate_has_the_shares_of_the_run(shares: str | list[int]) -> None:
    samples = len(CLUSTER) * STEPS * 8
    data = TensorDataset(torch.randn(samples, 3), torch.arange(samples) % 2)
    run = ob.train(
        nn.Linear(3, 2), data, F.cross_entropy, discipline="bsp", cluster=CLUSTER, shares=shares,
        batch_size=8, optimizer=partial(torch.optim.SGD, lr=0.01),
    ).summary()  # fmt: skip
    guess = ob.estimate(
        CLUSTER, "bsp", steps=STEPS, batch_size=8, model_bytes=MODEL_BYTES, shares=shares
    )
    assert guess.per_worker == run.per_worker
    assert guess.shares == run.shares
    assert guess.lost > 0


def test_the_same_seed_gives_the_same_estimate() -> None:
    one = ob.estimate(CLUSTER, "ssp:1", seed=1)
    assert ob.estimate(CLUSTER, ob.SSP(1), seed=1) == one
    assert ob.estimate(CLUSTER, "ssp:1", seed=2).seconds != one.seconds


def test_a_cluster_as_text() -> None:
    made = ob.estimate("20ms,40ms", "bsp", steps=5)
    assert made.workers == 2
    assert made.seconds == pytest.approx(5 * 0.04)
    assert made.samples == 2 * 5 * 32


def test_listeners_see_the_run() -> None:
    calls: list[str] = []

    class Watch(ob.Listener):
        def begin(self, store: object, samples: int) -> None:
            calls.append(f"begin {samples}")

        def see(self, record: object) -> None:
            calls.append("see")

        def end(self) -> None:
            calls.append("end")

    ob.estimate("20ms", "asp", steps=3, batch_size=2, listeners=[Watch()])
    assert calls[0] == "begin 6"
    assert calls[-1] == "end"
    assert calls.count("see") >= 7


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
     ({"batch_size": 0}, "batch_size must be a whole number of at least 1, not 0"),
     ({"model_bytes": -1}, "model_bytes must be a whole number of at least 0, not -1")],
)  # fmt: skip
def test_numbers_that_make_no_sense(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ob.estimate("20ms,20ms", "asp", **settings)  # type: ignore[arg-type]


def test_a_discipline_that_does_not_fit_the_cluster() -> None:
    with pytest.raises(ConfigError, match="cannot gather 3 contributions from 2 workers"):
        ob.estimate("20ms,20ms", "soft:3")
