"""Parameters of which every worker has its own, and the meetings of two that keep them together."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from offbeat.data.reader import mix
from offbeat.model.table import Flat, total_bytes, under
from offbeat.rules.updater import Recipe, Updater
from offbeat.store.digest import ParameterDigest
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import Contribution


class OwnParameters:
    """One worker's parameters, and its rule over them."""

    def __init__(self, flats: Sequence[Flat], recipe: Recipe):
        self.flats = [flat.clone() for flat in flats]
        self.updaters = [Updater(recipe, flat.views, flat) for flat in self.flats]
        self.digest = ParameterDigest(self.flats)


class GossipParameters(Parameters):
    """One set of parameters per worker; the model is the mean of those whose workers are there.

    A worker that is lost is left out of the mean and of the meetings. It comes back with what it
    had. A new one begins at the mean.
    """

    seed = 0  # of the choice of partners
    time = (0, 0, 0)  # version, epoch and progress, for the schedules of those who come late

    def begin(self, model: nn.Module) -> None:
        super().begin(model)
        self.own: dict[int, OwnParameters] = {}
        self.present: set[int] = set()

    # ------------------------------------------------------------ who is there

    def enter(self, worker: int) -> None:
        super().enter(worker)
        if worker not in self.own:
            self.refresh()
            self.own[worker] = self._made()
        self.present.add(worker)

    def _made(self) -> OwnParameters:
        """Parameters and rule as they are in the mean."""
        own = OwnParameters(self.flats, self.recipe)
        for mine, theirs in zip(own.updaters, self.updaters, strict=True):
            mine.load_state(theirs.tensors_of_state())
            mine.advance(*self.time)
        return own

    def forget(self, worker: int) -> None:
        super().forget(worker)
        self.present.discard(worker)

    def of(self, worker: int) -> list[Flat]:
        return self.own[worker].flats

    def partner(self, worker: int, incarnation: int, sequence: int) -> int | None:
        """Whom `worker` meets this time: by chance, but the same whenever it is asked.

        Of the other parity if there is one: where no store puts meetings in order, a graph in two
        halves is what keeps everybody from waiting for everybody.
        """
        others = sorted(self.present - {worker})
        across = [other for other in others if (other - worker) % 2] or others
        if not across:
            return None
        return across[mix(self.seed, 7, worker, incarnation, sequence) % len(across)]

    # ------------------------------------------------------------ meetings and steps

    def update(self, contributions: Sequence[Contribution]) -> float:
        """Take the mean with a partner, then make the worker's own step along its gradient."""
        (one,) = contributions
        part = one.part
        if not part.samples or part.skipped:
            return 1.0
        self.averages.take(part.worker, part.samples, one.statistics)
        part.partner = self.partner(part.worker, part.incarnation, part.sequence)
        if part.partner is not None:
            self.exchange(part.worker, part.partner)
        step = self.prepare([one])
        if self.clip is not None and self.clip.norm is not None:
            self.shrink(step, self.norms(step))
        for shard, updater in enumerate(self.own[part.worker].updaters):
            step.apply(shard, updater)
        return step.rate

    @torch.no_grad()
    def exchange(self, one: int, other: int) -> None:
        """Both get the mean of both, so that the mean of all stays where it is."""
        for mine, theirs in zip(self.own[one].flats, self.own[other].flats, strict=True):
            mine.add_(theirs)
            mine.scale_(0.5)
            theirs.copy_(mine)

    def advance(self, version: int, epoch: int, progress: int) -> None:
        self.time = (version, epoch, progress)
        super().advance(*self.time)
        for own in self.own.values():
            for updater in own.updaters:
                updater.advance(*self.time)

    # ------------------------------------------------------------ what is looked at

    @torch.no_grad()
    def refresh(self) -> None:
        """Let `flats` be the mean of all who are there, or of all if nobody is."""
        found = [self.own[worker].flats for worker in sorted(self.present or self.own)]
        if not found:
            return
        for shard, mean in enumerate(self.flats):
            mean.copy_(found[0][shard])
            for flats in found[1:]:
                mean.add_(flats[shard])
            if len(found) > 1:
                mean.scale_(1 / len(found))

    def digest_sum(self) -> int:
        """Of everybody's parameters: the mean alone would hide who differs."""
        found = [self.own[worker].digest.sum() for worker in sorted(self.own)]
        if len(found) > 1:
            return xxhash.xxh3_128_intdigest(repr(found).encode())
        return found[0] if found else super().digest_sum()

    @property
    def nbytes(self) -> int:
        held = [*self.updaters, *(u for own in self.own.values() for u in own.updaters)]
        state = sum(total_bytes(updater.tensors_of_state().values()) for updater in held)
        return state + (1 + len(self.own)) * sum(flat.table.nbytes for flat in self.flats)

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, Tensor]:
        found = super().state()
        for worker, own in self.own.items():
            for flat, updater in zip(own.flats, own.updaters, strict=True):
                for name, view in flat.views.items():
                    found[f"own/{worker}/parameters/{name}"] = view
                for path, tensor in updater.tensors_of_state().items():
                    found[f"own/{worker}/rule/{path}"] = tensor
        return found

    def meta(self) -> dict[str, Any]:
        who = {"own": sorted(self.own), "present": sorted(self.present)}
        return super().meta() | who | {"time": self.time}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        super().load(tensors, meta)
        self.present = set(meta["present"])
        version, epoch, progress = meta.get("time", self.time)  # older ones do not tell it
        self.time = (version, epoch, progress)
        self.own = {}
        for worker in meta["own"]:
            mine = under(f"own/{worker}/", tensors)
            own = self.own[worker] = OwnParameters(self.flats, self.recipe)
            for flat, updater in zip(own.flats, own.updaters, strict=True):
                for name, view in flat.views.items():
                    view.copy_(mine[f"parameters/{name}"])
                updater.load_state(under("rule/", mine))
                updater.load_meta(meta["updater"])
