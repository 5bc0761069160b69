"""Runs of split models, each in a process of its own that returns plain numbers."""

import tempfile
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.local.runs import NEVER, WARM_UP, Steps, per_second
from benchmarks.peers.common import accuracy
from offbeat.recipes import chars, mnist

BATCH, WIDTH = 16, 32
TEXT = "To be, or not to be, that is the question: "


def _chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))


def _made_up(samples: int) -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(samples, WIDTH), torch.randint(WIDTH, (samples,)))


def _seconds(steps: Steps) -> float:
    """Of a step, between the first ones and the last ones, when the pipeline empties."""
    times = steps.times[0][WARM_UP:-WARM_UP]
    return (times[-1] - times[0]) / (len(times) - 1)


def emulated(layout: str, least: float, steps: int) -> dict[str, Any]:
    """Seconds of a step of one replica whose processes compute for `least` seconds each."""
    seen = Steps(1)
    ob.train(
        _chain(),
        _made_up(BATCH * (steps + 2 * WARM_UP)),
        functional.cross_entropy,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.01),
        layout=layout,
        workers=1,
        threads=1,
        emulate=[least],
        batch_size=BATCH,
        checkpoint_every=NEVER,
        listeners=[seen],
    )
    return {"seconds": _seconds(seen)}


def replicas(layout: str, emulate: list[float], seconds: float) -> dict[str, Any]:
    """Samples/s of replicas of unequal speed under asp."""
    steps = ceil(sum(seconds / least for least in emulate))
    seen = Steps(len(emulate))
    ob.train(
        _chain(),
        _made_up(BATCH * (steps + 2 * WARM_UP * len(emulate))),
        functional.cross_entropy,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.01),
        layout=layout,
        workers=len(emulate),
        threads=1,
        emulate=emulate,
        batch_size=BATCH,
        checkpoint_every=NEVER,
        listeners=[seen],
    )
    return {"per_second": per_second(seen.times, BATCH)}


# With seed 0, 0.01, 0.02 and 0.05 gave 1f1b 95.9, 96.2 and 93.4 %, 2bw 96.0, 95.6 and 26.1 %; with
# 0.01 and 0.02 stash reached 95.8 and 92.9 %: the more staleness, the smaller the rate it bears.
MNIST_RATE = 0.01


def mnist_accuracy(
    folder: str, layout: str, epochs: int, seed: int, samples: int | None
) -> dict[str, Any]:
    """The accuracy of a perceptron of eight blocks after so many epochs."""
    task = mnist(folder, seed=seed, limit=samples)
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(),
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip
    run = ob.train(
        model,
        task.data,
        task.loss,
        discipline="bsp",
        optimizer=partial(torch.optim.SGD, lr=MNIST_RATE, momentum=0.9),
        layout=layout,
        workers=1,
        threads=1,
        batch_size=32,
        epochs=epochs,
        seed=seed,
        checkpoint_every=NEVER,
    )
    assert isinstance(task.test, TensorDataset)
    return {"accuracy": accuracy(run.model, task.test.tensors)}


def memory(width: int, layers: int, stages: int) -> dict[str, Any]:
    """The most bytes that a process of a split transformer and of its store holds."""
    task = _text(samples=16, width=width, layers=layers, heads=8)
    run = ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="bsp",
        optimizer=partial(torch.optim.Adam, lr=1e-4),
        layout=f"pp={stages},split=parameters",
        shards=stages,
        workers=1,
        threads=1,
        batch_size=8,
        checkpoint_every=NEVER,
    )
    figures = run.summary()
    assert figures.layout is not None
    return {
        "parameters": sum(p.numel() for p in task.model.parameters()),
        "worker": max(process.nbytes for process in figures.layout.per_process),
        "server": figures.memory["store_largest"],
    }


def _text(samples: int, **sizes: int) -> ob.Task:
    """The character transformer on a text that holds about so many windows to train on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.txt")
        path.write_text(TEXT * (64 * samples * 10 // 9 // len(TEXT) + 64))
        return chars(path, **sizes)


def predicted(layout: str, steps: int) -> dict[str, Any]:
    """Seconds of a step of the character transformer, as predicted and as measured."""
    task = _text(samples=32 * (steps + 2 * WARM_UP))
    torch.set_num_threads(1)
    sample = torch.stack([task.data[index][0] for index in range(32)])
    told = ob.explain(layout, task.model, sample)
    seen = Steps(1)
    ob.train(
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.01),
        layout=ob.Layout.parse(f"{layout},split={'+'.join(told.split)}"),
        workers=1,
        threads=1,
        batch_size=32,
        checkpoint_every=NEVER,
        listeners=[seen],
    )
    times = seen.times[0][WARM_UP:-WARM_UP]
    lasted = [after - before for before, after in pairwise(times)]
    return {"predicted": told.seconds, "measured": median(lasted)}
