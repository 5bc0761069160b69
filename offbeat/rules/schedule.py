"""Rates over time: a PyTorch scheduler that moves with the epochs or the versions of a run."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from offbeat.errors import ConfigError


@dataclass(frozen=True)
class Schedule:
    """A PyTorch rate scheduler that moves on once per epoch, once per version, or by progress.

    Progress counts the batches that all workers are through with, as a plain loop would: one
    schedule then means the same under every discipline.
    """

    factory: Callable[[torch.optim.Optimizer], Any]
    per: Literal["epoch", "version", "progress"] = "epoch"

    def __post_init__(self) -> None:
        if self.per not in ("epoch", "version", "progress"):
            raise ConfigError(
                f"a schedule moves per 'epoch', per 'version' or per 'progress', not {self.per!r}"
            )

    def target(self, version: int, epoch: int, progress: int) -> int:
        """How often it has moved on by now."""
        return {"epoch": epoch, "version": version, "progress": progress}[self.per]


def move_on(scheduler: Any, moved: int, target: int) -> int:
    """Move a scheduler that has `moved` so often on to `target`; returns how often it has by then.

    One of fixed length has its last rate from its end on.
    """
    length = getattr(scheduler, "total_steps", None)
    end = target if not isinstance(length, int) else min(target, length - 1)
    while moved < end:
        try:
            scheduler.step()
        except ValueError as error:
            if "Tried to step" not in str(error):
                raise
            return target  # one of fixed length is inside of it
        moved += 1
    return max(moved, target)


@contextmanager
def before_any_step() -> Iterator[None]:
    """Move a scheduler of a rule that has made no step, and knows it; PyTorch warns of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


class Shown:
    """A rule that makes no step: it shows what its schedule has come to."""

    def __init__(self, make: Callable[[], torch.optim.Optimizer], schedule: Schedule | None):
        self.make, self.schedule = make, schedule
        self._begin()

    def _begin(self) -> None:
        self.rule, self.moved = self.make(), 0
        self.scheduler = None if self.schedule is None else self.schedule.factory(self.rule)

    def groups(self, version: int, epoch: int, progress: int) -> list[dict[str, Any]]:
        """Parameters and settings at a version."""
        if self.schedule is not None:
            target = self.schedule.target(version, epoch, progress)
            if target < self.moved:  # the store has gone back to a checkpoint
                self._begin()
            with before_any_step():
                self.moved = move_on(self.scheduler, self.moved, target)
        return self.rule.param_groups
