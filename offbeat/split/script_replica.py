"""A split replica whose loss a script computes: a step comes in two halves, forward and backward.

All microbatches go forward before the first goes back, which is the order of GPipe: the script sees
the output of the whole batch in between.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.model.replica import put_back
from offbeat.model.table import Flat, Table
from offbeat.split.part import BACK, Microbatch, Part, PartSpec, pieces_of
from offbeat.split.passes import Cost, Gradients
from offbeat.split.plan.schedule import BACKWARD, FORWARD, Op
from offbeat.split.replica import PartReplica
from offbeat.split.tree import mapped

OUT = "output"


class Asked(NamedTuple):
    """A forward pass as every process of a replica has to know of it."""

    lease: Lease  # whose random numbers are used
    samples: int  # in the batch, which need not be that of the lease
    learns: bool  # whether a backward pass follows
    modes: bytes  # of all modules of the model, in order: 1 for training, 0 for evaluation


class ScriptPart(Part):
    """Some stages of a replica; the output of the last is handed to the process of the first."""

    def __init__(self, model: nn.Module, spec: PartSpec):
        super().__init__(model, spec)
        self.modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
        self.modes = b""
        self.pieces = 0  # microbatches that have gone forward and have to come back
        self.entered: list[Gradients] = []

    def forward(self, asked: Asked, inputs: Any = None) -> list[Any]:
        """Send a batch through these stages; returns the outputs of its microbatches.

        Only the process of the first stage has inputs, and it alone gets outputs.
        """
        since, busy = time.perf_counter(), self.busy
        self._put(asked.modes)
        pieces = pieces_of(asked.samples, self.cut.layout.pieces)
        flights = [passes.flights for passes in self.passes.values()]
        if asked.learns:
            self.forget()
            self.pieces, self.steps = len(pieces), self.steps + 1
        else:
            for passes in self.passes.values():
                passes.flights = {}
        with torch.set_grad_enabled(asked.learns):
            for op in self._order(len(pieces)):
                if op.kind == FORWARD:
                    self._forward(op, asked.lease, (inputs, None), pieces)
        found = []
        if 0 in self.stages:
            found = [self._receive(self.last, (OUT, 0, number)) for number in range(len(pieces))]
        if asked.learns:
            self.total += time.perf_counter() - since
        else:  # a look: a step that is under way goes on as if it had not been
            self.busy = busy
            for passes, before in zip(self.passes.values(), flights, strict=True):
                passes.flights = before
        return found

    def backward(self, gradients: Sequence[Gradients] = ()) -> list[Gradients]:
        """Descend from the gradients of the outputs; returns those of the inputs.

        Both are by microbatch, and both are for the process of the first stage alone.
        """
        since = time.perf_counter()
        self.entered = []
        for number, mine in enumerate(gradients):
            self._send(self.last, (BACK, self.last, number), mine)
        for op in self._order(self.pieces):
            if op.kind == BACKWARD:
                self._backward(op, self.pieces)
        self.sum_tied({(stage, name): p for stage, _, name, p in self.parameters()})
        self.pieces = 0
        self.total += time.perf_counter() - since
        return self.entered

    def forget(self) -> None:
        """No gradients, and nothing under way."""
        for _, _, _, parameter in self.parameters():
            parameter.grad = None
        for passes in self.passes.values():
            passes.flights = {}

    def _put(self, modes: bytes) -> None:
        """The script says which modules train."""
        if modes == self.modes:
            return
        self.modes = modes
        told = dict(zip(self.modules, modes, strict=True))
        for stage in self.stages.values():
            stage.train(bool(told[""]))
            for name, module in stage.named_modules(remove_duplicate=False):
                if name:
                    module.training = bool(told[name])

    # ------------------------------------------------------------ where the script is

    def _cost(self, one: Microbatch, batch: Any) -> Cost | None:
        """The script's loss is no part of this: it gets its numbers in the usual precision."""
        if self.cut.layout.precision == "float32":
            return None
        return lambda output: mapped(_single, output)

    def _ended(self, op: Op, out: Any) -> float | None:
        self._send(0, (OUT, 0, op.microbatch), out)
        return None

    def _gradients(self, op: Op) -> Gradients:
        if op.stage < self.last:
            return super()._gradients(op)
        gradients: Gradients = self._receive(0, (BACK, op.stage, op.microbatch))
        return gradients

    def _returned(self, op: Op, gradients: Gradients) -> None:
        self.entered.append(gradients)


class ScriptReplica(PartReplica):
    """The part of one process, and the model that the script holds: its parameters follow."""

    def __init__(self, part: Part, tables: Sequence[Table], flats: Sequence[Flat] | None = None):
        assert isinstance(part, ScriptPart)
        assert part.spec.script is not None
        self.open, self.model = part, part.spec.script
        self.shown = dict(self.model.named_parameters())
        self.views: dict[str, Tensor] = {}  # what each of them shows
        super().__init__(part, tables, flats)

    def borrow(self, flats: Sequence[Flat]) -> None:
        super().borrow(flats)
        for flat in flats:
            for name, view in flat.views.items():
                self.shown[name].data = self.views[name] = view

    def move_out(self) -> None:
        for parameter in self.shown.values():
            parameter.data = parameter.data.clone()

    def show(self, pulled: Sequence[Flat]) -> None:
        """A script sees what was pulled, as a copy: no process has all that is computed on."""
        for flat in pulled:
            for name, view in flat.views.items():
                self.shown[name].data = self.views[name] = view.clone()

    def reclaim(self) -> None:
        for name, view in self.views.items():
            put_back(name, self.shown[name], view)

    def forward(self, asked: Asked, inputs: Any) -> list[Any]:
        self.reclaim()
        return self.open.forward(asked, inputs)

    def backward(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        return self.open.backward(gradients)


def _single(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
