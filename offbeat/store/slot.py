"""Where a worker and the store exchange tensors: what is pulled, what is sent, a rule's state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offbeat.errors import RunError
from offbeat.model.table import Flat
from offbeat.rules.updater import Updater


class RuleState:
    """State of a rule that others read, by `name/key`; one that has made no step yet has none."""

    def __init__(self, flat: Flat, present: Any):
        """`present` has a byte for each entry of the flat's table."""
        self.flat, self.present = flat, present
        self.index = {entry.name: i for i, entry in enumerate(flat.table)}

    def keep(self, updaters: Sequence[Updater]) -> None:
        """After a step: whatever the rules hold elsewhere is moved here."""
        for updater in updaters:
            updater.separate()
            for name, tensor in updater.tensors.items():
                state = updater.rule.state.get(tensor)
                for key, value in (state or {}).items():
                    self._keep(f"{name}/{key}", key, value, state)

    def _keep(self, path: str, key: str, value: Any, state: Any) -> None:
        if not isinstance(value, Tensor | int | float):
            return
        view = self.flat.views.get(path)
        if view is None or (isinstance(value, Tensor) and value.shape != view.shape):
            raise RunError(
                f"the rule has learnt {path!r}, which its first step did not show, so workers "
                "cannot hand it on: use via='store'"
            )
        if not isinstance(value, Tensor):
            view.fill_(value)
        elif value.data_ptr() != view.data_ptr():
            view.copy_(value)
            state[key] = view
        self.present[self.index[path]] = 1

    def give(self, updaters: Sequence[Updater]) -> None:
        """Let the rules go on with what lies here, where it lies."""
        found = self.read()
        for updater in updaters:
            updater.load_state(found)
        self.keep(updaters)

    def read(self) -> dict[str, Tensor]:
        """What is here, as views."""
        return {name: self.flat.views[name] for name, i in self.index.items() if self.present[i]}

    def write(self, state: dict[str, Tensor]) -> None:
        """Become a copy of `state`."""
        self.present[:] = 0
        for name, tensor in state.items():
            self.flat.views[name].copy_(tensor)
            self.present[self.index[name]] = 1


@dataclass
class Slot:
    """One worker's place: the server writes `incoming`, the worker writes the rest.

    The worker computes on `incoming`, and may change it: nobody else reads it, and the next pull
    writes over it.
    """

    incoming: list[list[Flat]]  # parameters as pulled, in one or two places
    outgoing: list[list[Flat]]  # the payload of a contribution, likewise
    statistics: Flat  # averaged buffers
    updater: Flat  # local optimiser state to average; the server answers in the same place
    rule_state: RuleState  # where this worker applies the rule itself

    def put(
        self, place: int, shards: Sequence[int], flats: Sequence[Flat], updater: dict[str, Tensor]
    ) -> None:
        """The one copy of a pull, of the shards that this process holds."""
        for shard, flat in zip(shards, flats, strict=True):
            mine = self.incoming[place][shard]
            if mine is not flat:
                mine.copy_(flat)
        for name, tensor in updater.items():
            self.updater.views[name].copy_(tensor)


def without(views: dict[str, Tensor], lacking: Sequence[int]) -> dict[str, Tensor]:
    """The views but for those at places that mean nothing."""
    if not lacking:
        return views
    left = set(lacking)
    return {name: view for i, (name, view) in enumerate(views.items()) if i not in left}
