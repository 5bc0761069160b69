"""Where the numbers of one process of a worker lie: in the worker's slot, or beside it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offbeat.model.table import Flat
from offbeat.split.replica import PartReplica, parts_of
from offbeat.split.tensor_shards import Shards
from offbeat.store.slot import Slot
from offbeat.worker.send import Outs


class MemberMemory:
    """A process that has its stages to itself uses the slot in place; `tables` are its own."""

    def __init__(self, slot: Slot, tables: Sequence[int]):
        self.slot, self.tables = slot, list(tables)

    def incoming(self, place: int) -> list[Flat]:
        """The parameters that have come in there."""
        return [self.slot.incoming[place][number] for number in self.tables]

    def outgoing(self) -> Outs:
        return [[flats[number] for number in self.tables] for flats in self.slot.outgoing]

    def push(self, out: Sequence[Flat]) -> None:
        """What goes out is `out`, one of those outgoing."""

    def push_beside(self, replica: PartReplica, updater: Mapping[str, Tensor]) -> None:
        """Leave statistics, and the state of a local optimiser, in the slot."""
        for name, buffer in replica.named_buffers():
            if name in self.slot.statistics.views:
                self.slot.statistics.views[name].copy_(buffer)
        for name, tensor in updater.items():
            self.slot.updater.views[name].copy_(tensor)

    def updater(self) -> Mapping[str, Tensor]:
        """The state of the local optimiser that has come in."""
        return self.slot.updater.views


class ShardMemberMemory(MemberMemory):
    """A process with one shard of its stages has its parts in memory of its own.

    The slot has whole tensors. Every process writes its own parts there; what all of them have
    whole and equal is written by the first.
    """

    def __init__(self, slot: Slot, tables: Sequence[int], shards: Shards, shard: int):
        super().__init__(slot, tables)
        self.shards, self.shard = shards, shard
        mine = parts_of([slot.outgoing[0][number].table for number in self.tables], shards)
        self.pulled = [Flat(table) for table in mine]
        self.outs = [[Flat(table) for table in mine] for _ in slot.outgoing]

    def incoming(self, place: int) -> list[Flat]:
        for whole, mine in zip(super().incoming(place), self.pulled, strict=True):
            for name, view in mine.views.items():
                view.copy_(self.shards.own(name, whole.views[name], self.shard))
        return self.pulled

    def outgoing(self) -> Outs:
        return self.outs

    def push(self, out: Sequence[Flat]) -> None:
        # Lists of views, so found by identity: comparing would look into the tensors.
        place = next(number for number, mine in enumerate(self.outs) if mine is out)
        for number, mine in zip(self.tables, out, strict=True):
            for name, view in mine.views.items():
                self._write(name, self.slot.outgoing[place][number].views[name], view)

    def push_beside(self, replica: PartReplica, updater: Mapping[str, Tensor]) -> None:
        if self.shard == 0:
            super().push_beside(replica, {})
        for name, tensor in updater.items():
            self._write(_parameter(name), self.slot.updater.views[name], tensor)

    def updater(self) -> Mapping[str, Tensor]:
        return {
            name: self.shards.own(_parameter(name), view, self.shard)
            for name, view in super().updater().items()
        }

    @torch.no_grad()
    def _write(self, name: str, whole: Tensor, mine: Tensor) -> None:
        """Put this process's part of what belongs to the parameter `name` where the whole is."""
        if self.shard == 0 or (name in self.shards.dims and whole.dim()):
            self.shards.own(name, whole, self.shard).copy_(mine)


def _parameter(name: str) -> str:
    """Whose state it is: an optimiser's tensors are named after their parameters."""
    return name.rpartition("/")[0]
