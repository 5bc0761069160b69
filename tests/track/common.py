"""What the tests of trackers share: a small run, and a callback that remembers its calls."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.log.records import Updated

UNEVEN = "20ms,20ms,80ms"


def small_run(
    *listeners: ob.Listener, sync: str = "asp", samples: int = 48, **options: Any
) -> ob.Run:
    """Three workers, one of them slow, on random data; simulated unless told otherwise."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(
        torch.randn(samples, 3, generator=generator), torch.randn(samples, 2, generator=generator)
    )
    torch.manual_seed(0)
    options = {"cluster": UNEVEN, "epochs": 2, "batch_size": 4, "test": data} | options
    if options.get("engine") == "local":
        del options["cluster"]
        options = {"workers": 3} | options
    return ob.train(
        nn.Linear(3, 2),
        data,
        options.pop("loss", nn.functional.mse_loss),
        discipline=sync,
        optimizer=partial(torch.optim.SGD, lr=0.01),
        listeners=listeners,
        **options,
    )


class Memory(ob.Callback):
    """Remembers what it is told."""

    def __init__(self, every: int | None = 1):
        self.every = every
        self.begun: list[ob.track.Begin] = []
        self.updates: list[ob.track.Update] = []
        self.epochs: list[ob.track.Epoch] = []
        self.tests: list[Any] = []
        self.events: list[ob.track.Event] = []
        self.ends: list[ob.track.End] = []

    def on_begin(self, begin: ob.track.Begin) -> None:
        self.begun.append(begin)

    def on_update(self, update: ob.track.Update) -> None:
        self.updates.append(update)

    def on_epoch(self, epoch: ob.track.Epoch) -> None:
        self.epochs.append(epoch)

    def on_test(self, test: Any) -> None:
        self.tests.append(test)

    def on_event(self, event: ob.track.Event) -> None:
        self.events.append(event)

    def on_end(self, end: ob.track.End) -> None:
        self.ends.append(end)


class StopAt(ob.Listener):
    """Raises an error at an update: a run that fails, or is stopped."""

    def __init__(self, version: int, error: BaseException):
        self.version, self.error = version, error

    def see(self, record: Any) -> None:
        if isinstance(record, Updated) and record.version == self.version:
            raise self.error


def open_here(folder: Path) -> list[str]:
    """The files under a folder that this process has open."""
    there = (link.resolve() for link in Path("/proc/self/fd").iterdir())
    return [str(path) for path in there if path.is_relative_to(folder)]
