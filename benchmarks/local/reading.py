"""Samples that take long to read: what two readers bring to a run, and to a plain loop."""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import offbeat as ob
from benchmarks.figure import Figure, Peer
from benchmarks.local.runs import NEVER, WARM_UP, Steps, per_second
from benchmarks.peers.launch import alone
from benchmarks.scale import Scale

READERS = 2
BATCH = 32
EACH = 0.005  # seconds of a sample
SGD = partial(torch.optim.SGD, lr=0.05)


class Slow(Dataset[Any]):
    """Waits for each sample, as for a disk."""

    def __init__(self, samples: int):
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(EACH)
        return torch.full((64,), index / self.samples), index % 10


def _problem(seconds: float) -> tuple[nn.Module, DataLoader[Any]]:
    batches = WARM_UP + 2 + round(seconds * READERS / EACH / BATCH)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    data = Slow(batches * BATCH)
    return model, DataLoader(data, BATCH, shuffle=True, num_workers=READERS)


def run(seconds: float) -> dict[str, Any]:
    """One worker of offbeat with the loader's readers."""
    (model, loader), steps = _problem(seconds), Steps(1)
    done = ob.train(
        model, loader, functional.cross_entropy, optimizer=SGD, workers=1, threads=1,
        checkpoint_every=NEVER, listeners=[steps],
    )  # fmt: skip
    return {"per_second": per_second(steps.times, BATCH), **done.summary().overlap}


def loop(seconds: float) -> dict[str, Any]:
    """PyTorch's own readers in PyTorch's own loop."""
    torch.set_num_threads(1)
    model, loader = _problem(seconds)
    rule, times = SGD(model.parameters()), []
    for x, y in loader:
        rule.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        rule.step()
        times.append(time.perf_counter())
    return {"per_second": per_second([times], BATCH)}


def reading(scale: Scale) -> list[Figure]:
    """Samples/s of a run on a loader with readers, of those of the plain loop."""
    window = {"seconds": scale.window}
    pairs = [
        (alone("local.reading:run", window), alone("local.reading:loop", window))
        for _ in range(scale.pairs)
    ]
    return [
        Figure(
            f"samples of {1000 * EACH:.0f} ms, {READERS} readers, of a plain loop's",
            median(mine["per_second"] / theirs["per_second"] for mine, theirs in pairs),
            "x",
            at_least=0.9,
            beside=f"batches of {BATCH}, median of {len(pairs)} pairs",
            peers=(
                Peer("offbeat", median(mine["per_second"] for mine, _ in pairs), "samples/s"),
                Peer("DataLoader", median(its["per_second"] for _, its in pairs), "samples/s"),
            ),
        )
    ]
