"""Parameters that the workers hold and apply themselves, as the store sees them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.contribution import Contribution
from offbeat.store.digest import Digest
from offbeat.store.home import Home
from offbeat.store.parameters import Parameters
from offbeat.store.table import Flat


class Replicated:
    """One worker's parameters, the rule's state beside them, and the averaged local state."""

    def __init__(self, flats: Sequence[Flat], home: Home, updater: Flat):
        self.flats, self.home, self.updater = flats, home, updater
        self.digest = Digest(flats)


class Mirror(Parameters):
    """Applies nothing: it looks at a worker that has, and copies what is to be tested or saved.

    All workers hold the same bits, so any of them will do. Without one to look at, the copy counts.
    """

    looked_at: Replicated | None = None
    nobodys: frozenset[str] = frozenset()  # local state that no worker of the last round had

    def look_at(self, worker: Replicated | None) -> None:
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
        state = found.home.read()
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

    def unlearnt(self, names: Iterable[str]) -> list[int]:
        averaged = self.averaged()
        return [place for place, name in enumerate(names) if name not in averaged]

    def digest_sum(self) -> int:
        return super().digest_sum() if self.looked_at is None else self.looked_at.digest.sum()

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        self.look_at(None)
        super().load(tensors, meta)
