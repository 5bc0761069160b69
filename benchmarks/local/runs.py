"""Whole runs of the local engine, each in a process of its own that returns plain numbers."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.peers.common import accuracy, falling, image_mlp, made_up
from offbeat.engine.sim.cluster import Cluster
from offbeat.log.log import Listener
from offbeat.log.records import Entry, Evaluated, Updated
from offbeat.recipes import mnist, recipe, resnet50

NEVER = 10**9  # versions until a checkpoint: the peers save none
WARM_UP = 3  # steps of each worker that no look counts


class Steps(Listener):
    """When each worker's steps were applied, and when each was first heard of here."""

    def __init__(self, workers: int):
        self.times: list[list[float]] = [[] for _ in range(workers)]
        self.heard: dict[int, float] = {}

    def see(self, record: Entry) -> None:
        if isinstance(record, Updated):
            for part in record.parts:
                self.times[part.worker].append(record.time)
                self.heard.setdefault(part.worker, time.monotonic())


def per_second(times: Sequence[Sequence[float]], batch: int) -> float:
    """Samples/s of all workers: each one's own steps over its own seconds, as the peers count.

    The first steps are left out, and so is what comes after the first worker's last: by then the
    samples run out.
    """
    end = min(mine[-1] for mine in times)
    total = 0.0
    for mine in times:
        inside = [moment for moment in mine[WARM_UP:] if moment <= end]
        total += batch * (len(inside) - 1) / (inside[-1] - inside[0])
    return total


def mean_step(times: Sequence[Sequence[float]]) -> float:
    """Seconds of a worker's step: from the first update to the last, times workers, over steps."""
    first = min(mine[0] for mine in times)
    steps = sum(moment > first for mine in times for moment in mine)
    return (max(mine[-1] for mine in times) - first) * len(times) / steps


def small_step(sync: str, epochs: int) -> dict[str, Any]:
    """Two workers on the small network."""
    task, steps = recipe("digits"), Steps(2)
    ob.train(
        task.model,
        task.data,
        task.loss,
        discipline=sync,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        workers=2,
        threads=1,
        batch_size=32,
        epochs=epochs,
        checkpoint_every=NEVER,
        listeners=[steps],
    )
    return {"seconds": mean_step(steps.times)}


def straggler(
    sync: str, emulate: list[float], batch: int, samples: float, overlap: bool = False
) -> dict[str, Any]:
    """Samples/s and start-up of workers whose steps take at least their emulated seconds.

    Start-up is from the call, in a process that has torch and the model at hand, until the last
    worker's first step has been applied and heard of.
    """
    model, data = image_mlp(), TensorDataset(*made_up(784))
    steps, start = Steps(len(emulate)), time.monotonic()
    ob.train(
        model,
        data,
        functional.cross_entropy,
        discipline=sync,
        optimizer=partial(torch.optim.SGD, lr=0.05),
        workers=len(emulate),
        threads=1,
        emulate=emulate,
        overlap=overlap,
        batch_size=batch,
        epochs=max(1, ceil(samples / len(data))),
        checkpoint_every=NEVER,
        listeners=[steps],
    )
    return {
        "per_second": per_second(steps.times, batch),
        "start_up": max(steps.heard.values()) - start,
    }


def uneven(
    engine: str, shares: str | None, seconds: list[float], batch: int, epochs: int, seed: int
) -> dict[str, Any]:
    """Digits in lock-step on machines of these speeds: the whole run, from its first step on."""
    task = recipe("digits", seed=seed)
    speeds = (
        {"emulate": seconds}
        if engine == "local"
        else {"cluster": Cluster.parse(",".join(f"{each:g}s" for each in seconds))}
    )
    done = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="bsp",
        optimizer=task.optimizer,
        workers=len(seconds),
        batch_size=batch,
        epochs=epochs,
        test=task.test,
        evaluate_every=NEVER,
        seed=seed,
        shares=shares,
        engine=engine,
        checkpoint_every=NEVER,
        **speeds,
    ).summary()
    return {
        "per_second": done.samples_per_second,
        "accuracy": done.accuracy,
        "waiting": done.wait_share,
        "batches": [worker.batch for worker in done.per_worker],
    }


class GoalReached(Exception):
    """There is nothing left to find out."""


class Goal(Listener):
    """Ends the run at the first test that finds the accuracy."""

    def __init__(self, target: float):
        self.target = target
        self.seconds: float | None = None

    def see(self, record: Entry) -> None:
        if isinstance(record, Evaluated) and (record.accuracy or 0.0) >= self.target:
            self.seconds = record.time
            raise GoalReached


def reach(
    folder: str,
    sync: str,
    lr: float | None,
    target: float,
    emulate: list[float],
    every: int,
    epochs: int,
    seed: int,
    samples: int | None,
) -> dict[str, Any]:
    """Seconds until a test, every so many samples, finds `target` on MNIST; None if none does.

    Tests run in a process of their own and take no time of their own off the clock, but they do
    take a share of the cores.
    """
    task, goal = mnist(folder, limit=samples), Goal(target)
    with suppress(GoalReached):
        ob.train(
            image_mlp(seed),
            task.data,
            task.loss,
            discipline=sync,
            optimizer=None if lr is None else partial(torch.optim.SGD, lr=lr),
            workers=len(emulate),
            threads=1,
            emulate=emulate,
            batch_size=32,
            epochs=epochs,
            test=task.test,
            evaluate_every=every,
            seed=seed,
            checkpoint_every=NEVER,
            listeners=[goal],
        )
    return {"seconds": goal.seconds}


def resnet(
    workers: int,
    threads: int,
    batch: int,
    steps: int,
    side: int,
    sync: str = "asp",
    **how: Any,
) -> dict[str, Any]:
    """ResNet-50: a step's seconds, images/s of all workers, and the peak of the largest."""
    task, seen = resnet50(side=side), Steps(workers)
    run = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline=sync,
        optimizer=task.optimizer,
        workers=workers,
        threads=threads,
        batch_size=batch,
        epochs=ceil((steps + WARM_UP + 1) * workers * batch / len(task.data)),  # type: ignore[arg-type]
        checkpoint_every=NEVER,
        listeners=[seen],
        **how,
    )
    lasted = [after - before for mine in seen.times for before, after in pairwise(mine[WARM_UP:])]
    return {
        "step": median(lasted),
        "per_second": per_second(seen.times, batch),
        "peak_bytes": run.summary().memory["worker_peak"],
    }


def article(
    folder: str,
    epochs: int,
    batch: int,
    seed: int,
    samples: int | None,
    lr: float,
    overlap: bool = False,
) -> dict[str, Any]:
    """ASU-P on two workers with one thread each: seconds of training, and the accuracy then."""
    task, steps = mnist(folder, seed=seed, limit=samples), Steps(2)
    updates = epochs * ceil(len(task.data) / batch)  # type: ignore[arg-type]
    run = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline=ob.ASUP(lr=lr),
        workers=2,
        threads=1,
        batch_size=batch,
        epochs=epochs,
        schedule=ob.Schedule(falling(updates), per="version"),
        overlap=overlap,
        seed=seed,
        checkpoint_every=NEVER,
        listeners=[steps],
    )
    assert isinstance(task.test, TensorDataset)
    # The run's clock begins when both workers are there, as the plain loop's does.
    return {
        "accuracy": accuracy(run.model, task.test.tensors),
        "seconds": max(mine[-1] for mine in steps.times),
    }


def demo(rows: int | None, epochs: int | None) -> dict[str, Any]:
    """The demo's rows as they are shown, or fewer and shorter ones."""
    from offbeat.studies import demo as shown

    setting = shown.Setting()
    setting = replace(
        setting, contenders=setting.contenders[:rows], epochs=epochs or setting.epochs
    )
    return {
        "rows": [
            {"sync": row.sync, "measured": row.measured_rate, "predicted": row.predicted_rate}
            for row in shown.run(setting)
        ]
    }
