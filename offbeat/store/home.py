"""Where a rule's state lies when others have to read it: a flat buffer, and what of it is there."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from offbeat.errors import RunError
from offbeat.store.table import Flat
from offbeat.store.updater import Updater


class Home:
    """State of a rule by `name/key`; a rule that has not made a step yet has none."""

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
