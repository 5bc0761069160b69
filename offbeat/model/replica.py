"""A replica in one process: its parameters are views of flat buffers, so a pull is one copy."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError
from offbeat.model.device import CPU, Device, on_host, rehouse
from offbeat.model.gradient_stream import LEAST, DeviceStream, Stream
from offbeat.model.objective import Loss, cost
from offbeat.model.shared_model import SharedModel
from offbeat.model.table import Entry, Flat, Table, fill, named, under


class Replica:
    """The model with parameters of its own, in a process that needs it for nothing else.

    It stays in the modes that its user has put it in, module by module.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[Table],
        reader: Reader,
        loss: Loss,
        accumulate: int = 1,
        flats: Sequence[Flat] | None = None,
        device: Device = CPU,
    ):
        """`flats` already hold parameters, or soon will; without them the model's own are taken."""
        self.model, self.device = model, device
        device.move(model)
        self.reader, self.loss, self.accumulate = reader, loss, accumulate
        names = {entry.name for table in tables for entry in table}
        # In the model's own order, so that nothing depends on how they are sharded.
        self.parameters = {n: p for n, p in self.model.named_parameters() if n in names}
        self._settle(tables, flats)

    def _settle(self, tables: Sequence[Table], flats: Sequence[Flat] | None) -> None:
        # Whether what is pulled comes into this replica's memory.
        self.by_reference = flats is not None and self.device.shares
        if flats is None or not self.by_reference:
            flats = self.device.flats(tables)
            for flat in flats:
                for name, view in flat.views.items():
                    view.copy_(self.parameters[name].detach())
        self.flats: list[Flat] = []
        self.bind(flats)

    def bind(self, flats: Sequence[Flat]) -> None:
        """Let the parameters be views of `flats`, whatever these hold."""
        self.flats = list(flats)
        for flat in flats:
            for name, view in flat.views.items():
                rehouse(self.parameters[name], view)

    def read(self, lease: Lease, part: slice = slice(None)) -> Any:
        """The batch of `lease`, or of a part of it, where it is computed."""
        return self.device.batch(self.reader.read(lease, part))

    def compute(self, lease: Lease) -> float:
        """Leave the mean gradient of `lease` on the parameters; returns the mean loss."""
        self.reader.reseed(lease)
        for parameter in self.parameters.values():
            parameter.grad = None
        return self._descend(lease)

    def _descend(self, lease: Lease) -> float:
        if self.accumulate == 1:
            loss = cost(self.model, self.read(lease), self.loss)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.item()
        total = 0.0
        size = -(-lease.samples // self.accumulate)
        for start in range(0, lease.samples, size):
            stop = min(start + size, lease.samples)
            share = (stop - start) / lease.samples
            loss = cost(self.model, self.read(lease, slice(start, stop)), self.loss) * share
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def collect(self, into: Sequence[Flat]) -> frozenset[str]:
        """Copy the gradients into flat buffers; returns the parameters that got none."""
        absent = []
        for flat in into:
            for name, view in flat.views.items():
                gradient = self.parameters[name].grad
                if gradient is None:
                    view.zero_()
                    absent.append(name)
                else:
                    view.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        return frozenset(absent)

    def stream(self) -> Stream | None:
        """Let gradients go out while they are made, if the model is large enough for that."""
        if sum(flat.table.nbytes for flat in self.flats) < LEAST:
            return None
        if self.device.shares:
            return Stream(self.parameters)
        # A batch that is computed in parts is added up on the device first.
        return DeviceStream(self.parameters, self.flats) if self.accumulate == 1 else None

    def gradients(self) -> list[Tensor]:
        """The gradients the parameters carry now."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def load(self, parameters: Sequence[Flat]) -> None:
        """Take over what was pulled: one copy per shard, none where it came into `flats`."""
        if self.by_reference:
            # A stage without parameters of its own pulls none.
            if parameters and parameters[0] is not self.flats[0]:
                self.bind(parameters)
            return
        for mine, theirs in zip(self.flats, parameters, strict=True):
            mine.copy_(theirs)

    def move_out(self) -> None:
        """Let the parameters lie where nobody else writes."""
        self.bind([flat.clone() for flat in self.flats])

    def show(self, pulled: Sequence[Flat]) -> None:
        """What was pulled is not what this replica computes on; a script sees the latter."""

    def reclaim(self) -> None:
        """Take parameters back that a script gave other memory (`p.data = ...`), with its values.

        Such a write is then like any other: what is pulled next comes to where the model looks.
        """
        for flat in self.flats:
            for name, view in flat.views.items():
                put_back(name, self.parameters[name], view)

    def statistics(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        """Copies of the buffers that the store averages for evaluation, on the CPU."""
        averaged = {e.name for e in entries if e.policy == "averaged"}
        # Looked for at every step: a module may have put another one in its place.
        return {n: on_host(b) for n, b in self.named_buffers() if n in averaged}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self.model.named_buffers()

    def buffers(self) -> dict[str, Tensor]:
        """Copies of all buffers, to return to after a step that went wrong."""
        return {name: buffer.clone() for name, buffer in self.named_buffers()}

    @torch.no_grad()
    def load_buffers(self, saved: Mapping[str, Tensor]) -> None:
        for name, buffer in self.named_buffers():
            buffer.copy_(saved[name])

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        """What came of the last steps was not finite, and is left out: return to `buffers`."""
        self.load_buffers(buffers)

    # ------------------------------------------------------------ state as named tensors

    def state(self) -> dict[str, Tensor]:
        found = named("parameters/", self.flats)
        return found | {f"buffers/{name}": b for name, b in self.named_buffers()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        fill(self.flats, under("parameters/", tensors))
        self.load_buffers(under("buffers/", tensors))


@torch.no_grad()
def put_back(name: str, parameter: nn.Parameter, view: Tensor) -> None:
    """Let `parameter` be `view` again, with the values that it has now."""
    if parameter.is_set_to(view):
        return
    if parameter.shape != view.shape or parameter.dtype != view.dtype:
        raise ConfigError(
            f"parameter {name!r} is now {_kind(parameter)} and was {_kind(view)} when the run "
            "began: convert the model before run.replica(model)"
        )
    view.copy_(parameter)
    rehouse(parameter, view)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


class OwnReplica(Replica):
    """Over the object that a script holds, whose loop computes the gradients."""

    def stream(self) -> Stream | None:
        return None  # its gradients are the script's to look at


class SharedReplica(Replica):
    """One of several that compute with the same model object in turn, in one process.

    `parameters` are its own; the model's are bound to the same memory while it computes.
    """

    def __init__(
        self,
        shared: SharedModel,
        tables: Sequence[Table],
        reader: Reader,
        loss: Loss,
        accumulate: int = 1,
        device: Device = CPU,
    ):
        self.model, self.shared, self.device = shared.model, shared, device
        self.reader, self.loss, self.accumulate = reader, loss, accumulate
        names = {entry.name for table in tables for entry in table}
        self.parameters = {
            name: nn.Parameter(shared.users.parameters[name].to(device.place))
            for name in shared.parameters
            if name in names
        }
        self._settle(tables, None)
        self.held = shared.held({n: p.data for n, p in self.parameters.items()}, device)

    def _descend(self, lease: Lease) -> float:
        self.shared.enter(self.held)
        computing = self.shared.parameters
        for parameter in computing.values():
            parameter.grad = None
        loss = super()._descend(lease)
        for name, mine in self.parameters.items():
            mine.grad, computing[name].grad = computing[name].grad, None
        return loss

    def stream(self) -> Stream | None:
        return None

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        self.shared.leave(self.held)
        return iter(self.held.buffers.items())
