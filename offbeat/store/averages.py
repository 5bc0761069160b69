"""Averaged buffers: what each worker sent last, and the mean that is tested, saved, begun with."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import CheckpointError
from offbeat.model.table import Entry, under


class Averages:
    """Buffers such as batch-norm statistics over all workers, each by the samples it has seen.

    A worker that joins begins with the mean, so what others have learnt is never learnt anew. Its
    samples are added to those of its earlier incarnations. A worker that is lost counts as far as
    it had seen more than all together who are there: what they know is newer, unless they have
    only begun.
    """

    def __init__(self, entries: Sequence[Entry], model: nn.Module):
        self.entries = [entry for entry in entries if entry.policy == "averaged"]
        self.begin(model)

    def begin(self, model: nn.Module) -> None:
        """Nobody has sent anything: buffers are what the model has."""
        self.start = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
        self.reset()

    def reset(self) -> None:
        """Forget what was sent."""
        self.last: dict[int, dict[str, Tensor]] = {}  # of each worker
        self.seen: dict[int, int] = {}  # samples of each worker
        self.live: set[int] = set()  # who has sent something since it joined
        self.lost: set[int] = set()

    # ------------------------------------------------------------ what workers do

    def take(self, worker: int, samples: int, buffers: dict[str, Tensor]) -> None:
        """Own what `worker` has sent with an applied contribution."""
        if not buffers:
            return
        self.last[worker] = buffers
        self.seen[worker] = self.seen.get(worker, 0) + samples
        if worker not in self.lost:  # its contribution may have waited for others
            self.live.add(worker)

    def enter(self, worker: int) -> None:
        self.lost.discard(worker)

    def forget(self, worker: int) -> None:
        """What a lost worker has sent gives way to what others see."""
        self.live.discard(worker)
        self.lost.add(worker)

    # ------------------------------------------------------------ the mean

    def weights(self) -> dict[int, int]:
        """How much each worker counts, in the order of their numbers."""
        there = sum(self.seen[worker] for worker in self.live)
        found: dict[int, int] = {}
        for worker, seen in sorted(self.seen.items()):
            weight = seen if worker in self.live else seen - there
            if weight > 0:
                found[worker] = weight
        return found

    def mean(self) -> dict[str, Tensor]:
        """The averaged buffers, to be copied and not to be changed."""
        weights = self.weights()
        return {entry.name: self._mean(entry, weights) for entry in self.entries}

    def _mean(self, entry: Entry, weights: Mapping[int, int]) -> Tensor:
        having = [worker for worker in weights if entry.name in self.last[worker]]
        if not having:
            return self.start[entry.name]
        values = [self.last[worker][entry.name] for worker in having]
        if all(_same_bits(values[0], value) for value in values[1:]):
            return values[0]
        if not (entry.dtype.is_floating_point or entry.dtype.is_complex):
            # A mean of counters, flags or positions would be a value that nobody has had.
            return self.last[max(having, key=weights.__getitem__)][entry.name]
        common = math.gcd(*(weights[worker] for worker in having))
        shares = [weights[worker] // common for worker in having]
        wide = torch.complex128 if entry.dtype.is_complex else torch.float64
        total = torch.zeros(entry.shape, dtype=wide)
        for value, share in zip(values, shares, strict=True):
            total += value.to(wide) * share
        return (total / sum(shares)).to(entry.dtype)

    @torch.no_grad()
    def write(self, into: Mapping[str, Tensor]) -> None:
        """Copy the mean to where there is room for it."""
        for name, value in self.mean().items():
            if name in into:
                into[name].copy_(value)

    def begun_with(self) -> dict[str, Tensor]:
        """What all buffers of a worker that joins begin with."""
        return self.start | self.mean()

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, Tensor]:
        found = {f"buffers/{entry.name}": self.start[entry.name] for entry in self.entries}
        for worker, buffers in self.last.items():
            found |= {f"statistics/{worker}/{name}": t for name, t in buffers.items()}
            found[f"seen/{worker}"] = torch.tensor(self.seen[worker])
        return found

    def meta(self) -> dict[str, Any]:
        return {"live": sorted(self.live), "lost": sorted(self.lost)}

    def load(
        self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None, where: str = ""
    ) -> None:
        """Take what `state` and `meta` gave; older checkpoints say of nobody what it had seen."""
        kinds = {entry.name: entry for entry in self.entries}
        for name, tensor in under("buffers/", tensors).items():
            if name in kinds:
                self.start[name] = _checked(tensor, kinds[name], where)
        self.reset()
        for path, tensor in under("statistics/", tensors).items():
            number, _, name = path.partition("/")
            if name in kinds:
                mine = self.last.setdefault(int(number), {})
                mine[name] = _checked(tensor, kinds[name], where)
        for worker in self.last:
            seen = tensors.get(f"seen/{worker}")
            self.seen[worker] = 1 if seen is None else int(seen)
        self.live = set(self.last if meta is None else meta["live"])
        self.lost = set() if meta is None else set(meta["lost"])

    def begin_with(
        self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any] | None, where: str
    ) -> None:
        """Begin where another run ended: with its mean."""
        self.load(tensors, meta, where)
        self.start |= {name: value.clone() for name, value in self.mean().items()}
        self.reset()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Also where a value is no number, which is never equal to itself."""
    return one is other or torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _checked(tensor: Tensor, entry: Entry, where: str) -> Tensor:
    if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
        raise CheckpointError(
            f"{where or 'the checkpoint'} is of another model: buffer {entry.name!r} is "
            f"{tuple(tensor.shape)} {tensor.dtype} there and {entry.shape} {entry.dtype} here"
        )
    return tensor.clone()
