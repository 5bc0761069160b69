"""What staleness does to a gradient element by element; scalar weights are in `choices`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from offbeat.choices import AdaptiveDelayCompensation, DelayCompensation, GapAware, Weigh
from offbeat.store.table import Flat, fill, named, under


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
    """Corrects a late gradient with the parameters that it was computed on."""

    def __init__(self, weigh: Weigh, parameters: Sequence[Flat]):
        self.weigh, self.parameters = weigh, list(parameters)
        self.backups: dict[int, list[Flat]] = {}  # by version
        # By worker, of its last pull: what an old checkpoint has, until each has pulled again.
        self.unversioned: dict[int, list[Flat]] = {}
        kinds = DelayCompensation | AdaptiveDelayCompensation | GapAware
        self.needed = isinstance(weigh, kinds)
        self.mean_square: list[Flat] = []
        self.step_size: dict[str, torch.Tensor] = {}
        if isinstance(weigh, AdaptiveDelayCompensation):
            self.mean_square = [Flat(flat.table) for flat in parameters]

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
        if isinstance(self.weigh, GapAware):
            return [self._by_gap(i, flat, backups[i]) for i, flat in enumerate(payload)]
        return [self._by_delay(i, flat, backups[i]) for i, flat in enumerate(payload)]

    def _by_delay(self, shard: int, gradient: Flat, backup: Flat) -> Flat:
        out = Flat(gradient.table)
        now = self.parameters[shard]
        for i, g in enumerate(gradient.spans):
            strength: float | torch.Tensor
            if isinstance(self.weigh, AdaptiveDelayCompensation):
                mean_square = self.mean_square[shard].spans[i]
                mean_square.mul_(self.weigh.decay).addcmul_(g, g, value=1 - self.weigh.decay)
                strength = self.weigh.strength / torch.sqrt(mean_square + 1e-7)
            else:
                assert isinstance(self.weigh, DelayCompensation)
                strength = self.weigh.strength
            out.spans[i].copy_(g + strength * g * g * (now.spans[i] - backup.spans[i]))
        return out

    def _by_gap(self, shard: int, gradient: Flat, backup: Flat) -> Flat:
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

    def before_step(self) -> list[Flat] | None:
        """Where the parameters were, if the size of a step matters."""
        if isinstance(self.weigh, GapAware):
            return [flat.clone() for flat in self.parameters]
        return None

    def after_step(self, before: list[Flat] | None) -> None:
        """Follow the average size of a step, tensor by tensor so that sharding changes nothing."""
        if before is None or not isinstance(self.weigh, GapAware):
            return
        for old, new in zip(before, self.parameters, strict=True):
            for name, view in new.views.items():
                moved = (view - old.views[name]).abs().mean()
                size = self.step_size.get(name)
                self.step_size[name] = (
                    moved if size is None else torch.lerp(moved, size, self.weigh.decay)
                )

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"step/{name}": size for name, size in self.step_size.items()}
        found |= named("square/", self.mean_square)
        for version, flats in self.backups.items():
            found |= named(f"backup/version/{version}/", flats)
        for worker, flats in self.unversioned.items():
            found |= named(f"backup/{worker}/", flats)
        return found

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take what concerns these parameters; the state may be that of many more."""
        mine = {name for flat in self.parameters for name in flat.views}
        sizes = under("step/", state)
        self.step_size = {name: size.clone() for name, size in sizes.items() if name in mine}
        if self.mean_square:
            fill(self.mean_square, under("square/", state))
        backups = under("backup/", state)
        self.backups = self._copies(under("version/", backups))
        old = {path: t for path, t in backups.items() if not path.startswith("version/")}
        self.unversioned = self._copies(old)

    def _copies(self, tensors: Mapping[str, torch.Tensor]) -> dict[int, list[Flat]]:
        """Copies of the parameters by the number that their names begin with."""
        found = {}
        for number in {int(path.partition("/")[0]) for path in tensors}:
            found[number] = [Flat(flat.table) for flat in self.parameters]
            fill(found[number], under(f"{number}/", tensors))
        return found

    @property
    def nbytes(self) -> int:
        kept = [*self.backups.values(), *self.unversioned.values()]
        flats = [flat for backup in kept for flat in backup] + self.mean_square
        return sum(flat.table.nbytes for flat in flats)
