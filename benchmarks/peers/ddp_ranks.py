"""What each rank of the DDP peers does in its process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import (
    Batch,
    accuracy,
    batches,
    image_mlp,
    made_up,
    peak_bytes,
    small_mlp,
    timed,
    train_step,
    wait_until,
)


@contextmanager
def group(meet: str, rank: int, ranks: int) -> Iterator[None]:
    dist.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def all_reduce(meet: str, rank: int, ranks: int, floats: int, repeats: int) -> dict[str, Any]:
    with group(meet, rank, ranks):
        tensor = torch.randn(floats)
        seconds = []
        for repeat in range(repeats + 2):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            if repeat >= 2:
                seconds.append(time.perf_counter() - start)
            tensor.div_(ranks)
    return {"seconds": seconds}


def small(meet: str, rank: int, ranks: int, batch: int, steps: int, repeats: int) -> dict[str, Any]:
    with group(meet, rank, ranks):
        model = DistributedDataParallel(small_mlp())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        stream = batches(made_up(64), batch, 0, rank, ranks)

        def many() -> None:
            for _ in range(steps):
                train_step(model, optimizer, next(stream))

        seconds = timed(many, repeats, warm_up=1)
    return {"seconds": [total / steps for total in seconds]}


class SlowGradient:
    """Keeps a rank's last gradient back until its step has taken long enough."""

    def __init__(self, model: nn.Module, least: float):
        self.least, self.start = least, time.monotonic()
        # DDP sends when every gradient is there, so one that is late delays the exchange
        # as a slow device would; the first layer's is the last to be computed.
        next(model.parameters()).register_hook(self._late)

    def _late(self, gradient: Tensor) -> None:
        wait_until(self.start + self.least)

    def begin(self) -> None:
        self.start = time.monotonic()


def _slow_steps(
    rank: int, ranks: int, emulate: list[float], batch: int, data: Batch, seed: int, rule: Any
) -> tuple[nn.Module, Callable[[], None]]:
    module = image_mlp(seed)
    slow = SlowGradient(module, emulate[rank])
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), **rule)
    stream = batches(data, batch, seed, rank, ranks)

    def one() -> None:
        slow.begin()
        train_step(model, optimizer, next(stream))

    return module, one


def straggler(
    meet: str, rank: int, ranks: int, emulate: list[float], batch: int, steps: int, repeats: int
) -> dict[str, Any]:
    with group(meet, rank, ranks):
        _, one = _slow_steps(rank, ranks, emulate, batch, made_up(784), 0, {"lr": 0.05})
        seconds = []
        for repeat in range(repeats + 1):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps if repeat else 3):
                one()
            if repeat:
                seconds.append(time.perf_counter() - start)
    return {"seconds": seconds}


def reach(
    meet: str,
    rank: int,
    ranks: int,
    folder: str,
    target: float,
    emulate: list[float],
    batch: int,
    every: int,
    most_steps: int,
    seed: int,
    samples: int | None,
    **rule: float,
) -> dict[str, Any]:
    from offbeat.recipes import mnist

    task = mnist(folder, limit=samples)
    with group(meet, rank, ranks):
        module, one = _slow_steps(rank, ranks, emulate, batch, task.data.tensors, seed, rule)
        seconds, steps, reached = 0.0, 0, torch.zeros(1)
        while float(reached) < target and steps < most_steps:
            # All stop the clock together: nobody works on while one evaluates.
            dist.barrier()
            start = time.perf_counter()
            for _ in range(every):
                one()
            seconds += time.perf_counter() - start
            steps += every
            if rank == 0:
                reached.fill_(accuracy(module, task.test.tensors))
            dist.broadcast(reached, 0)
    return {"seconds": seconds, "steps": steps, "accuracy": float(reached)}


def resnet(meet: str, rank: int, ranks: int, batch: int, steps: int, side: int) -> dict[str, Any]:
    from offbeat.recipes import resnet50

    task = resnet50(side=side)
    with group(meet, rank, ranks):
        model = DistributedDataParallel(task.model)
        optimizer = task.optimizer(model.parameters())
        stream = batches(task.data.tensors, batch, 0, rank, ranks)
        seconds = timed(lambda: train_step(model, optimizer, next(stream)), steps)
    return {"seconds": seconds, "peak_bytes": peak_bytes()}
