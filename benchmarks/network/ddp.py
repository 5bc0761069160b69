"""DistributedDataParallel on gloo over the same hosts."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.hosts import Host
from benchmarks.network.models import loss_of, model_of
from benchmarks.network.runs import Scene
from benchmarks.peers.common import Batch, accuracy, batches, made_up
from benchmarks.peers.ddp_ranks import SlowGradient, group
from benchmarks.peers.launch import together

PORT = 29500
INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}
WARM_UP = 2  # steps
TEST_EVERY = 16  # steps between two tests


def train(hosts: Sequence[Host], scene: Scene) -> dict[str, Any]:
    """One rank on each host: samples/s of all, and the seconds of the scene's steps."""
    return _ranks(hosts, scene, "timed", {"steps": scene.steps})


def reach(hosts: Sequence[Host], scene: Scene) -> dict[str, Any]:
    """The steps to the scene's accuracy, and what was reached in the end."""
    assert scene.goal is not None
    folder, target, samples = scene.goal
    goal = {"folder": folder, "target": target, "samples": samples, "most": scene.steps}
    return _ranks(hosts, scene, "reaching", goal)


def _ranks(hosts: Sequence[Host], scene: Scene, what: str, more: dict[str, Any]) -> dict[str, Any]:
    shared = {
        "ranks": len(hosts), "model": scene.model, "batch": scene.batch, "rate": scene.rate,
        "meet": f"tcp://{hosts[0].address}:{PORT}", "seed": scene.seed,
    }  # fmt: skip
    each = [
        {"place": {**shared, "rank": rank, "least": least}, **more}
        for rank, least in enumerate(scene.emulate)
    ]
    starts = [host.run for host in hosts]
    return together(f"network.ddp:{what}", each, on=starts, more=INTERFACE)[0]


# ---------------------------------------------------------------- in the ranks


class _Losses(nn.Module):
    """A model that gives its loss: what DDP calls has to be a module."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(self.model, x, y)


class Rank:
    """One of them, in its group."""

    def __init__(self, place: dict[str, Any], data: Batch):
        self.number = place["rank"]
        self.model = model_of(place["model"], place["seed"])
        self.slow = SlowGradient(self.model, place["least"])
        self.replica = DistributedDataParallel(_Losses(self.model))
        self.optimizer = torch.optim.SGD(self.replica.parameters(), lr=place["rate"])
        self.stream = batches(data, place["batch"], place["seed"], self.number, place["ranks"])

    def steps(self, count: int) -> float:
        """Seconds of so many, which all begin together."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self.slow.begin()
            self.optimizer.zero_grad()
            self.replica(*next(self.stream)).backward()
            self.optimizer.step()
        return time.perf_counter() - start


def _group(place: dict[str, Any]) -> Any:
    return group(place["meet"], place["rank"], place["ranks"])


def timed(place: dict[str, Any], steps: int) -> dict[str, Any]:
    with _group(place):
        rank = Rank(place, made_up(784))
        rank.steps(WARM_UP)
        seconds = rank.steps(steps)
    return {"seconds": seconds, "per_second": steps * place["batch"] * place["ranks"] / seconds}


def reaching(
    place: dict[str, Any], folder: str, target: float, samples: int | None, most: int
) -> dict[str, Any]:
    from offbeat.recipes import mnist

    task = mnist(folder, limit=samples)
    with _group(place):
        rank = Rank(place, task.data[:])
        done, reached = 0, torch.zeros(1)
        while float(reached) < target and done < most:
            rank.steps(TEST_EVERY)
            done += TEST_EVERY
            if rank.number == 0:
                reached.fill_(accuracy(rank.model, task.test[:]))
            dist.broadcast(reached, 0)
    return {"steps": done, "accuracy": float(reached)}
