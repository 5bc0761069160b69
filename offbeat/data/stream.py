"""Streams: an IterableDataset is read forward, and a lease numbers its samples as they come."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from offbeat.data.lease import Lease
from offbeat.data.order import Reading
from offbeat.data.random_state import RandomState, seed_all, undisturbed
from offbeat.data.reader import Collate, Reader, mix
from offbeat.errors import ConfigError, RunError

KEPT = 16  # leases whose samples are kept when others are read first
_PLAIN = (bool, int, float, str, bytes)


def open_reader(
    dataset: Dataset[Any],
    seed: int = 0,
    shuffle: bool = True,
    collate: Collate | None = None,
    reading: Reading = Reading(),  # noqa: B008
) -> Reader:
    """What makes batches of leases, whatever kind of dataset it is."""
    kind = StreamReader if isinstance(dataset, IterableDataset) else Reader
    return kind(dataset, seed, shuffle, collate, reading)


class StreamReader(Reader):
    """Reads a stream from its beginning in every epoch, and passes over what others are given.

    Whoever reads it, in whatever process, finds the same samples under the same numbers: it is
    iterated with generators of its own, which are seeded from the epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int = 0,
        shuffle: bool = False,
        collate: Collate | None = None,
        reading: Reading = Reading(),  # noqa: B008
    ):
        super().__init__(dataset, seed, False, collate, reading)
        self.epoch = -1
        self.samples: Iterator[Any] = iter(())
        self.at = 0  # the number of the sample that comes next
        self.passed: dict[int, Any] = {}  # read already, and not yet asked for
        self.chance: RandomState | None = None  # where the stream's own generators stand

    def check(self) -> None:
        """Refuse a stream whose samples cannot be numbered."""
        few = range(min(2, len(self)))
        one, other = [StreamReader(self.dataset, self.seed)._items(0, few) for _ in range(2)]
        if not _same(one, other):
            raise ConfigError(
                f"the stream {type(self.dataset).__name__} begins with other samples when it is "
                "read a second time, and each worker reads it for itself: let __iter__ begin "
                "anew, and draw from the generators of PyTorch, Python or NumPy alone"
            )

    def __len__(self) -> int:
        try:
            return len(self.dataset)  # type: ignore[arg-type]
        except TypeError:
            raise ConfigError(
                f"the stream {type(self.dataset).__name__} does not say how many samples make an "
                "epoch: give it __len__ (with batch_size=None, the batches of an epoch)"
            ) from None

    def read(self, lease: Lease, part: slice = slice(None)) -> Any:
        numbers = range(lease.start, lease.stop)[part]
        items = self._items(lease.epoch, numbers, KEPT * lease.samples)
        return (self.collate or default_collate)(items)

    def _items(self, epoch: int, numbers: range, kept: int = 0) -> list[Any]:
        with undisturbed():
            wanted = [n for n in numbers if n not in self.passed]
            if epoch != self.epoch or (wanted and wanted[0] < self.at):
                self._begin(epoch)
            if self.chance is not None:
                self.chance.recall()
            while self.at < numbers.stop:
                self.passed[self.at] = self._next()
                self.at += 1
            self.chance = RandomState()
        found = [self.passed.pop(number) for number in numbers]
        while len(self.passed) > kept:
            del self.passed[min(self.passed)]
        return found

    def _begin(self, epoch: int) -> None:
        seed_all(mix(self.seed, 1, epoch))
        self.chance = None
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self.samples, self.epoch, self.at = iter(self.dataset), epoch, 0
        self.passed.clear()

    def _next(self) -> Any:
        try:
            return next(self.samples)
        except StopIteration:
            raise RunError(
                f"the stream {type(self.dataset).__name__} ends after {self.at} samples of epoch "
                f"{self.epoch}, and its __len__ says {len(self)}"
            ) from None


def _same(one: Any, other: Any) -> bool:
    """Whether two samples are; what cannot be compared is taken to be."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return not isinstance(one, _PLAIN) or bool(one == other)
