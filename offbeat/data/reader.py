"""How a lease becomes a batch: the same one whichever worker reads it, and whenever."""

from collections.abc import Callable
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from offbeat.data.lease import Lease
from offbeat.data.order import Reading
from offbeat.data.random_state import seed_all
from offbeat.errors import ConfigError

Collate = Callable[[list[Any]], Any]


_WORD = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """One 63-bit seed from several numbers, the same everywhere (the steps of SplitMix64)."""
    return reduce(_mixed_in, numbers, 0) >> 1


def _mixed_in(state: int, number: int) -> int:
    state = (state + number + 0x9E3779B97F4A7C15) & _WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _WORD
    return state ^ (state >> 31)


@lru_cache(maxsize=8)
def _begun(*numbers: int) -> int:
    """The state after these, which are the same for many seeds."""
    return reduce(_mixed_in, numbers, 0)


class Reader:
    """Turns a lease into a batch: the same one whichever worker reads it, and whenever."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int = 0,
        shuffle: bool = True,
        collate: Collate | None = None,
        reading: Reading = Reading(),  # noqa: B008
    ):
        self.dataset, self.seed, self.shuffle, self.collate = dataset, seed, shuffle, collate
        self.reading = reading
        self._orders: dict[int, Tensor] = {}

    def check(self) -> None:
        """Refuse what cannot be read."""
        if not hasattr(self.dataset, "__len__") or not hasattr(self.dataset, "__getitem__"):
            raise ConfigError(
                "data must be a Dataset with __len__ and __getitem__, an IterableDataset, or a "
                f"DataLoader, not {type(self.dataset).__name__}"
            )

    def __len__(self) -> int:
        counted: Any = self.dataset if self.reading.order is None else self.reading.order
        return len(counted)

    def order(self, epoch: int) -> Tensor:
        """The order of the samples in `epoch`."""
        if epoch not in self._orders:
            # Two epochs overlap at most in practice; older orders are made again when needed.
            if len(self._orders) > 3:
                self._orders.pop(min(self._orders))
            self._orders[epoch] = self._ordered(epoch)
        return self._orders[epoch]

    def _ordered(self, epoch: int) -> Tensor:
        seed = mix(self.seed, 1, epoch)
        if self.reading.order is not None:
            return self.reading.order.rows(seed, epoch)
        if not self.shuffle:
            return torch.arange(len(self))
        return torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))

    def read(self, lease: Lease, part: slice = slice(None)) -> Any:
        """The batch of `lease`, or of a part of it."""
        rows = self.order(lease.epoch)[lease.start : lease.stop]
        return self.fetch(rows if part == slice(None) else rows[part])

    def fetch(self, rows: Tensor) -> Any:
        """The batch of the samples numbered `rows`."""
        if isinstance(self.dataset, TensorDataset) and self.collate is None:
            # The same bits as from stacking samples one by one, and much faster.
            return tuple([tensor.index_select(0, rows) for tensor in self.dataset.tensors])
        whole = getattr(self.dataset, "__getitems__", None)
        numbers = rows.tolist()
        items = whole(numbers) if whole else [self.dataset[number] for number in numbers]
        return (self.collate or default_collate)(items)

    def reseed(self, lease: Lease) -> None:
        """Give whatever is random in reading and computing this lease its own random numbers."""
        # As mix(seed, 2, epoch, start).
        seed = _mixed_in(_begun(self.seed, 2, lease.epoch), lease.start) >> 1
        seed_all(seed)
