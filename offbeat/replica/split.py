"""A replica in stages: the part of it that one process has, with the ways of a whole one."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from offbeat.lease import Lease
from offbeat.replica.part import Part
from offbeat.replica.stream import Stream
from offbeat.replica.whole import Replica
from offbeat.store.table import Flat, Table


class PartReplica(Replica):
    """Turns leases into gradients of the stages that a process has, together with the others.

    Its parameters are those that its stages own. A parameter that a stage has borrowed from
    another one is only looked at: `borrow` says where.
    """

    def __init__(self, part: Part, tables: Sequence[Table], flats: Sequence[Flat] | None = None):
        """`tables` and `flats` are of this part's stages alone."""
        self.part = part
        part.train()
        self.reader, self.accumulate = part.seat.reader, 1
        self.parameters = part.owned()
        self._settle(tables, flats)

    def bind(self, flats: Sequence[Flat]) -> None:
        super().bind(flats)
        self.borrow(flats)

    def borrow(self, flats: Sequence[Flat]) -> None:
        """Let borrowed parameters be views of where their owners have them, if that is here."""
        views = {name: view for flat in flats for name, view in flat.views.items()}
        for stage, _, name, parameter in self.part.parameters():
            if name in views and name not in self.part.cut.owned(stage):
                parameter.data = views[name]

    def compute(self, lease: Lease) -> float:
        """Leave the gradient of this part on its parameters; no number where the loss is not."""
        self.part.compute(lease)
        return float("nan") if self.part.loss is None else self.part.loss

    def stream(self) -> Stream | None:
        return None  # microbatches add up on the parameters first

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self.part.stages.values():
            yield from stage.named_buffers()
