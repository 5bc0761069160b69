"""The numbers of the store: flat shards, the rule over each, and what the workers average."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from offbeat.discipline.parts import Weigh
from offbeat.log.records import Settings
from offbeat.model.table import (
    Entry,
    Flat,
    Placement,
    buffer_entries,
    check_tensors,
    combine,
    combine_as_is,
    fill,
    named,
    parameter_entries,
    place,
    total_bytes,
    under,
)
from offbeat.rules.updater import Recipe, Updater
from offbeat.store.averages import Averages
from offbeat.store.digest import ParameterDigest, hexadecimal
from offbeat.store.pulls import WholePulls
from offbeat.store.slot import Slot
from offbeat.store.staleness import Reads, make_weigher
from offbeat.worker.contribution import Contribution


class PreparedStep(msgspec.Struct, frozen=True, gc=False):
    """An update between its beginning and its end, when limits on the norm may come in."""

    live: Sequence[Contribution]
    gradients: list[Flat]
    rate: float  # what staleness made of the learning rate
    absent: frozenset[str]  # parameters that nobody has a gradient for
    settings: Settings | None  # that the script has for the rule

    def views(self, shard: int) -> dict[str, Tensor]:
        views = self.gradients[shard].views
        if not self.absent:
            return views
        return {name: view for name, view in views.items() if name not in self.absent}

    def apply(self, shard: int, updater: Updater) -> None:
        """Let the rule of a shard make its step."""
        updater.obey(self.settings)
        if self.absent:
            updater.step(self.views(shard), self.rate)
        else:
            updater.step_along(self.gradients[shard], self.rate)


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
        held: Sequence[int] | None = None,
        pulls: WholePulls = WholePulls(),  # noqa: B008
    ):
        """`flats` is where the parameters are to live, if not in this process's own memory.

        `held` are the shards that this process holds, if others hold the rest; `pulls` is what a
        worker gets of them.
        """
        entries = parameter_entries(model)
        self.names = [entry.name for entry in entries]
        self.tables = place(entries, placement)
        self.buffers: list[Entry] = buffer_entries(model, policies or {})
        self.held = list(range(len(self.tables))) if held is None else list(held)
        mine = [self.tables[i] for i in self.held]
        self.flats = [Flat(t) for t in mine] if flats is None else [flats[i] for i in self.held]
        self.pull_bytes = sum(table.payload_bytes for table in self.tables)
        self.averages = Averages(self.buffers, model)
        self.begin(model)
        self.recipe = recipe
        self.updaters = [Updater(recipe, flat.views, flat) for flat in self.flats]
        self.clip = recipe.clip
        self._digest = ParameterDigest(self.flats)
        self.weigher = make_weigher(weigh, self.flats)
        self.reads, self.pulls = Reads(), pulls
        self.updater_state: dict[str, Tensor] = {}  # the mean of the workers' local rules
        self.add_up = combine
        self._sums: list[Flat] = []  # made when first needed: as large as the model

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Initial parameters come from the model, never from whichever worker is first."""
        fill(self.flats, dict(model.named_parameters()))
        self.averages.begin(model)

    def update(self, contributions: Sequence[Contribution]) -> float:
        """Apply contributions as one step; returns what staleness made of the learning rate.

        The weighted mean Σ nᵢ fᵢ gᵢ / Σ nᵢ (n samples, f staleness factor) is split into a
        direction, Σ nᵢ fᵢ gᵢ / Σ nᵢ fᵢ, and a rate, Σ nᵢ fᵢ / Σ nᵢ. The rate scales the learning
        rate, as the papers have it; a rule that normalises, like Adam, would undo it on a gradient.
        """
        live = self.live(contributions)
        if not live:
            return 1.0
        step = self.prepare(live)
        if self.clip is not None and self.clip.norm is not None:
            self.shrink(step, self.norms(step))
        self.finish(step)
        return step.rate

    def live(self, contributions: Sequence[Contribution]) -> list[Contribution]:
        """Those with something to apply; averaged buffers are taken here."""
        self.reads.waiting.clear()
        live = []
        for one in contributions:
            if one.part.samples and not one.part.skipped:
                live.append(one)
                self.averages.take(one.part.worker, one.part.samples, one.statistics)
        # Without a payload the worker itself has written, in place.
        return live if live and live[0].payload is not None else []

    def prepare(self, live: Sequence[Contribution]) -> PreparedStep:
        """Bring the contributions together; nothing is changed yet."""
        if len(live) == 1:
            only = live[0]
            rate, absent = only.part.weight, only.absent
            # Straight from the worker's slot, no copy.
            gradients = self._weighed(only)
        else:
            samples, total, absent = 0, 0.0, live[0].absent
            for one in live:
                samples += one.part.samples
                total += one.part.samples * one.part.weight
                absent &= one.absent
            rate = total / samples
            gradients = self._combine(live, [c.part.samples * c.part.weight / total for c in live])
        # Of several the first's: where all wait for all, they are the same.
        step = PreparedStep(live, gradients, rate, absent, live[0].part.settings)
        if self.clip is not None:
            for shard in range(len(gradients)):
                self.clip.limit(list(step.views(shard).values()))
        return step

    def norms(self, step: PreparedStep) -> dict[str, Tensor]:
        """The norm of each tensor's gradient."""
        return {
            name: torch.linalg.vector_norm(view)
            for shard in range(len(step.gradients))
            for name, view in step.views(shard).items()
        }

    def shrink(self, step: PreparedStep, norms: Mapping[str, Tensor]) -> Tensor | None:
        """Limit the norm of the whole gradient; returns what this one was multiplied by."""
        if not norms:
            return None
        assert self.clip is not None
        # In the model's own order, so that the norm is the same however it is sharded.
        scale = self.clip.scale([norms[name] for name in self.names if name in norms])
        self.multiply(step, scale)
        return scale

    def multiply(self, step: PreparedStep, scale: Tensor) -> None:
        for shard in range(len(step.gradients)):
            for view in step.views(shard).values():
                view.mul_(scale)

    def finish(self, step: PreparedStep) -> None:
        """Apply the rule."""
        before = self.weigher.before_step() if self.weigher.needed else None
        for shard, updater in enumerate(self.updaters):
            step.apply(shard, updater)
        if before is not None:
            self.weigher.after_step(before)
        if any(one.updater for one in step.live):
            self._average_updaters(step.live)

    def _weighed(self, one: Contribution) -> list[Flat]:
        payload = one.unpacked()
        if not self.weigher.needed:
            return payload
        worker = one.part.worker
        return self.weigher.correct(worker, self.reads.compared(worker, one.part.base), payload)

    def as_before(self) -> None:
        """Work on numbers of few bits as on one vector, as logs of old have it."""
        self.add_up = combine_as_is
        for updater in self.updaters:
            updater.join_all()

    def _combine(self, live: Sequence[Contribution], shares: Sequence[float]) -> list[Flat]:
        payloads = [self._weighed(one) for one in live]
        if not self._sums:
            self._sums = [Flat(flat.table) for flat in self.flats]
        for shard, total in enumerate(self._sums):
            total.combine([payload[shard] for payload in payloads], shares, self.add_up)
        return self._sums

    def _average_updaters(self, live: Sequence[Contribution]) -> None:
        """The mean over those who have a state: one that never used a parameter has none of it."""
        samples = sum(c.part.samples for c in live)
        averaged: dict[str, Tensor] = {}
        for name, first in {n: t for c in live for n, t in c.updater.items()}.items():
            having = [c for c in live if name in c.updater]
            total = torch.zeros_like(first)
            for one in having:
                total = total + one.updater[name] * (one.part.samples / samples)
            if len(having) < len(live):  # in the same order where no store adds up
                total = total * lift(samples, [one.part.samples for one in having])
            averaged[name] = total
        self.updater_state = averaged

    def give(self, worker: int, slot: Slot, place: int) -> None:
        """The one copy of a pull, into one of the places of a worker's slot."""
        slot.put(place, self.held, self.of(worker), self.updater_state)

    @property
    def averages_local_state(self) -> bool:
        """Whether there is a mean of the workers' local rules by now."""
        return self.updater_bytes > 0

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        """The places of those `names` that the averaged state of local rules has nothing for."""
        return [place for place, name in enumerate(names) if name not in self.updater_state]

    def keep(self, contribution: Contribution) -> None:
        """Own what has to wait for others: its worker is about to write there again."""
        contribution.keep()

    def wait(self, contribution: Contribution) -> None:
        """It waits for others, and its worker may have pulled again or be gone when they come."""
        if self.weigher.needed:
            self.reads.waiting.append(contribution.part.base)

    def remember(self, worker: int, version: int) -> None:
        """`worker` reads the parameters now, at `version`."""
        self.pulls.take(worker, version, self.flats)
        if self.weigher.needed:
            self.reads.pull(worker, version)
            self.copy(version, self.reads.needed())

    def copy(self, version: int, needed: Collection[int]) -> None:
        """Have a copy of the parameters of this version, and of no other that is not needed."""
        self.weigher.remember(version, needed)

    def advance(self, version: int, epoch: int, progress: int) -> None:
        """Let the schedule catch up; `progress` is what a plain loop would have done by now."""
        if self.recipe.schedule is not None:
            for updater in self.updaters:
                updater.advance(version, epoch, progress)

    def enter(self, worker: int) -> None:
        """`worker` joins; what it pulls is everybody's."""
        self.pulls.forget(worker)
        self.averages.enter(worker)

    def of(self, worker: int) -> list[Flat]:
        """What `worker` has pulled."""
        return self.pulls.of(worker, self.flats)

    def forget(self, worker: int) -> None:
        """`worker` is lost, and those who are there count before it."""
        self.averages.forget(worker)
        self.reads.forget(worker)
        self.pulls.forget(worker)

    def digest_sum(self) -> int:
        """What the tensors held here add to the hash of all."""
        return self._digest.sum()

    def digest(self) -> str:
        """The hash of all parameters, as it is logged."""
        return hexadecimal(self.digest_sum())

    def refresh(self) -> None:
        """Bring up to date what is looked at, tested and saved here, if others hold it."""

    def finite(self) -> bool:
        self.refresh()
        return all(flat.finite() for flat in self.flats)

    def export(self, model: nn.Module) -> nn.Module:
        """Write the parameters and the averaged buffers into `model`."""
        self.export_to(named_tensors(model))
        return model

    @torch.no_grad()
    def export_to(self, into: Mapping[str, Tensor]) -> None:
        """Write the parameters and the averaged buffers, as they are tested and saved."""
        self.refresh()
        for flat, updater in zip(self.flats, self.updaters, strict=True):
            for name in flat.views:
                into[name].copy_(updater.value(name))
        self.averages.write(into)

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, Tensor]:
        self.refresh()
        found = named("parameters/", self.flats)
        for updater in self.updaters:
            found |= {f"rule/{path}": t for path, t in updater.tensors_of_state().items()}
        found |= {f"weigh/{path}": t for path, t in self.weigher.state().items()}
        found |= {f"updater/{path}": t for path, t in self.updater_state.items()}
        if 0 in self.held:  # averaged buffers are with whoever holds the first shard
            found |= self.averages.state()
        return found

    def meta(self) -> dict[str, Any]:
        """The rates and the schedule, the same for every shard; who is there, and who read what."""
        return {
            "updater": self.updaters[0].meta(),
            "averages": self.averages.meta(),
            "reads": self.reads.meta(),
        }

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Take the state of these shards; what was written may have been spread otherwise."""
        fill(self.flats, under("parameters/", tensors))
        rule = under("rule/", tensors)
        for updater in self.updaters:
            updater.load_state(rule)
            updater.load_meta(meta["updater"])
        self.weigher.load(under("weigh/", tensors))
        self.reads.load(meta.get("reads", {"pulls": [], "waiting": []}))
        averages = under("updater/", tensors)
        self.updater_state = {k: averages[k].clone() for k in averages if self.holds(k)}
        if 0 in self.held:
            self.averages.load(tensors, meta.get("averages"))

    def holds(self, path: str) -> bool:
        """Whether `name/key`, of the state of a rule, is of a tensor held here."""
        name = path.rpartition("/")[0]
        return len(self.held) == len(self.tables) or any(name in flat.views for flat in self.flats)

    def begin_with(
        self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], where: str, why: str = ""
    ) -> str:
        """Take parameters and buffers of another run, and what its rule kept if that fits here.

        `why` says why it does not, if the caller knows. Returns why it was left behind, if it was.
        """
        entries = {f"parameters/{entry.name}": entry for table in self.tables for entry in table}
        found = under("parameters/", tensors)
        check_tensors({f"parameters/{name}": t for name, t in found.items()}, entries, where)
        fill(self.flats, found)
        self.averages.begin_with(tensors, meta.get("averages"), where)
        rule = under("rule/", tensors)
        why = why or self.updaters[0].unlike(meta["updater"]) or ""
        if not rule or why:
            return why if rule else ""
        for updater in self.updaters:
            updater.load_state(rule)
        return ""

    @property
    def updater_bytes(self) -> int:
        """Bytes of averaged local state that a worker gets with a pull."""
        return total_bytes(self.updater_state.values()) if self.updater_state else 0

    @property
    def nbytes(self) -> int:
        """Bytes the store holds: parameters, rule state and backups."""
        held = sum(flat.table.nbytes for flat in self.flats)
        for updater in self.updaters:
            held += total_bytes(updater.tensors_of_state().values())
        return held + self.weigher.nbytes + self.pulls.nbytes

    def nbytes_each(self) -> list[int]:
        """The same for every process that holds a part of it."""
        return [self.nbytes]


def lift(samples: int, having: Sequence[int]) -> float:
    """What makes a sum with shares of all `samples` the mean over those who have something."""
    return samples / sum(having)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once."""
    return dict(model.named_parameters()) | dict(model.named_buffers())
