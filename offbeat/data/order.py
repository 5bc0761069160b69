"""In which order samples come where a sampler says so: the same in every process."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from offbeat.data.random_state import seed_all, undisturbed
from offbeat.errors import ConfigError, RunError

# These draw from a generator that they are given, and from nothing else.
_QUIET = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@dataclass(frozen=True)
class SamplerOrder:
    """What a user's sampler yields, with chance that comes from the seed and the epoch alone.

    With `size` the sampler yields batches, all of so many samples; the last may have fewer.
    """

    sampler: Any
    dataset: Any
    size: int | None = None
    count: int = field(init=False)  # samples of an epoch

    def __post_init__(self) -> None:
        first = self._drawn(0, 0)
        if first != self._drawn(0, 0):
            raise ConfigError(
                f"{self} yields another order each time, although the generators of PyTorch, "
                "Python and NumPy are seeded: each worker asks it for itself, so let it draw from "
                "them, or from its own attribute `generator`"
            )
        object.__setattr__(self, "count", len(first))

    def __str__(self) -> str:
        return type(self.sampler).__name__

    def __len__(self) -> int:
        return self.count

    @property
    def quiet(self) -> bool:
        """Whether making an order leaves the generators of the process alone."""
        return type(self.sampler) in _QUIET

    def rows(self, seed: int, epoch: int) -> Tensor:
        """The samples of `epoch`, by number."""
        found = self._drawn(seed, epoch)
        if len(found) != self.count:
            raise RunError(
                f"{self} yields {len(found)} samples in epoch {epoch} and {self.count} in the "
                "first: every epoch of a run has as many"
            )
        return torch.tensor(found)

    def _drawn(self, seed: int, epoch: int) -> list[int]:
        sampler = copy.copy(self.sampler)
        if getattr(sampler, "generator", self) is not self:
            sampler.generator = torch.Generator().manual_seed(seed)
        if self.quiet:
            return self._numbers(list(sampler))
        with undisturbed():
            seed_all(seed)
            # One that shuffles a list of its own begins with the same list each time.
            kept = [self.dataset, getattr(sampler, "generator", None)]
            sampler = copy.deepcopy(sampler, {id(one): one for one in kept})
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            return self._numbers(list(sampler))

    def _numbers(self, found: list[Any]) -> list[int]:
        if self.size is not None:
            found = self._joined(found, self.size)
        samples = len(self.dataset)
        try:
            numbers = [index(one) for one in found]
        except TypeError:
            raise ConfigError(
                f"{self} yields {type(found[0]).__name__}, and a lease says samples by number: "
                "let it yield whole numbers, and the dataset take them"
            ) from None
        if not numbers or not 0 <= min(numbers) <= max(numbers) < samples:
            raise ConfigError(
                f"{self} yields no samples, or others than 0 to {samples - 1}, which the dataset "
                "has: was it made for another dataset?"
            )
        return numbers

    def _joined(self, batches: list[Any], size: int) -> list[Any]:
        lengths = [len(batch) for batch in batches]
        if any(length != size for length in lengths[:-1]) or max(lengths[-1:], default=0) > size:
            raise ConfigError(
                f"{self} makes batches of {min(lengths)} to {max(lengths)} samples, and workers "
                "are given as many for every step: make batches of one size, or sort the dataset "
                "and pass batch_size= and a sampler"
            )
        return [one for batch in batches for one in batch]


@dataclass(frozen=True)
class Reading:
    """How samples are read, as a DataLoader says it beyond its options.

    `order` is that of its sampler; `processes` read ahead for each worker, `depth` batches each.
    """

    order: SamplerOrder | None = None
    processes: int = 0
    depth: int = 2
    begin: Callable[[int], None] | None = None  # called in each of them with its number
