"""Plain PyTorch loops: what a step costs when nothing is exchanged."""

import time
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

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
    *,
    batch: int = 8,
    steps: int = 10,
    side: int = 64,
    processes: int = 1,
    threads: int = 1,
    handing_over: bool = False,
) -> Training:
    """ResNet-50 in `processes` that know nothing of each other, each with so many threads.

    `handing_over` moves every gradient to shared memory and looks whether it is finite, as a worker
    must before anybody else can apply it; the rest of the step is the same.
    """
    arguments = {"batch": batch, "steps": steps, "side": side, "handing_over": handing_over}
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
    processes: int = 1,
    threads: int = 1,
) -> Trained:
    """The recipe's network on MNIST with ASU-P's rule, as one node trains without ASU-P.

    Of several processes that know nothing of each other, the slowest.
    """
    arguments = {
        "folder": str(folder), "lr": lr, "epochs": epochs, "batch": batch, "seed": seed,
        "samples": samples,
    }  # fmt: skip
    results = together("peers.plain:mnist_loop", [arguments] * processes, threads)
    return Trained(**max(results, key=lambda result: result["seconds"]))


def small_loop(batch: int, steps: int, repeats: int) -> dict[str, Any]:
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = batches(made_up(64), batch, 0)

    def many() -> None:
        for _ in range(steps):
            train_step(model, optimizer, next(stream))

    gate()
    return {"seconds": [total / steps for total in timed(many, repeats, warm_up=1)]}


def resnet_loop(batch: int, steps: int, side: int, handing_over: bool) -> dict[str, Any]:
    from offbeat.recipes import resnet50

    task = resnet50(side=side)
    assert task.optimizer is not None
    optimizer = task.optimizer(task.model.parameters())
    stream = batches(task.data.tensors, batch, 0)
    if handing_over:
        _hand_over(task.model, optimizer)
    gate()
    seconds = timed(lambda: train_step(task.model, optimizer, next(stream)), steps)
    return {"seconds": seconds, "peak_bytes": peak_bytes()}


def _hand_over(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let gradients leave for shared memory as they are made, and be applied from there."""
    places = {p: torch.zeros_like(p).share_memory_() for p in model.parameters()}

    @torch.no_grad()
    def leave(parameter: Tensor) -> None:
        place = places[parameter]
        place.copy_(parameter.grad)
        parameter.grad = None
        assert isfinite(place.sum().item())

    def found(*_: Any) -> None:
        for parameter, place in places.items():
            parameter.grad = place

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(leave)
    optimizer.register_step_pre_hook(found)


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
