"""What staleness does to a gradient element by element; factors on the whole are in `parts`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offbeat.discipline.parts import AdaptiveDelayCompensation, DelayCompensation, GapAware, Weigh
from offbeat.model.table import Flat, fill, named, under


class Reads:
    """Which versions a contribution may still be based on, so that a copy of them is needed.

    A worker may have pulled again before what it computed on an older version is applied: other
    contributions were waited for, or it had several under way.
    """

    def __init__(self, under_way: int = 1, by_base: bool = True):
        """Logs of old were made with the version of the last pull, whatever the base."""
        self.under_way, self.by_base = under_way, by_base
        self.pulls: dict[int, list[int]] = {}  # each worker's last ones, as many as may be needed
        self.waiting: list[int] = []  # the bases of contributions that wait for others

    def allow(self, under_way: int) -> None:
        """A worker may have so many contributions under way."""
        self.under_way = max(self.under_way, under_way)

    def pull(self, worker: int, version: int) -> None:
        self.pulls[worker] = [*self.pulls.get(worker, []), version][-self.under_way :]

    def compared(self, worker: int, base: int) -> int:
        """The version that a worker's contribution is to be compared with."""
        return base if self.by_base else (self.pulls.get(worker) or [-1])[-1]

    def needed(self) -> set[int]:
        return {version for pulls in self.pulls.values() for version in pulls}.union(self.waiting)

    def forget(self, worker: int) -> None:
        """Nothing of a lost worker comes any more but what already waits."""
        if self.by_base:
            self.pulls.pop(worker, None)

    def meta(self) -> dict[str, Any]:
        return {"pulls": sorted(self.pulls.items()), "waiting": self.waiting}

    def load(self, meta: Mapping[str, Any]) -> None:
        self.pulls = {worker: list(pulls) for worker, pulls in meta["pulls"]}
        self.waiting = list(meta["waiting"])


class Weigher:
    """Corrects a late gradient with the parameters that it was computed on; this one has none."""

    needed = False

    def __init__(self, weigh: Weigh, parameters: Sequence[Flat]):
        self.parameters = list(parameters)
        self.backups: dict[int, list[Flat]] = {}  # by version
        # By worker, of its last pull: what an old checkpoint has, until each has pulled again.
        self.unversioned: dict[int, list[Flat]] = {}

    def remember(self, version: int, needed: Collection[int]) -> None:
        """The parameters are read now, at `version`; only copies of `needed` versions are kept."""
        idle = [old for old in self.backups if old not in needed]
        spare = [self.backups.pop(old) for old in idle]
        if version in self.backups:
            return
        if spare:
            for backup, flat in zip(spare[0], self.parameters, strict=True):
                backup.copy_(flat)
            self.backups[version] = spare[0]
        else:
            self.backups[version] = [flat.clone() for flat in self.parameters]

    def correct(self, worker: int, base: int, payload: list[Flat]) -> list[Flat]:
        """The gradient as if it had been taken nearer to where the parameters are now."""
        if not self.needed:
            return payload
        backups = self.backups.get(base) or self.unversioned.get(worker)
        assert backups is not None, f"nobody has read version {base}"
        return [self.corrected(i, flat, backups[i]) for i, flat in enumerate(payload)]

    def corrected(self, shard: int, gradient: Flat, backup: Flat) -> Flat:
        """The gradient of one shard, computed on `backup`."""
        raise NotImplementedError

    def before_step(self) -> list[Flat] | None:
        """Where the parameters were, if the size of a step matters."""
        return None

    def after_step(self, before: list[Flat] | None) -> None:
        """The parameters have moved."""

    # ------------------------------------------------------------ state as named tensors

    def own_state(self) -> dict[str, Tensor]:
        """What is kept beside copies of the parameters."""
        return {}

    def load_own(self, state: dict[str, Tensor]) -> None:
        """Take back what concerns these parameters."""

    def state(self) -> dict[str, Tensor]:
        found = self.own_state()
        for version, flats in self.backups.items():
            found |= named(f"backup/version/{version}/", flats)
        for worker, flats in self.unversioned.items():
            found |= named(f"backup/{worker}/", flats)
        return found

    def load(self, state: dict[str, Tensor]) -> None:
        """Take what concerns these parameters; the state may be that of many more."""
        self.load_own(state)
        backups = under("backup/", state)
        self.backups = self._copies(under("version/", backups))
        old = {path: t for path, t in backups.items() if not path.startswith("version/")}
        self.unversioned = self._copies(old)

    def _copies(self, tensors: Mapping[str, Tensor]) -> dict[int, list[Flat]]:
        """Copies of the parameters by the number that their names begin with."""
        found = {}
        for number in {int(path.partition("/")[0]) for path in tensors}:
            found[number] = [Flat(flat.table) for flat in self.parameters]
            fill(found[number], under(f"{number}/", tensors))
        return found

    @property
    def nbytes(self) -> int:
        kept = [*self.backups.values(), *self.unversioned.values()]
        return sum(flat.table.nbytes for backup in kept for flat in backup)


class DelayWeigher(Weigher):
    """Adds what the gradient has missed, as far as its own square tells."""

    needed = True

    def __init__(
        self, weigh: DelayCompensation | AdaptiveDelayCompensation, parameters: Sequence[Flat]
    ):
        super().__init__(weigh, parameters)
        self.base = weigh.strength

    def corrected(self, shard: int, gradient: Flat, backup: Flat) -> Flat:
        out = Flat(gradient.table)
        now = self.parameters[shard]
        for i, g in enumerate(gradient.spans):
            strength = self.strength(shard, i, g)
            out.spans[i].copy_(g + strength * g * g * (now.spans[i] - backup.spans[i]))
        return out

    def strength(self, shard: int, span: int, gradient: Tensor) -> float | Tensor:
        """How much of it is added."""
        return self.base


class AdaptiveDelayWeigher(DelayWeigher):
    """The same, less where gradients are large."""

    def __init__(self, weigh: AdaptiveDelayCompensation, parameters: Sequence[Flat]):
        super().__init__(weigh, parameters)
        self.decay = weigh.decay
        self.mean_square = [Flat(flat.table) for flat in parameters]

    def strength(self, shard: int, span: int, gradient: Tensor) -> Tensor:
        mean_square = self.mean_square[shard].spans[span]
        mean_square.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
        return self.base / torch.sqrt(mean_square + 1e-7)

    def own_state(self) -> dict[str, Tensor]:
        return named("square/", self.mean_square)

    def load_own(self, state: dict[str, Tensor]) -> None:
        fill(self.mean_square, under("square/", state))

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(flat.table.nbytes for flat in self.mean_square)


class GapWeigher(Weigher):
    """Divides by how far the parameters have gone, in steps of average size."""

    needed = True

    def __init__(self, weigh: GapAware, parameters: Sequence[Flat]):
        super().__init__(weigh, parameters)
        self.decay = weigh.decay
        self.step_size: dict[str, Tensor] = {}

    def corrected(self, shard: int, gradient: Flat, backup: Flat) -> Flat:
        out = Flat(gradient.table)
        now = self.parameters[shard]
        for name, g in gradient.views.items():
            size = self.step_size.get(name)
            if size is None or not size > 0:  # nothing has moved yet, so there is no gap
                out.views[name].copy_(g)
                continue
            gap = (now.views[name] - backup.views[name]).abs() / size
            out.views[name].copy_(g / (1 + gap))
        return out

    def before_step(self) -> list[Flat]:
        return [flat.clone() for flat in self.parameters]

    def after_step(self, before: list[Flat] | None) -> None:
        """Follow the average size of a step, tensor by tensor so that sharding changes nothing."""
        assert before is not None
        for old, new in zip(before, self.parameters, strict=True):
            for name, view in new.views.items():
                moved = (view - old.views[name]).abs().mean()
                size = self.step_size.get(name)
                self.step_size[name] = (
                    moved if size is None else torch.lerp(moved, size, self.decay)
                )

    def own_state(self) -> dict[str, Tensor]:
        return {f"step/{name}": size for name, size in self.step_size.items()}

    def load_own(self, state: dict[str, Tensor]) -> None:
        mine = {name for flat in self.parameters for name in flat.views}
        sizes = under("step/", state)
        self.step_size = {name: size.clone() for name, size in sizes.items() if name in mine}


# By the word of the weigh part.
WEIGHERS: dict[str, Callable[[Any, Sequence[Flat]], Weigher]] = {
    DelayCompensation.kind: DelayWeigher,
    AdaptiveDelayCompensation.kind: AdaptiveDelayWeigher,
    GapAware.kind: GapWeigher,
}


def make_weigher(weigh: Weigh, parameters: Sequence[Flat]) -> Weigher:
    """What `weigh` does to the elements of a gradient."""
    return (WEIGHERS[weigh.kind] if weigh.elementwise else Weigher)(weigh, parameters)
