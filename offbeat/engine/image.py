"""Two images of all that a store has learnt, written in turn, so that a kill leaves one whole."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from offbeat.contribution import Contribution
from offbeat.job import Job
from offbeat.link.memory import PAGE, Arena, pages
from offbeat.log import Part
from offbeat.store.parameters import Parameters
from offbeat.store.table import Entry, Flat, Table

# Larger models go back to their last checkpoint: two more passes over memory for every update
# would cost more than the updates themselves (see docs/faults.md).
LARGEST = 16 << 20


class Images:
    """After every update, and before it is told to anybody, one image is brought up to date."""

    def __init__(self, table: Table):
        count = len(table)
        self.arena = Arena(PAGE + pages(2 * count) + 2 * pages(table.nbytes))
        self.versions = self.arena.take(16).numpy().view(np.int64)
        self.versions[:] = -1
        self.index = {entry.name: i for i, entry in enumerate(table)}
        self.present = self.arena.take(2 * count).numpy().reshape(2, count)
        self.flats = [Flat(table, self.arena.take(table.nbytes)) for _ in range(2)]

    @classmethod
    def for_job(cls, job: Job, averaged: Table) -> "Images | None":
        """Images that fit what the store of `job` will learn; None for a large model."""
        parameters = job.make_parameters()
        assert parameters is not None
        if parameters.pull_bytes > LARGEST:
            return None
        table = _table(parameters, averaged)
        return cls(table) if table.nbytes <= LARGEST else None

    def write(self, version: int, state: Mapping[str, Tensor]) -> None:
        """The store is at `version`; the other image stays as it is."""
        place = version % 2
        self.versions[place] = -1
        views, index = self.flats[place].views, self.index
        if not all(name in index for name in state):
            return  # a rule that has learnt something new: an image without it would be wrong
        torch._foreach_copy_([views[name] for name in state], list(state.values()))
        self.present[place] = 0
        self.present[place, [index[name] for name in state]] = 1
        self.versions[place] = version

    def read(self, version: int) -> dict[str, Tensor] | None:
        """What the store had learnt at `version`, if that image is whole."""
        place = version % 2
        if self.versions[place] != version:
            return None
        return {
            name: view.clone()
            for name, view in self.flats[place].views.items()
            if self.present[place, self.index[name]]
        }

    def close(self) -> None:
        self.arena.close()


def _table(parameters: Parameters, averaged: Table) -> Table:
    """What the state of these throw-away parameters is like after one step."""
    nothing = [Flat(flat.table) for flat in parameters.flats]
    parameters.update([Contribution(Part(0, 1, 0, 0, [], 1), nothing)])
    entries = [
        Entry(name, tuple(tensor.shape), tensor.dtype, "shared")
        for name, tensor in learnt(parameters).items()
    ]
    beside = [Entry(f"updater/{e.name}", e.shape, e.dtype, "shared") for e in averaged]
    return Table.of([*entries, *beside])


def learnt(parameters: Parameters) -> dict[str, Tensor]:
    """The state that no worker brings along when it joins again."""
    state = parameters.state()
    lost = ("statistics/", "weigh/backup/")
    return {name: tensor for name, tensor in state.items() if not name.startswith(lost)}
