"""Parameters that the workers hold and apply themselves, as the store sees them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.model.table import Flat, Table
from offbeat.store.digest import ParameterDigest
from offbeat.store.parameters import Parameters
from offbeat.store.slot import RuleState, Slot
from offbeat.worker.contribution import Contribution


class WorkerCopy:
    """One worker's parameters, the rule's state beside them, and the averaged local state."""

    def __init__(self, flats: Sequence[Flat], rule_state: RuleState, updater: Flat):
        self.flats, self.rule_state, self.updater = flats, rule_state, updater
        self.digest = ParameterDigest(flats)


class WorkerHeldParameters(Parameters):
    """Applies nothing: it looks at a worker that has, and copies what is to be tested or saved.

    All workers hold the same bits, so any of them will do. Without one to look at, the copy counts.
    """

    looked_at: WorkerCopy | None = None
    nobodys: frozenset[str] = frozenset()  # local state that no worker of the last round had

    def look_at(self, worker: WorkerCopy | None) -> None:
        self.looked_at = worker

    def update(self, contributions: Sequence[Contribution]) -> float:
        for one in contributions:
            if one.part.samples and not one.part.skipped:
                self.averages.take(one.part.worker, one.part.samples, one.statistics)
        return 1.0

    def refresh(self) -> None:
        """Copy what the workers hold."""
        found = self.looked_at
        if found is None:
            return
        state = found.rule_state.read()
        for mine, theirs in zip(self.flats, found.flats, strict=True):
            mine.copy_(theirs)
        for updater in self.updaters:
            updater.load_state(state)
        self.updater_state = {name: view.clone() for name, view in self.averaged().items()}

    def rule_state(self) -> dict[str, Tensor]:
        """The state of the rule in the copy."""
        return {k: t for updater in self.updaters for k, t in updater.tensors_of_state().items()}

    def averaged(self) -> dict[str, Tensor]:
        """The mean of the workers' local rules, where it is averaged."""
        found = self.looked_at
        if found is None:
            return self.updater_state
        return {n: view for n, view in found.updater.views.items() if n not in self.nobodys}

    def give(self, worker: int, slot: Slot, place: int) -> None:
        found = self.looked_at
        slot.put(place, self.held, self.flats if found is None else found.flats, self.averaged())
        slot.rule_state.write(self.rule_state() if found is None else found.rule_state.read())

    @property
    def averages_local_state(self) -> bool:
        return bool(self.averaged())

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        averaged = self.averaged()
        return [place for place, name in enumerate(names) if name not in averaged]

    def digest_sum(self) -> int:
        return super().digest_sum() if self.looked_at is None else self.looked_at.digest.sum()

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.look_at(None)
        super().load(tensors, meta)


class WorkerCopies:
    """Whose parameters count for the store, by the worker's number: it can look at all of them."""

    distant = False
    here = True

    def __init__(
        self, parameters: WorkerHeldParameters, copies: Sequence[WorkerCopy], averaged: Table
    ):
        """`averaged` is local state of the workers that is averaged."""
        self.parameters, self.copies, self.averaged = parameters, copies, averaged

    def look_at(self, worker: int) -> None:
        """A worker has the last version."""
        self.parameters.look_at(self.copies[worker])

    def looks_at(self, worker: int) -> bool:
        """Whether it is this worker's that count."""
        return self.parameters.looked_at is self.copies[worker]

    def told(self, hash: str) -> None:
        """It can be seen."""

    def take(self, worker: int) -> None:
        """What a worker has shown can be seen anyway."""

    def take_over(self) -> bool:
        """Nobody has the last version any more, so the store's own copy counts."""
        self.parameters.refresh()
        self.parameters.look_at(None)
        return True

    def lacking(self, nobodys: set[int]) -> None:
        """Places of averaged local state that no worker of the last round had."""
        names = [entry.name for place, entry in enumerate(self.averaged) if place in nobodys]
        self.parameters.nobodys = frozenset(names)


class DistantParameters(WorkerHeldParameters):
    """The same where the workers are on other hosts: the store has what one has shown last.

    What changes with every version is known of the last one all the same: its hash, and which
    local state has been averaged.
    """

    def __init__(self, *what: Any, **named: Any):
        self.here = True
        self.last_hash = 0
        self.learnt: frozenset[str] = frozenset()
        super().__init__(*what, **named)

    def changed(self, learnt: Iterable[str]) -> None:
        """The workers have a new version, with averaged state of these names."""
        self.here = False
        self.learnt = frozenset(learnt)

    def take(self, shown: WorkerCopy) -> None:
        """A worker has shown the last version."""
        self.look_at(shown)
        self.refresh()
        self.look_at(None)
        self.here = True

    @property
    def averages_local_state(self) -> bool:
        return bool(self.learnt)

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        return [place for place, name in enumerate(names) if name not in self.learnt]

    def digest_sum(self) -> int:
        return super().digest_sum() if self.here else self.last_hash

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        super().load(tensors, meta)
        self.here, self.learnt = True, frozenset(self.updater_state)


class DistantCopies:
    """Whose parameters count for the store, which has to be shown them."""

    distant = True

    def __init__(self, parameters: DistantParameters, shown: Sequence[WorkerCopy], averaged: Table):
        """`shown` is where what each worker shows comes in."""
        self.parameters, self.shown = parameters, shown
        self.names = [entry.name for entry in averaged]

    @property
    def here(self) -> bool:
        return self.parameters.here

    def look_at(self, worker: int) -> None:
        """A worker has the last version, which is a new one unless another has had it too."""
        lacking = self.parameters.nobodys
        self.parameters.changed(name for name in self.names if name not in lacking)

    def looks_at(self, worker: int) -> bool:
        """Any of them will do as long as nobody has shown what it has."""
        return not self.here

    def told(self, hash: str) -> None:
        self.parameters.last_hash = int(hash, 16)

    def take(self, worker: int) -> None:
        self.parameters.take(self.shown[worker])

    def take_over(self) -> bool:
        """Nobody has it, and nobody has shown it."""
        return False

    def lacking(self, nobodys: set[int]) -> None:
        """Places of averaged local state that no worker of the last round had."""
        self.parameters.nobodys = frozenset(self.names[place] for place in nobodys)
