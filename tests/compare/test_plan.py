"""Which cells a comparison has, how fast their workers are, and what is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from offbeat.compare import (
    ComparisonPlan,
    Point,
    RealSpeeds,
    Simulated,
)
from offbeat.config.task import Task
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import ConfigError
from tests.compare.common import plan, task


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices": (0, 1)}, "devices must be a whole number of at least 1, not 0"),
        ({"devices": (1, 1)}, "different numbers"),
        ({"devices": ()}, "different numbers"),
        ({"repeat": 0}, "repeat"),
        ({"epochs": 0}, "epochs"),
        ({"target": "most"}, "a number such as 90%, 0.9 or 0.35"),
        ({"target": float("nan")}, "a number such as"),
        ({"sync": ("soft:4",)}, "cannot gather 4 contributions from 2 workers: use 2 or less"),
        ({"sync": ("hogwild",)}, "hogwild"),
        ({"rates": {"local": 0.1}}, "not compared: write one of bsp, asp"),
        ({"rates": {"": -1.0}}, "above 0"),
        ({"sync": ("asup",), "rates": {"asup": 0.1}}, "--sync 'asup:lr=0.1'"),
        ({"on": Simulated("20ms,20ms,20ms")}, "describes 3 workers and the most devices are 2"),
    ],
)
def test_a_plan_that_cannot_be_carried_out(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**changes)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"straggler": 4}, "add --emulate 20ms"),
        ({"emulate": "20ms", "straggler": 0.5}, "at least 1 times slower"),
        ({"emulate": "fast"}, "no duration"),
    ],
)
def test_speeds_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RealSpeeds(**settings)
    assert words in str(refused.value)


def test_emulated_speeds_of_fewer_devices() -> None:
    assert RealSpeeds("20ms", 4).steps(1) == [0.02]
    assert RealSpeeds("20ms", 4).steps(3) == [0.02, 0.02, 0.08]
    assert RealSpeeds("10ms,20ms,30ms").steps(2) == [0.01, 0.02]
    assert RealSpeeds().steps(2) is None
    with pytest.raises(ConfigError, match="has 3 times and the most devices are 4"):
        RealSpeeds("10ms,20ms,30ms").check(4)


def test_simulated_speeds_of_fewer_devices() -> None:
    cluster = Cluster.parse("10ms,20ms,30ms")
    assert Simulated(cluster).of(2) == Cluster.parse("10ms,20ms")
    assert Simulated(cluster, 3).of(2) == Cluster.parse("10ms,60ms")
    assert Simulated(cluster, 3).of(1) == Cluster.parse("10ms")
    assert Simulated().of(4) == Cluster.equal(4)
    assert Simulated("20ms", 4).of(3) == Cluster.with_straggler(3)


def test_no_two_cells_share_a_folder() -> None:
    names = (
        *("asp", "asp:weigh=inverse", "asp:weigh=polynomial(0.5)", "fedbuff:2,every=2"),
        *("fedbuff:2", "local:4", "local:4,state=reset", "bsp:backup=1", "x/../y", "x_.._y"),
        *("custom:" + "a" * 300, "custom:" + "a" * 301),
    )
    points = [
        Point(name, devices, again) for name in names for devices in (1, 11) for again in (0, 1)
    ]
    folders = {point.name for point in points}
    assert len(folders) == len(points)
    assert all("/" not in name and len(name) < 200 and name[0] != "." for name in folders)


def test_what_is_left_out_is_chosen_for_the_data() -> None:
    usual = ComparisonPlan(devices=(1, 8)).fitted(1437, 128)
    assert (usual.batch_size, usual.epochs, usual.evaluate_every) == (128, 45, 1437)
    large = ComparisonPlan(devices=(1, 8)).fitted(60_000, 64)
    assert (large.batch_size, large.epochs, large.evaluate_every) == (64, 1, 6_000)
    assert ComparisonPlan(devices=(1, 8)).fitted(64, 128).batch_size == 8
    with pytest.raises(ConfigError, match="batch size of 8 or less, or use fewer devices"):
        ComparisonPlan(devices=(1, 8), batch_size=128).fitted(64, 32)
    with pytest.raises(ConfigError, match="there are 3: use fewer devices"):
        ComparisonPlan(devices=(4,)).fitted(3, 32)


def test_rates_of_a_plan() -> None:
    found = plan(sync=("bsp", "asp", "ssp:3", "asup"), rates={"": 0.3, "asp": 0.1, "ssp:3": 0.2})
    rates = {name: found.optimizer(task(), name) for name in found.sync}
    settings = {name: one and one.keywords["lr"] for name, one in rates.items()}  # type: ignore[attr-defined]
    assert settings == {"bsp": 0.3, "asp": 0.1, "ssp:3": 0.2, "asup": None}
    own = task()
    assert plan().optimizer(own, "bsp") is own.optimizer
    closed = Task(nn.Linear(1, 1), task().data, nn.functional.mse_loss, optimizer=torch.optim.SGD)
    with pytest.raises(ConfigError, match="cannot reach into the task's optimizer"):
        found.optimizer(closed, "bsp")
