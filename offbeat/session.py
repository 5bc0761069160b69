"""What happens around an engine's steps: tests, checkpoints, a clean stop, fixed arithmetic."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offbeat.chance import undisturbed
from offbeat.job import Job
from offbeat.log import Evaluated
from offbeat.replica.evaluate import Evaluator
from offbeat.signals import heard
from offbeat.store.checkpoint import RunFolder
from offbeat.store.core import Store

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
        evaluate_every: int,
        checkpoint_every: int | None,
    ):
        self.job, self.store, self.folder = job, store, folder
        self.evaluator, self.evaluate_every = evaluator, evaluate_every
        self.checkpoint_every = checkpoint_every
        self.tested = 0  # tests done
        self.saved_version, self.saved_epoch = 0, 0
        self.stopping: int | None = None  # the signal that asked for it

    def between(self, now: float, snapshot: Snapshotter) -> None:
        """Test and save if it is time to."""
        applied = self.store.leases.ledger.applied
        if self.evaluator is not None and applied >= (self.tested + 1) * self.evaluate_every:
            self.test(now)
        if self.folder is not None and self._due():
            self.save(snapshot)

    def _due(self) -> bool:
        if self.checkpoint_every is None:
            return self.store.epoch > self.saved_epoch
        return self.store.version >= self.saved_version + self.checkpoint_every

    def test(self, now: float) -> None:
        """Evaluate what the store holds, never what a worker holds."""
        assert self.evaluator is not None
        found = self.evaluator(self.job.tested(self.store))
        applied = self.store.leases.ledger.applied
        self.tested = applied // self.evaluate_every
        self.store.log.write(Evaluated(now, self.store.version, applied, *found))

    def last_test(self, now: float) -> None:
        """A run ends with a test, unless the last update has just been tested."""
        applied = self.store.leases.ledger.applied
        if self.evaluator is not None and applied % self.evaluate_every:
            self.test(now)

    def save(self, snapshot: Snapshotter) -> None:
        """Write a checkpoint; parameters that are not finite are never saved over good ones."""
        assert self.folder is not None
        self.saved_version, self.saved_epoch = self.store.version, self.store.epoch
        if self.store.parameters is not None and not self.store.parameters.finite():
            return
        tensors, meta = snapshot()
        session = {"tested": self.tested, **self.store.log.mark()}
        self.folder.save(self.store.version, tensors, {**meta, "session": session})

    def restore(self, meta: Mapping[str, Any]) -> None:
        self.tested = meta["session"]["tested"]
        self.saved_version, self.saved_epoch = self.store.version, self.store.epoch

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
