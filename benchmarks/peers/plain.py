"""Plain PyTorch loops: what a step costs when nothing is exchanged."""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.peers.common import (
    Times,
    Training,
    accuracy,
    batches,
    falling,
    made_up,
    peak_bytes,
    small_mlp,
    timed,
    train_step,
)
from benchmarks.peers.launch import gate, together


@dataclass(frozen=True)
class Trained:
    """Accuracy after some epochs, and seconds of training alone."""

    accuracy: float
    seconds: float


def small_step(
    *, batch: int = 32, steps: int = 500, repeats: int = 5, processes: int = 1, threads: int = 1
) -> Times:
    """A step of the small MLP, mean over `steps` in each repeat; of several, the slower one's."""
    arguments = {"batch": batch, "steps": steps, "repeats": repeats}
    results = together("peers.plain:small_loop", [arguments] * processes, threads)
    return Times(tuple(map(max, zip(*(r["seconds"] for r in results), strict=True))))


def resnet(
    *, batch: int = 8, steps: int = 10, side: int = 64, processes: int = 1, threads: int = 1
) -> Training:
    """ResNet-50 in `processes` that know nothing of each other, each with so many threads."""
    arguments = {"batch": batch, "steps": steps, "side": side}
    results = together("peers.plain:resnet_loop", [arguments] * processes, threads)
    return Training(
        Times(tuple(second for r in results for second in r["seconds"])),
        sum(batch / mean(r["seconds"]) for r in results),
        max(r["peak_bytes"] for r in results),
    )


def mnist(
    folder: Path | str,
    *,
    lr: float,
    epochs: int = 3,
    batch: int = 64,
    seed: int = 0,
    samples: int | None = None,
    threads: int = 1,
) -> Trained:
    """The recipe's network on MNIST with ASU-P's rule, as one node trains without ASU-P."""
    arguments = {
        "folder": str(folder), "lr": lr, "epochs": epochs, "batch": batch, "seed": seed,
        "samples": samples,
    }  # fmt: skip
    return Trained(**together("peers.plain:mnist_loop", [arguments], threads)[0])


def small_loop(batch: int, steps: int, repeats: int) -> dict[str, Any]:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = batches(made_up(64), batch, 0)

    def many() -> None:
        for _ in range(steps):
            train_step(model, optimizer, next(stream))

    gate()
    return {"seconds": [total / steps for total in timed(many, repeats, warm_up=1)]}


def resnet_loop(batch: int, steps: int, side: int) -> dict[str, Any]:
    from offbeat.recipes import resnet50

    task = resnet50(side=side)
    assert task.optimizer is not None
    optimizer = task.optimizer(task.model.parameters())
    stream = batches(task.data.tensors, batch, 0)
    gate()
    seconds = timed(lambda: train_step(task.model, optimizer, next(stream)), steps)
    return {"seconds": seconds, "peak_bytes": peak_bytes()}


def mnist_loop(
    folder: str, lr: float, epochs: int, batch: int, seed: int, samples: int | None
) -> dict[str, Any]:
    from offbeat.optim import RMSMomentum
    from offbeat.recipes import mnist as recipe

    task = recipe(folder, seed=seed, limit=samples)
    optimizer = RMSMomentum(task.model.parameters(), lr=lr)
    data, test = task.data.tensors, task.test.tensors
    stream = batches(data, batch, seed)
    gate()
    # Whole epochs of whole batches, so that every repeat does the same work.
    steps = epochs * (len(data[0]) // batch)
    schedule = falling(steps)(optimizer)
    start = time.perf_counter()
    for _ in range(steps):
        train_step(task.model, optimizer, next(stream))
        schedule.step()
    seconds = time.perf_counter() - start
    return {"accuracy": accuracy(task.model, test), "seconds": seconds}
