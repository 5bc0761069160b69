"""What lies beside a message on the wire: which bytes go out, and where those go that come in.

Both ends make the same of a job, so neither tells the other how long anything is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.codec import Codec, Packed
from offbeat.model.table import Entry, Flat, Table
from offbeat.protocol.messages import Go, Push
from offbeat.store.pulls import add
from offbeat.store.slot import Slot
from offbeat.transport.frames import Misbehaved, Views


class PackedBuffers:
    """A payload as a codec leaves it, each tensor's parts at their places in flat buffers."""

    def __init__(self, codec: Codec, tables: Iterable[Table]):
        self.codec = codec
        self.flats: list[Flat] = []
        self.entries: list[list[Entry]] = []
        for table in tables:
            parts = [
                Entry(f"{entry.name}/{part}", (count,), dtype, "shared")
                for entry in table
                for part, (dtype, count) in codec.parts(entry.shape, entry.dtype).items()
            ]
            self.flats.append(Flat(Table.of(parts)))
            self.entries.append(list(table))

    def write(self, packed: Mapping[str, Packed]) -> None:
        for flat, entries in zip(self.flats, self.entries, strict=True):
            for entry in entries:
                for part, tensor in packed[entry.name].tensors.items():
                    flat.views[f"{entry.name}/{part}"].copy_(tensor.reshape(-1))

    def add(self, into: Sequence[Flat]) -> None:
        """Take in a change."""
        for flat, entries, out in zip(self.flats, self.entries, into, strict=True):
            for entry in entries:
                add(out.views[entry.name], self._packed(flat, entry))

    def unpack(self, into: Sequence[Flat]) -> None:
        """Write what the store sees of it."""
        for flat, entries, out in zip(self.flats, self.entries, into, strict=True):
            for entry in entries:
                out.views[entry.name].copy_(self.codec.decode(self._packed(flat, entry)))

    def _packed(self, flat: Flat, entry: Entry) -> Packed:
        parts: dict[str, Tensor] = {
            part: flat.views[f"{entry.name}/{part}"]
            for part in self.codec.parts(entry.shape, entry.dtype)
        }
        return Packed(self.codec, entry.shape, entry.dtype, parts)


@dataclass(frozen=True)
class Packing:
    """How contributions and pulls are packed.

    `rows` are parameters whose gradients have few rows that are not zero; where nothing else packs
    a contribution, those rows alone travel.
    """

    push: Codec | None = None
    pull: Codec | None = None
    rows: tuple[str, ...] = ()

    def cargo(self, slot: Slot) -> "Cargo":
        """What lies beside the messages of a link whose ends have this slot."""
        return Cargo(slot, self)


@dataclass(frozen=True)
class MeetingPacking(Packing):
    """Nothing is packed where workers add up among themselves."""

    def cargo(self, slot: Slot) -> "Cargo":
        return MeetingCargo(slot, self)


class Rows:
    """The rows of one tensor that are not zero, with their numbers."""

    def __init__(self, view: Tensor):
        self.view = view
        self.expect(0)

    def expect(self, count: int) -> None:
        """Make room for so many."""
        if not 0 <= count <= len(self.view):
            raise Misbehaved(f"{count} rows of a tensor that has {len(self.view)}")
        self.indices = torch.empty(count, dtype=torch.int64)
        self.values = torch.empty((count, *self.view.shape[1:]), dtype=self.view.dtype)

    def gather(self) -> int:
        """Take them from the tensor; returns how many there are."""
        whole = self.view.reshape(len(self.view), -1)
        self.indices = (whole != 0).any(1).nonzero().reshape(-1)
        self.values = self.view[self.indices]
        return len(self.indices)

    def scatter(self) -> None:
        """Make the tensor of them."""
        if bool(((self.indices < 0) | (self.indices >= len(self.view))).any()):
            raise Misbehaved("a row that the tensor does not have")
        self.view.zero_()
        self.view[self.indices] = self.values

    def views(self) -> Views:
        parts = [part for part in (self.indices, self.values) if len(part)]
        arrays: list[Any] = [part.view(-1).view(torch.uint8).numpy() for part in parts]
        return [memoryview(array) for array in arrays]


class Sparse:
    """A payload of which some tensors travel as rows, and the rest as it lies."""

    def __init__(self, flats: Sequence[Flat], names: Sequence[str]):
        self.rows: list[Rows] = []
        self.rest: Views = []
        for flat in flats:
            start = 0
            for entry in flat.table:
                if entry.name in names:
                    self.rows.append(Rows(flat.views[entry.name]))
                    self.rest.append(flat.bytes[start : entry.offset])
                    start = entry.offset + entry.nbytes
            self.rest.append(flat.bytes[start:])

    def views(self) -> Views:
        found = [view for view in self.rest if len(view)]
        return found + [view for rows in self.rows for view in rows.views()]


class Cargo:
    """The buffers of one worker's slot, as they lie beside the messages of its link."""

    def __init__(self, slot: Slot, packing: Packing):
        self.slot, codec = slot, packing.push
        tables = [flat.table for flat in slot.outgoing[0]] if slot.outgoing else []
        self.sparse: list[Sparse] = []
        if packing.rows and codec is None:
            self.sparse = [Sparse(flats, packing.rows) for flats in slot.outgoing]
        self.packed: list[PackedBuffers] = []
        if codec is not None:
            self.packed = [PackedBuffers(codec, tables) for _ in slot.outgoing]
        self.changes: list[PackedBuffers] = []
        if packing.pull is not None:
            tables = [flat.table for flat in slot.incoming[0]]
            self.changes = [PackedBuffers(packing.pull, tables) for _ in slot.incoming]

    def of_push(self, push: Push) -> Views:
        """What comes with a contribution: its payload, statistics, and state to average."""
        slot = self.slot
        if not -1 <= push.place < len(slot.outgoing):
            raise Misbehaved("a contribution from a place that there is not")
        beside = views_of([slot.statistics, slot.updater])
        if push.place < 0:
            return beside
        if self.sparse:
            return self.sparse[push.place].views() + beside
        packed = self.packed[push.place].flats if self.packed else slot.outgoing[push.place]
        return views_of(packed) + beside

    def pack(self, push: Push, packed: Mapping[str, Packed] | None) -> None:
        """As a worker: make ready what the payload travels as."""
        if packed is not None:
            self.packed[push.place].write(packed)
        elif self.sparse and push.place >= 0:
            push.rows = [rows.gather() for rows in self.sparse[push.place].rows]

    def expect(self, push: Push) -> None:
        """As the server: make room for what comes."""
        if self.sparse and 0 <= push.place < len(self.sparse):
            rows = self.sparse[push.place].rows
            if len(push.rows) != len(rows):
                raise Misbehaved("rows of other tensors than there are")
            for mine, count in zip(rows, push.rows, strict=True):
                mine.expect(count)

    def unpack(self, push: Push) -> None:
        """As the server: what has come becomes what the store sees."""
        if push.place < 0:
            return
        if self.packed:
            self.packed[push.place].unpack(self.slot.outgoing[push.place])
        elif self.sparse:
            for rows in self.sparse[push.place].rows:
                rows.scatter()

    def of_go(self, go: Go) -> Views:
        """What comes with a worker's turn: parameters, and the mean of the others' state."""
        slot = self.slot
        if not 0 <= go.place < len(slot.incoming):
            raise Misbehaved("parameters for a place that there is not")
        flats: list[Flat] = []
        if go.packed and not self.changes:
            raise Misbehaved("a packed pull that nobody has asked for")
        if go.fresh:
            flats += self.changes[go.place].flats if go.packed else slot.incoming[go.place]
        return views_of([*flats, *([slot.updater] if go.updater else [])])

    def of_welcome(self) -> Views:
        """What a worker begins with: the mean of averaged buffers."""
        return views_of([self.slot.statistics])

    def of_stop(self) -> Views:
        """What a run ends with: parameters and averaged buffers."""
        return views_of([*self.slot.incoming[0], self.slot.statistics])

    def of_shown(self) -> Views:
        """What a worker shows of what it holds: that is the store's own here."""
        raise Misbehaved("a worker shows what the store holds")


class MeetingCargo(Cargo):
    """The same where workers add up among themselves, and hold what a store would."""

    def of_push(self, push: Push) -> Views:
        """Statistics alone: the rest goes to the other workers."""
        if push.place >= 0:
            raise Misbehaved("a contribution for a store that takes none")
        return views_of([self.slot.statistics])

    def of_go(self, go: Go) -> Views:
        """All that others hold, for one that does not."""
        if go.place != 0 or go.packed:
            raise Misbehaved("parameters for a place that there is not")
        return self.of_shown() if go.fresh else []

    def of_shown(self) -> Views:
        slot = self.slot
        views = views_of([*slot.incoming[0], slot.rule_state.flat, slot.updater])
        present = memoryview(slot.rule_state.present)
        return [*views, present] if len(present) else views


def views_of(flats: Iterable[Flat]) -> Views:
    return [flat.bytes for flat in flats if len(flat.bytes)]
