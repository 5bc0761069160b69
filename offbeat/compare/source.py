"""Where the task of every cell comes from, so that equal seeds begin with equal weights."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from offbeat.config.task import Task


class Source(Protocol):
    """Makes the task of a comparison."""

    @property
    def name(self) -> str:
        """What the task is called in results."""

    def make(self, seed: int) -> Task:
        """The task with the initial weights of `seed`."""

    def origin(self, seed: int) -> dict[str, Any]:
        """What a run folder says of where its model and data came from."""

    def mark(self) -> dict[str, Any]:
        """What must be the same for cells to be comparable, whatever their seed."""

    def blame(self, error: Exception) -> None:
        """Raise an error that says where it happened, if that is known."""


class Given:
    """A task that a Python program has made, or a function that makes one from a seed."""

    def __init__(self, task: Task | Callable[[int], Task]):
        self.task = task

    @property
    def name(self) -> str:
        named = self.task.model if isinstance(self.task, Task) else self.task
        return str(getattr(named, "__name__", type(named).__name__))

    def make(self, seed: int) -> Task:
        return self.task if isinstance(self.task, Task) else seeded(seed, lambda: self._call(seed))

    def _call(self, seed: int) -> Task:
        assert not isinstance(self.task, Task)
        return self.task(seed)

    def origin(self, seed: int) -> dict[str, Any]:
        return {}

    def mark(self) -> dict[str, Any]:
        return {"task": self.name}

    def blame(self, error: Exception) -> None:
        """A program sees its own errors."""


def seeded(seed: int, make: Callable[[], Task]) -> Task:
    """What `make` makes when PyTorch's numbers begin at `seed`; the caller's go on undisturbed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()
