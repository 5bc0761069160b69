"""A replica in stages: the part of it that one process has, with the ways of a whole one."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.model.gradient_stream import Stream
from offbeat.model.replica import Replica
from offbeat.model.table import Entry, Flat, Table
from offbeat.split.part import Part
from offbeat.split.tensor_shards import Shards


class PartReplica(Replica):
    """Turns leases into gradients of the stages that a process has, together with the others.

    Its parameters are those that its stages own. A parameter that a stage has borrowed from
    another one is only looked at: `borrow` says where.
    """

    def __init__(self, part: Part, tables: Sequence[Table], flats: Sequence[Flat] | None = None):
        """`tables` and `flats` are of this part's stages alone."""
        self.part = part
        self.reader, self.accumulate, self.device = part.spec.reader, 1, part.spec.device
        self.parameters = part.owned()
        self._settle(tables, flats)

    def bind(self, flats: Sequence[Flat]) -> None:
        super().bind(flats)
        self.borrow(flats)

    def borrow(self, flats: Sequence[Flat]) -> None:
        """Let borrowed parameters be what their owners have, in place where they have the whole."""
        views = {name: view for flat in flats for name, view in flat.views.items()}
        peers, shards = self.part.spec.peers, self.part.cut.shards
        for stage, _, name, parameter in self.part.parameters():
            if name not in views or name in self.part.cut.owned(stage):
                continue
            if views[name].shape == parameter.shape:
                self._look_at(name, parameter, views[name])
            else:
                assert peers is not None
                assert shards is not None
                parameter.data.copy_(shards.own(name, views[name], peers.me))

    def _look_at(self, name: str, parameter: nn.Parameter, view: Tensor) -> None:
        """In place where that can be; what this process has itself it has there already."""
        if view.device == parameter.device:
            parameter.data = view
        elif name not in self.parameters:
            parameter.data.copy_(view)

    def compute(self, lease: Lease) -> float:
        """Leave the gradient of this part on its parameters; no number where the loss is not."""
        self.part.compute(lease)
        return float("nan") if self.part.loss is None else self.part.loss

    def stream(self) -> Stream | None:
        # What other stages or a scale have to do with a gradient comes after the backward pass.
        alone = self.part.cut.stages == 1 and self.part.cut.shards is None
        return super().stream() if alone and self.part.scale is None else None

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        super().recover(buffers)
        self.part.overflowed()

    def state(self) -> dict[str, Tensor]:
        scale = self.part.scale
        return super().state() | ({} if scale is None else {"scale": scale.state()})

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        super().load_state(tensors)
        self.part.load_scale(tensors.get("scale"))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.part.named_buffers()


def parts_of(tables: Sequence[Table], shards: Shards) -> list[Table]:
    """The tables of a process that has one shard of every parameter that is cut."""
    return [
        Table.of([Entry(e.name, shards.shape(e.name, e.shape), e.dtype, e.policy) for e in table])
        for table in tables
    ]
