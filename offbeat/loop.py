"""A script's loop: its batches, in one loop or in one for each epoch, and when it is enough."""

import math
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Protocol

from offbeat.data.lease import Lease
from offbeat.errors import ConfigError


class Looping(Protocol):
    """The participant whose loop it is."""

    holds: bool  # whether a batch is out whose step has not been made
    stopping: bool  # whether the run is to end for all

    def coming(self) -> Lease | None:
        """The samples of the next batch, if there are any."""


def per_epoch(samples: int, batch_size: int, drop_last: bool) -> int:
    """Batches of an epoch, of all workers together."""
    return (samples + (0 if drop_last else batch_size - 1)) // batch_size


class Batches(Iterator[Any]):
    """A worker's batches: all of them in one loop, or in a loop for each epoch.

    ```
    for epoch in batches.epochs():
        for x, y in batches:
    ```
    """

    def __init__(self, member: Looping, flow: Generator[Any, None, None], each: int):
        self._member, self._flow, self._each = member, flow, each
        self._nested = False

    def __len__(self) -> int:
        """Batches of an epoch, of all workers together."""
        return self._each

    def __next__(self) -> Any:
        return next(self._flow)

    def __iter__(self) -> Iterator[Any]:
        return self._one_epoch() if self._nested else self

    def epochs(self) -> Iterator[int]:
        """The epochs of which this worker gets samples; after a resume, those that are left."""
        self._nested = True
        begun = None
        while not self._member.stopping and (lease := self._member.coming()) is not None:
            if lease.epoch == begun:
                raise ConfigError(
                    "an epoch without a loop over its batches: write for x, y in batches inside "
                    "for epoch in batches.epochs()"
                )
            begun = lease.epoch
            yield begun
        for _ in self._flow:  # the end is told after the last batch
            raise AssertionError

    def _one_epoch(self) -> Iterator[Any]:
        member = self._member
        lease = member.coming()
        epoch = 0 if lease is None else lease.epoch
        try:
            # Samples that another worker has lost come back later than their epoch.
            while member.holds or ((lease := member.coming()) and lease.epoch <= epoch):
                try:
                    batch = next(self._flow)
                except StopIteration:
                    return
                yield batch
        except GeneratorExit:
            self._flow.close()
            raise


# ---------------------------------------------------------------- enough


class EarlyStopping:
    """Says when a score has not become better for a while.

    ```
    if stopping.step(score):
        run.stop()
    ```

    `patience` is how many scores in a row may fail to be better than the best by more than
    `margin`. Its state goes into checkpoints by `run.state(stopping=stopping)`.
    """

    def __init__(self, patience: int, higher_is_better: bool = False, margin: float = 0.0):
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience must be a whole number of at least 1, not {patience!r}")
        if not 0 <= margin < math.inf:
            raise ConfigError(f"margin must be a number of at least 0, not {margin!r}")
        self.patience, self.higher_is_better, self.margin = patience, higher_is_better, margin
        self.best: float | None = None
        self.since = 0  # scores since the best

    def step(self, score: float) -> bool:
        """Take in a score; whether it is enough. One that is no number is not better."""
        score = float(score)
        if self._better(score):
            self.best, self.since = score, 0
        else:
            self.since += 1
        return self.since >= self.patience

    def _better(self, score: float) -> bool:
        if math.isnan(score):
            return False
        if self.best is None:
            return True
        gain = score - self.best if self.higher_is_better else self.best - score
        return gain > self.margin

    def state_dict(self) -> dict[str, Any]:
        """The best score, and how many there have been since."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.best, self.since = state_dict["best"], state_dict["since"]
