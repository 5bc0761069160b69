"""A small task and a plan of a few cells, and who watches them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.compare import (
    ComparisonPlan,
    Point,
    Simulated,
    Watcher,
)
from offbeat.config.task import Task
from offbeat.report.summary import Summary

SAMPLES = 96


def task(seed: int = 0, loss: Callable[..., Tensor] = nn.functional.cross_entropy) -> Task:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, 5, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = nn.Linear(5, 2)
    return Task(model, data, loss, data, partial(torch.optim.SGD, lr=0.2))


def plan(**changes: Any) -> ComparisonPlan:
    settings: dict[str, Any] = {
        "sync": ("bsp", "asp"),
        "devices": (1, 2),
        "on": Simulated("normal:20ms,4ms", straggler=4),
        "batch_size": 8,
        "epochs": 3,
    }
    return ComparisonPlan(**settings | changes)


class Seen(Watcher):
    """Which cells were run, and what came of each."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.kept = 0
        self.failed: dict[str, str] = {}

    def planned(self, work: Any, kept: int) -> None:
        self.kept = kept

    def starts(self, point: Point) -> None:
        self.run.append(point.name)

    def ends(self, point: Point, summary: Summary | None, failed: str = "") -> None:
        if summary is None:
            self.failed[point.name] = failed
