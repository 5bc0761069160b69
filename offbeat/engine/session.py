"""What happens around an engine's steps: tests, checkpoints, a clean stop, fixed arithmetic."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offbeat.config.job import Job
from offbeat.data.random_state import undisturbed
from offbeat.engine.intervals import Due, Intervals
from offbeat.engine.signals import heard
from offbeat.folder.checkpoint import RunFolder
from offbeat.log.records import Evaluated
from offbeat.model.evaluation import Evaluator
from offbeat.store.store import Store

# What an engine writes down of itself: tensors and JSON.
Snapshotter = Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]]


class Session:
    """Watches a store between two steps of its engine."""

    def __init__(
        self,
        job: Job,
        store: Store,
        folder: RunFolder | None,
        evaluator: Evaluator | None,
        intervals: Intervals,
    ):
        self.job, self.store, self.folder = job, store, folder
        self.evaluator, self.due = evaluator, Due(store, intervals)
        self.stopping: int | None = None  # the signal that asked for it

    def between(self, now: float, snapshot: Snapshotter) -> None:
        """Test and save if it is time to."""
        if self.due.test():
            self.test(now)
        if self.folder is not None and self.due.save():
            self.save(snapshot)

    def test(self, now: float) -> None:
        """Evaluate what the store holds, never what a worker holds."""
        assert self.evaluator is not None
        device = self.evaluator.device
        with device.entered():
            found = self.evaluator(self.job.tested(self.store, device))
        self.due.tested()
        self.store.log.write(Evaluated(now, self.store.version, self.store.applied, *found))

    def last_test(self, now: float) -> None:
        """A run ends with a test, unless the last update has just been tested."""
        if self.due.last_test():
            self.test(now)

    def save(self, snapshot: Snapshotter) -> None:
        """Write a checkpoint; parameters that are not finite are never saved over good ones."""
        assert self.folder is not None
        self.due.saved()
        if not self.store.parameters.finite():
            return
        tensors, meta = snapshot()
        session = {"tested": self.due.tests, **self.store.log.mark()}
        self.folder.save(self.store.version, tensors, {**meta, "session": session})

    def restore(self, meta: Mapping[str, Any]) -> None:
        self.due.restore(meta["session"]["tested"])

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """The first Ctrl-C asks for a stop at the next whole step, the second stops at once."""

        def ask(number: int) -> None:
            self.stopping = number

        with heard(ask):
            yield


@contextmanager
def fixed_arithmetic(threads: int = 1) -> Iterator[None]:
    """A fixed number of threads and private random numbers: a run depends on its seed alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with undisturbed():
            yield
    finally:
        torch.set_num_threads(before)
