"""What staleness does to a gradient element by element; scalar weights are in `choices`."""

from collections.abc import Sequence

import torch

from offbeat.choices import AdaptiveDelayCompensation, DelayCompensation, GapAware, Weigh
from offbeat.store.table import Flat, fill, named, under


class Weigher:
    """Corrects a late gradient with the weights its worker had read; one backup per worker."""

    def __init__(self, weigh: Weigh, parameters: Sequence[Flat]):
        self.weigh, self.parameters = weigh, list(parameters)
        self.backups: dict[int, list[Flat]] = {}
        kinds = DelayCompensation | AdaptiveDelayCompensation | GapAware
        self.needed = isinstance(weigh, kinds)
        self.mean_square: list[Flat] = []
        self.step_size: dict[str, torch.Tensor] = {}
        if isinstance(weigh, AdaptiveDelayCompensation):
            self.mean_square = [Flat(flat.table) for flat in parameters]

    def remember(self, worker: int) -> None:
        """`worker` reads the parameters now."""
        if not self.needed:
            return
        if worker in self.backups:
            for backup, flat in zip(self.backups[worker], self.parameters, strict=True):
                backup.copy_(flat)
        else:
            self.backups[worker] = [flat.clone() for flat in self.parameters]

    def correct(self, worker: int, payload: list[Flat]) -> list[Flat]:
        """The gradient as if it had been taken nearer to where the parameters are now."""
        if not self.needed or worker not in self.backups:
            return payload
        backups = self.backups[worker]
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
        for worker, flats in self.backups.items():
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
        for worker in {int(path.partition("/")[0]) for path in backups}:
            self.backups[worker] = [Flat(flat.table) for flat in self.parameters]
            fill(self.backups[worker], under(f"{worker}/", backups))

    @property
    def nbytes(self) -> int:
        flats = [flat for backup in self.backups.values() for flat in backup] + self.mean_square
        return sum(flat.table.nbytes for flat in flats)
