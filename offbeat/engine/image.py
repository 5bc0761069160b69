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
Learnt = tuple[str, Mapping[str, Tensor]]  # a prefix of the names, and tensors by the rest of them


class Images:
    """After every update, and before it is told to anybody, one image is brought up to date."""

    def __init__(self, parameters: Parameters, table: Table):
        self.parameters = parameters
        count = len(table)
        whole = sum(pages(flat.table.nbytes) for flat in parameters.flats)
        self.arena = Arena(PAGE + pages(2 * count) + 2 * (whole + pages(table.nbytes)))
        self.versions = self.arena.take(16).numpy().view(np.int64)
        self.versions[:] = -1
        self.index = {entry.name: i for i, entry in enumerate(table)}
        self.present = self.arena.take(2 * count).numpy().reshape(2, count)
        self.flats = [
            [Flat(flat.table, self.arena.take(flat.table.nbytes)) for flat in parameters.flats]
            for _ in range(2)
        ]
        self.rest = [Flat(table, self.arena.take(table.nbytes)) for _ in range(2)]
        # What this process has put into each image beside the parameters, and where; an earlier
        # server may have left something else there.
        self.seen: list[list[Learnt] | None] = [None, None]
        self.written: list[list[str] | None] = [None, None]
        self.places: list[list[Tensor]] = [[], []]
        self.sources: list[list[Tensor]] = [[], []]

    @classmethod
    def of(cls, job: Job, parameters: Parameters, averaged: Table) -> "Images | None":
        """Images that fit what `parameters` will learn; None for a large model."""
        if parameters.pull_bytes > LARGEST:
            return None
        throw_away = job.make_parameters()
        assert throw_away is not None
        table = _table(throw_away, averaged)
        return cls(parameters, table) if table.nbytes <= LARGEST else None

    def write(self, version: int) -> None:
        """The store is at `version`; the other image stays as it is."""
        place = version % 2
        self.versions[place] = -1
        for mine, theirs in zip(self.flats[place], self.parameters.flats, strict=True):
            mine.copy_(theirs)
        rest = learnt(self.parameters)
        # The same objects have the same names: looking at those costs more than copying.
        if not _identical(rest, self.seen[place]) and not self._find(place, rest):
            return  # a rule that has learnt something new: an image without it would be wrong
        if self.sources[place]:
            torch._foreach_copy_(self.places[place], self.sources[place])
        self.versions[place] = version

    def _find(self, place: int, rest: list[Learnt]) -> bool:
        """Where everything that has been learnt goes; False if something has no place."""
        names = [prefix + path for prefix, tensors in rest for path in tensors]
        if names != self.written[place]:
            if not all(name in self.index for name in names):
                return False
            self.present[place] = 0
            self.present[place, [self.index[name] for name in names]] = 1
            self.written[place] = names
            self.places[place] = [self.rest[place].views[name] for name in names]
        self.sources[place] = [tensor for _, tensors in rest for tensor in tensors.values()]
        self.seen[place] = rest
        return True

    def read(self, version: int) -> dict[str, Tensor] | None:
        """What the store had learnt at `version`, if that image is whole."""
        place = version % 2
        if self.versions[place] != version:
            return None
        found = {
            f"parameters/{name}": view.clone()
            for flat in self.flats[place]
            for name, view in flat.views.items()
        }
        for name, view in self.rest[place].views.items():
            if self.present[place, self.index[name]]:
                found[name] = view.clone()
        return found

    def close(self) -> None:
        self.arena.close()


def _table(parameters: Parameters, averaged: Table) -> Table:
    """What these throw-away parameters have learnt after one step."""
    nothing = [Flat(flat.table) for flat in parameters.flats]
    parameters.update([Contribution(Part(0, 1, 0, 0, [], 1), nothing)])
    entries = [
        Entry(prefix + path, tuple(tensor.shape), tensor.dtype, "shared")
        for prefix, tensors in learnt(parameters)
        for path, tensor in tensors.items()
    ]
    beside = [Entry(f"updater/{e.name}", e.shape, e.dtype, "shared") for e in averaged]
    return Table.of([*entries, *beside])


def learnt(parameters: Parameters) -> list[Learnt]:
    """The state beside the parameters that no worker brings along when it joins again."""
    found: list[Learnt] = []
    for updater in parameters.updaters:
        if updater.rule.state:
            found.append(("rule/", updater.tensors_of_state()))
    if parameters.weigher.needed:
        state = parameters.weigher.state().items()
        found.append(("weigh/", {k: t for k, t in state if not k.startswith("backup/")}))
    if parameters.updater_state:
        found.append(("updater/", parameters.updater_state))
    return found


def _identical(one: list[Learnt], other: list[Learnt] | None) -> bool:
    if other is None or len(one) != len(other):
        return False
    return all(mine is theirs for (_, mine), (_, theirs) in zip(one, other, strict=True))
