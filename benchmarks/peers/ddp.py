"""DistributedDataParallel on gloo: the lock-step that PyTorch users know."""

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.common import STRAGGLER, Rate, Times, Training
from benchmarks.peers.launch import together


@dataclass(frozen=True)
class Reached:
    """How long a run took to an accuracy, evaluation left out, and what it had then."""

    seconds: float
    steps: int
    accuracy: float


def all_reduce(floats: int, *, ranks: int = 2, repeats: int = 15, threads: int = 1) -> Times:
    """All-reduce of one flat tensor; a repeat takes as long as its slowest rank."""
    results = _ranks("all_reduce", ranks, threads, floats=floats, repeats=repeats)
    return Times(tuple(map(max, zip(*(r["seconds"] for r in results), strict=True))))


def small_step(
    *, ranks: int = 2, batch: int = 32, steps: int = 500, repeats: int = 5, threads: int = 1
) -> Times:
    """A step of the small MLP, mean over `steps` in each repeat."""
    results = _ranks("small", ranks, threads, batch=batch, steps=steps, repeats=repeats)
    return Times(tuple(map(max, zip(*(r["seconds"] for r in results), strict=True))))


def straggler(
    emulate: Sequence[float] = STRAGGLER,
    *,
    batch: int = 32,
    seconds: float = 5.0,
    repeats: int = 3,
    threads: int = 1,
) -> Rate:
    """Samples per second when each rank's gradient takes at least its emulated seconds."""
    steps = max(2, round(seconds / max(emulate)))
    results = _ranks(
        "straggler", len(emulate), threads, emulate=list(emulate), batch=batch, steps=steps,
        repeats=repeats,
    )  # fmt: skip
    samples = steps * batch * len(emulate)
    looks = zip(*(r["seconds"] for r in results), strict=True)
    return Rate(tuple(samples / max(look) for look in looks))


def to_accuracy(
    folder: Path | str,
    *,
    lr: float,
    target: float = 0.97,
    emulate: Sequence[float] = STRAGGLER,
    batch: int = 32,
    momentum: float = 0.0,
    every: int = 20,
    most_steps: int = 4000,
    seed: int = 0,
    samples: int | None = None,
    threads: int = 1,
) -> Reached:
    """Train the straggler's MLP on MNIST until a test, every so many steps, finds `target`."""
    return Reached(
        **_ranks(
            "reach", len(emulate), threads, folder=str(folder), lr=lr, target=target,
            emulate=list(emulate), batch=batch, momentum=momentum, every=every,
            most_steps=most_steps, seed=seed, samples=samples,
        )[0]
    )  # fmt: skip


def resnet(
    *, ranks: int = 2, batch: int = 8, steps: int = 10, side: int = 64, threads: int = 1
) -> Training:
    """ResNet-50 with SGD: images per second of all ranks, and the peak of the largest."""
    results = _ranks("resnet", ranks, threads, batch=batch, steps=steps, side=side)
    step = Times(tuple(map(max, zip(*(r["seconds"] for r in results), strict=True))))
    return Training(
        step, ranks * batch / statistics.mean(step.seconds), max(r["peak_bytes"] for r in results)
    )


def _ranks(function: str, ranks: int, threads: int, **arguments: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        shared = {"meet": f"file://{folder}/meet", "ranks": ranks, **arguments}
        each = [{**shared, "rank": rank} for rank in range(ranks)]
        return together(f"peers.ddp_ranks:{function}", each, threads)
