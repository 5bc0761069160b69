"""What a store has learnt, in memory that outlives it: some version is whole whenever it is killed.

The parameters are in shared memory anyway, and whole except while an update changes them; a copy is
made before it does. What the rule keeps is copied after every update, to two places in turn, and
so are the averaged buffers of whoever has contributed.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from offbeat.config.job import Job
from offbeat.log.records import Part
from offbeat.model.table import Entry, Flat, Table, fill, named, under
from offbeat.store.parameters import Parameters
from offbeat.transport.memory import PAGE, Arena, pages
from offbeat.worker.contribution import Contribution

# Larger models go back to their last checkpoint: two more passes over memory for every update
# would cost more than the updates themselves (see docs/faults.md).
LARGEST = 16 << 20
Learnt = tuple[str, Mapping[str, Tensor]]  # a prefix of the names, and tensors by the rest of them


class ImageMark:
    """Which version is where; one that is being written is NONE."""

    REST = 0  # what the rule keeps of versions that are even, and of those that are odd
    LIVE = 2  # the parameters that the store works on
    KEPT = 3  # their copy
    COUNT = 4


NONE = -1


class CrashImages:
    """Told of every update before it is made and before it is logged, it has one to go on from."""

    def __init__(self, parameters: Parameters, table: Table, workers: int):
        self.parameters = parameters
        count = len(table)
        buffers = Table.of(parameters.averages.entries)
        whole = sum(pages(flat.table.nbytes) for flat in parameters.flats)
        beside = pages(16 * workers) + 2 * workers * pages(buffers.nbytes)
        self.arena = Arena(PAGE + pages(2 * count) + whole + 2 * pages(table.nbytes) + beside)
        # Looked at and written several times for every update, so past NumPy.
        marks: Any = self.arena.take(8 * ImageMark.COUNT).numpy()
        self.marks = memoryview(marks).cast("q")
        for mark in range(ImageMark.COUNT):
            self.marks[mark] = NONE
        self.index = {entry.name: i for i, entry in enumerate(table)}
        self.present = self.arena.take(2 * count).numpy().reshape(2, count)
        self.flats = [
            Flat(flat.table, self.arena.take(flat.table.nbytes)) for flat in parameters.flats
        ]
        self.rest = [Flat(table, self.arena.take(table.nbytes)) for _ in range(2)]
        seen: Any = self.arena.take(16 * workers).numpy()
        self.samples = memoryview(seen).cast("q")  # that each worker has seen, in both places
        self.buffers = [
            [Flat(buffers, self.arena.take(buffers.nbytes)) for _ in range(workers)]
            for _ in range(2)
        ]
        self.copied: list[dict[int, Mapping[str, Tensor]]] = [{}, {}]  # by this process, in both
        # What this process has put into each of the two places, and where; an earlier server may
        # have left something else there.
        self.seen: list[list[Learnt] | None] = [None, None]
        self.written: list[list[str] | None] = [None, None]
        self.places: list[list[Tensor]] = [[], []]
        self.sources: list[list[Tensor]] = [[], []]

    @classmethod
    def of(cls, job: Job, parameters: Parameters, averaged: Table) -> "CrashImages | None":
        """CrashImages that fit what `parameters` will learn; None for a large model."""
        if parameters.pull_bytes > LARGEST:
            return None
        throw_away = job.make_parameters()
        assert throw_away is not None
        table = _table(throw_away, averaged)
        buffers = job.workers * Table.of(parameters.averages.entries).nbytes
        if table.nbytes + buffers > LARGEST:
            return None
        return cls(parameters, table, job.workers)

    def begin(self, version: int, found: Mapping[str, Tensor] | None) -> None:
        """Another server takes over, with what was `found` of `version`; that stays to be found."""
        if found is None:
            self.marks[ImageMark.KEPT] = NONE
        elif self.marks[ImageMark.KEPT] != version:
            self.marks[ImageMark.KEPT] = NONE
            fill(self.flats, under("parameters/", found))
            self.marks[ImageMark.KEPT] = version
        self.marks[ImageMark.LIVE] = NONE

    def keep(self) -> None:
        """Copy the parameters, unless that is done: sooner or later an update changes them."""
        marks = self.marks
        live = marks[ImageMark.LIVE]
        if live not in (NONE, marks[ImageMark.KEPT]):
            marks[ImageMark.KEPT] = NONE
            for mine, theirs in zip(self.flats, self.parameters.flats, strict=True):
                mine.copy_(theirs)
            marks[ImageMark.KEPT] = live

    def before(self) -> None:
        """An update is about to be made."""
        self.keep()
        self.marks[ImageMark.LIVE] = NONE

    def write(self, version: int) -> None:
        """The store is at `version`, and about to tell."""
        place = version % 2
        self.marks[place] = NONE
        rest = learnt(self.parameters)
        # The same objects have the same names: looking at those costs more than copying.
        if not _identical(rest, self.seen[place]) and not self._find(place, rest):
            return  # a rule that has learnt something new: without it the rest would be wrong
        if self.sources[place]:
            torch._foreach_copy_(self.places[place], self.sources[place])
        if self.parameters.averages.entries:
            self._write_buffers(place)
        self.marks[place] = self.marks[ImageMark.LIVE] = version

    def _write_buffers(self, place: int) -> None:
        """Copy what was sent since this place was written last: that never changes once sent."""
        averages, copied = self.parameters.averages, self.copied[place]
        for worker, flat in enumerate(self.buffers[place]):
            self.samples[2 * worker + place] = averages.seen.get(worker, 0)
            mine = averages.last.get(worker)
            if mine is not None and copied.get(worker) is not mine:
                torch._foreach_copy_([flat.views[name] for name in mine], list(mine.values()))
                copied[worker] = mine

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
        """What the store had learnt at `version`, if all of that is whole."""
        place = version % 2
        whole = {self.marks[ImageMark.LIVE]: self.parameters.flats}
        whole[self.marks[ImageMark.KEPT]] = self.flats
        if self.marks[place] != version or version not in whole:
            return None
        found = {name: view.clone() for name, view in named("parameters/", whole[version]).items()}
        for name, view in self.rest[place].views.items():
            if self.present[place, self.index[name]]:
                found[name] = view.clone()
        for worker, flat in enumerate(self.buffers[place]):
            if self.samples[2 * worker + place]:
                found[f"seen/{worker}"] = torch.tensor(self.samples[2 * worker + place])
                mine = named(f"statistics/{worker}/", [flat])
                found |= {name: view.clone() for name, view in mine.items()}
        return found

    def close(self) -> None:
        self.arena.close()


def _table(parameters: Parameters, averaged: Table) -> Table:
    """What these throw-away parameters have learnt after one step."""
    nothing = [Flat(flat.table) for flat in parameters.flats]
    parameters.remember(0, 0)
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
    return not one or all(a is b for (_, a), (_, b) in zip(one, other, strict=True))
