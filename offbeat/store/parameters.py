"""The numbers of the store: flat shards, the rule over each, and what the workers average."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.choices import Weigh
from offbeat.contribution import Contribution
from offbeat.store.table import (
    Digest,
    Entry,
    Flat,
    Placement,
    buffer_entries,
    check_tensors,
    parameter_entries,
    place,
    total_bytes,
    under,
)
from offbeat.store.updater import Recipe, Updater
from offbeat.store.weigh import Weigher


class Parameters:
    """The parameters of a model in flat shards, and how contributions change them."""

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        recipe: Recipe,
        weigh: Weigh,
        policies: Mapping[str, Any] | None = None,
        flats: Sequence[Flat] | None = None,
    ):
        """`flats` is where the parameters are to live, if not in this process's own memory."""
        entries = parameter_entries(model)
        self.names = [entry.name for entry in entries]
        self.tables = place(entries, placement)
        self.buffers: list[Entry] = buffer_entries(model, policies or {})
        self.flats = [Flat(table) for table in self.tables] if flats is None else list(flats)
        self.pull_bytes = sum(table.payload_bytes for table in self.tables)
        self.begin(model)
        self.updaters = [Updater(recipe, flat.views) for flat in self.flats]
        self.clip = recipe.clip
        self._digest = Digest(self.flats)
        self.weigher = Weigher(weigh, self.flats)
        self.statistics: dict[int, dict[str, Tensor]] = {}  # each worker's averaged buffers
        self.updater_state: dict[str, Tensor] = {}  # the mean of the workers' local rules
        self._sums: list[Flat] = []  # made when first needed: as large as the model

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Initial parameters come from the model, never from whichever worker is first."""
        own = dict(model.named_parameters())
        for flat in self.flats:
            for name, view in flat.views.items():
                view.copy_(own[name])

    def update(self, contributions: Sequence[Contribution]) -> float:
        """Apply contributions as one step; returns what staleness made of the learning rate.

        The weighted mean Σ nᵢ fᵢ gᵢ / Σ nᵢ (n samples, f staleness factor) is split into a
        direction, Σ nᵢ fᵢ gᵢ / Σ nᵢ fᵢ, and a rate, Σ nᵢ fᵢ / Σ nᵢ. The rate scales the learning
        rate, as the papers have it; a rule that normalises, like Adam, would undo it on a gradient.
        """
        live = [c for c in contributions if c.part.samples and not c.part.skipped]
        for one in live:
            if one.statistics:
                self.statistics[one.part.worker] = one.statistics
        if not live or live[0].payload is None:  # written in place by the worker itself
            return 1.0
        if len(live) == 1:
            only = live[0]
            rate, absent = only.part.weight, only.absent
            # Straight from the worker's slot, no copy.
            gradients = self.weigher.correct(only.part.worker, only.unpacked())
        else:
            shares = [c.part.samples * c.part.weight for c in live]
            total = sum(shares)
            rate = total / sum(c.part.samples for c in live)
            gradients = self._combine(live, [share / total for share in shares])
            absent = frozenset.intersection(*(c.absent for c in live))
        before = self.weigher.before_step()
        self._descend(self.updaters, gradients, absent, rate)
        self.weigher.after_step(before)
        if live[0].updater:
            self._average_updaters(live)
        return rate

    def _descend(
        self,
        updaters: Sequence[Updater],
        gradients: Sequence[Flat],
        absent: frozenset[str],
        rate: float,
    ) -> None:
        if self.clip is not None:
            # In the model's own order, so that the norm is the same however it is sharded.
            found = {name: g for flat in gradients for name, g in flat.views.items()}
            self.clip([found[name] for name in self.names if name not in absent])
        for updater, flat in zip(updaters, gradients, strict=True):
            views = flat.views
            if absent:
                views = {name: view for name, view in views.items() if name not in absent}
            updater.step(views, rate)

    def _combine(self, live: Sequence[Contribution], shares: Sequence[float]) -> list[Flat]:
        payloads = [self.weigher.correct(one.part.worker, one.unpacked()) for one in live]
        if not self._sums:
            self._sums = [Flat(table) for table in self.tables]
        for shard, total in enumerate(self._sums):
            total.zero_()
            for payload, share in zip(payloads, shares, strict=True):
                total.add_(payload[shard], share)
        return self._sums

    def _average_updaters(self, live: Sequence[Contribution]) -> None:
        samples = sum(c.part.samples for c in live)
        self.updater_state = {
            name: sum(
                (c.updater[name] * (c.part.samples / samples) for c in live if name in c.updater),
                start=torch.zeros_like(first),
            )
            for name, first in live[0].updater.items()
        }

    def advance(self, version: int, epoch: int) -> None:
        for updater in self.updaters:
            updater.advance(version, epoch)

    def enter(self, worker: int) -> None:
        """`worker` joins; what it pulls is everybody's."""

    def of(self, worker: int) -> list[Flat]:
        """What `worker` pulls."""
        return self.flats

    def forget(self, worker: int) -> None:
        """A lost worker's statistics no longer count."""
        self.statistics.pop(worker, None)

    def digest(self) -> str:
        return self._digest()

    def finite(self) -> bool:
        return all(flat.finite() for flat in self.flats)

    def export(self, model: nn.Module) -> nn.Module:
        """Write the parameters and the averaged buffers into `model`."""
        self.export_to(named_tensors(model))
        return model

    @torch.no_grad()
    def export_to(self, into: Mapping[str, Tensor]) -> None:
        """Write the parameters and the averaged buffers, as they are tested and saved."""
        for flat, updater in zip(self.flats, self.updaters, strict=True):
            for name in flat.views:
                into[name].copy_(updater.value(name))
        for entry in self.buffers:
            # By worker, so that the order of a sum does not depend on who came first.
            values = [s[entry.name] for _, s in sorted(self.statistics.items()) if entry.name in s]
            if values and entry.policy == "averaged":
                into[entry.name].copy_(_mean(values))

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for flat, updater in zip(self.flats, self.updaters, strict=True):
            found |= {f"parameters/{name}": view for name, view in flat.views.items()}
            found |= {f"rule/{path}": t for path, t in updater.tensors_of_state().items()}
        found |= {f"weigh/{path}": t for path, t in self.weigher.state().items()}
        found |= {f"updater/{path}": t for path, t in self.updater_state.items()}
        for worker, statistics in self.statistics.items():
            found |= {f"statistics/{worker}/{name}": t for name, t in statistics.items()}
        return found

    def meta(self) -> dict[str, Any]:
        return {"updaters": [updater.meta() for updater in self.updaters]}

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        parameters, rule = under("parameters/", tensors), under("rule/", tensors)
        for flat, updater in zip(self.flats, self.updaters, strict=True):
            for name, view in flat.views.items():
                view.copy_(parameters[name])
            updater.load_state(rule)
        for updater, saved in zip(self.updaters, meta["updaters"], strict=True):
            updater.load_meta(saved)
        self.weigher.load(under("weigh/", tensors))
        self.updater_state = {k: t.clone() for k, t in under("updater/", tensors).items()}
        self.statistics = {}
        for path, tensor in under("statistics/", tensors).items():
            worker, _, name = path.partition("/")
            self.statistics.setdefault(int(worker), {})[name] = tensor.clone()

    def begin_with(
        self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], where: str
    ) -> None:
        """Take parameters from another run, and the rule's state if it had the same rule."""
        wanted = {f"parameters/{n}": v for flat in self.flats for n, v in flat.views.items()}
        found = {path: t for path, t in tensors.items() if path.startswith("parameters/")}
        check_tensors(found, wanted, where)
        for path, view in wanted.items():
            view.copy_(found[path])
        if meta["updaters"][0]["rule"] == self.updaters[0].kind:
            for updater in self.updaters:
                updater.load_state(under("rule/", tensors))

    @property
    def nbytes(self) -> int:
        """Bytes the store holds: parameters, rule state and backups."""
        held = sum(flat.table.nbytes for flat in self.flats)
        for updater in self.updaters:
            held += total_bytes(updater.tensors_of_state().values())
        return held + self.weigher.nbytes


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _mean(values: Sequence[Tensor]) -> Tensor:
    """The mean in double precision, rounded for whole-number buffers such as counters."""
    if len(values) == 1:
        return values[0]
    mean = torch.stack([value.double() for value in values]).mean(0)
    return mean if values[0].is_floating_point() else mean.round()
