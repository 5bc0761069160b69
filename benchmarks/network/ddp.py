"""DistributedDataParallel on gloo over the same hosts."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.network.hosts import Host
from benchmarks.network.models import loss_of, model_of
from benchmarks.peers.common import accuracy, batches, made_up
from benchmarks.peers.ddp_ranks import SlowGradient, group
from benchmarks.peers.launch import together

PORT = 29500
INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0"}
WARM_UP = 2  # steps
TEST_EVERY = 16  # steps between two tests


def train(
    hosts: Sequence[Host],
    model: str,
    batch: int,
    emulate: Sequence[float],
    *,
    steps: int,
    lr: float = 0.05,
    seed: int = 0,
    folder: str = "",
    target: float = 1.0,
) -> dict[str, Any]:
    """One rank on each host; samples/s of all, and the seconds to an accuracy on MNIST."""
    shared = {
        "meet": f"tcp://{hosts[0].address}:{PORT}", "ranks": len(hosts), "model": model,
        "batch": batch, "emulate": list(emulate), "steps": steps, "lr": lr, "seed": seed,
        "folder": folder, "target": target,
    }  # fmt: skip
    each = [{**shared, "rank": rank} for rank in range(len(hosts))]
    return together("network.ddp:rank", each, on=[host.run for host in hosts], more=INTERFACE)[0]


def rank(
    meet: str,
    rank: int,
    ranks: int,
    model: str,
    batch: int,
    emulate: list[float],
    steps: int,
    lr: float,
    seed: int,
    folder: str,
    target: float,
) -> dict[str, Any]:
    """What one of them does."""
    from offbeat.recipes import mnist

    task = mnist(folder) if folder else None
    data = made_up(784) if task is None else task.data[:]
    with group(meet, rank, ranks):
        module = model_of(model, seed)
        slow = SlowGradient(module, emulate[rank])
        replica = DistributedDataParallel(_Losses(module))
        optimizer = torch.optim.SGD(replica.parameters(), lr=lr)
        stream = batches(data, batch, seed, rank, ranks)

        def some(count: int) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                slow.begin()
                optimizer.zero_grad()
                replica(*next(stream)).backward()
                optimizer.step()
            return time.perf_counter() - start

        if task is None:
            some(WARM_UP)
            seconds = some(steps)
            return {"per_second": steps * batch * ranks / seconds, "seconds": seconds}
        seconds, done, reached = 0.0, 0, torch.zeros(1)
        while float(reached) < target and done < steps:
            seconds += some(TEST_EVERY)
            done += TEST_EVERY
            if rank == 0:
                reached.fill_(accuracy(module, task.test[:]))
            dist.broadcast(reached, 0)
        return {"seconds": seconds, "steps": done, "accuracy": float(reached)}


class _Losses(torch.nn.Module):
    """A model that gives its loss: what DDP calls has to be a module."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(self.model, x, y)
