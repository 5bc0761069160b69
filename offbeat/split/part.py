"""A process's part of a replica: its stages, and their passes in the order of the schedule."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.config.units import AS_FAST_AS_CAN_BE, LeastTime
from offbeat.data.lease import Lease
from offbeat.data.random_state import seed_all
from offbeat.data.reader import Reader, mix
from offbeat.model.device import CPU, Device
from offbeat.model.objective import BatchLoss, Loss
from offbeat.model.precision import new_scale
from offbeat.split.channel import Mesh, Tag
from offbeat.split.passes import Cost, Gradients, Passes
from offbeat.split.plan.cut import Cut
from offbeat.split.plan.schedule import BACKWARD, FORWARD, Op, orders
from offbeat.split.stages import Stage
from offbeat.split.tensor_group import TensorGroup
from offbeat.split.tensor_parallel import share
from offbeat.split.tree import mapped

ALL = -1  # the number of a process that has every stage
ONWARD, BACK, TIED = "activation", "gradient", "tied gradient"

_NEVER = threading.Event()  # waiting for it is waiting


@dataclass(frozen=True)
class PartSpec:
    """Which process of a replica this is, how it reaches the others, and what it computes from."""

    cut: Cut
    process: int
    mesh: Mesh
    reader: Reader
    loss: Loss
    least: LeastTime = AS_FAST_AS_CAN_BE  # that the passes of a step take
    peers: TensorGroup | None = None  # who has the other shards of the same stages
    script: nn.Module | None = None  # the model that a script holds, where it computes the loss
    device: Device = CPU  # where it computes


class Microbatch(NamedTuple):
    """A piece of a lease: its number, of how many, and which of the lease's samples it has."""

    lease: Lease
    number: int
    pieces: int
    start: int
    stop: int

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.lease.samples


class Part:
    """Some stages of a replica: `compute` is this process's share of a step.

    All processes of a replica compute the same lease at the same time, and hand to each other what
    crosses a cut. A process that has all stages makes the same passes one after the other, and
    arrives at the same bits.
    """

    def __init__(self, model: nn.Module, spec: PartSpec):
        self.spec, self.cut, self.mesh = spec, spec.cut, spec.mesh
        self.all = spec.process == ALL
        self.numbers = (
            list(range(self.cut.stages)) if self.all else self.cut.stages_of(spec.process)
        )
        self.stages: dict[int, Stage] = {s: self.cut.stage(model, s) for s in self.numbers}
        if spec.peers is not None:
            assert self.cut.shards is not None
            for stage in self.stages.values():
                share(stage, self.cut.shards, spec.peers)
        for stage in self.stages.values():
            spec.device.move(stage)
        precision = self.cut.layout.precision
        self.passes = {s: Passes(stage, precision) for s, stage in self.stages.items()}
        self.scale = new_scale(precision)
        self.last = self.cut.stages - 1
        self.busy = self.total = 0.0  # seconds computing, and seconds of all steps
        self.steps = self.samples = 0  # steps made, and samples in the last of them
        self.loss: float | None = None  # of the last step, where the last stage is

    def train(self, mode: bool = True) -> None:
        for stage in self.stages.values():
            stage.train(mode)

    def parameters(self) -> Iterator[tuple[int, str, str, nn.Parameter]]:
        """Trained parameters: stage, name there, name in the store, and the parameter."""
        for number, stage in self.stages.items():
            mine = dict(stage.named_parameters())
            for held in self.cut.held[number]:
                yield number, held.here, held.name, mine[held.here]

    def owned(self) -> dict[str, nn.Parameter]:
        """By their names in the store, those that this process answers for."""
        mine = {s: set(self.cut.owned(s)) for s in self.numbers}
        return {name: p for stage, _, name, p in self.parameters() if name in mine[stage]}

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for stage in self.stages.values():
            yield from stage.named_buffers()

    def overflowed(self) -> None:
        """What came of the last steps was not finite, and is left out."""
        if self.scale is not None:
            self.scale.overflowed()

    def load_scale(self, state: Tensor | None) -> None:
        if self.scale is not None and state is not None:
            self.scale.load_state(state)

    # ------------------------------------------------------------ a step

    def compute(self, lease: Lease) -> None:
        """Leave the gradient of `lease` on the parameters."""
        since = time.perf_counter()
        self.steps += 1
        if self.scale is not None:
            scale = self.scale.begin()
            for passes in self.passes.values():
                passes.scale = scale
        for _, _, _, parameter in self.parameters():
            parameter.grad = None
        batch = self._batch(lease)
        pieces = pieces_of(lease.samples, self.cut.layout.pieces)
        total = 0.0
        for op in self._order(len(pieces)):
            if op.kind == FORWARD:
                loss = self._forward(op, lease, batch, pieces)
                total += loss or 0.0
            else:
                self._backward(op, len(pieces))
        self.sum_tied({(stage, name): p for stage, _, name, p in self.parameters()})
        if self.scale is not None:
            for _, _, _, parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self.scale.value)
        self.total += time.perf_counter() - since
        self.loss = total if self.last in self.stages else None

    def _order(self, pieces: int) -> Sequence[Op]:
        layout = self.cut.layout
        made = orders(layout.schedule, layout.pp, pieces, layout.chunks)
        if layout.chunks > 1 and pieces % layout.pp:  # a short last batch does not go round
            return [
                Op(kind, stage, number)
                for kind in (FORWARD, BACKWARD)
                for stage in (self.numbers if kind == FORWARD else reversed(self.numbers))
                for number in range(pieces)
            ]
        if not self.all:
            return made[self.cut.place_of(self.spec.process)[0]]
        # One microbatch after the other, in the order in which every stage has them too.
        kinds = {op.kind for mine in made for op in mine}
        found = []
        for number in range(pieces):
            found += [Op(FORWARD, stage, number) for stage in self.numbers]
            for stage in reversed(self.numbers):
                found += [Op(kind, stage, number) for kind in (BACKWARD, "W") if kind in kinds]
        return found

    def _batch(self, lease: Lease) -> Any:
        """Only the first stage needs the inputs, and only the last the targets."""
        if not self.stages.keys() & {0, self.last}:
            return None
        self.spec.reader.reseed(lease)
        return self.spec.device.batch(self.spec.reader.read(lease))

    def _forward(
        self, op: Op, lease: Lease, batch: Any, pieces: Sequence[tuple[int, int]]
    ) -> float | None:
        value = None
        if op.stage:
            value = self._receive(op.stage - 1, (ONWARD, op.stage, op.microbatch))
        one = Microbatch(lease, op.microbatch, len(pieces), *pieces[op.microbatch])
        out = self.pass_forward(self.passes[op.stage], op.stage, op.microbatch, one, batch, value)
        if op.stage == self.last:
            return self._ended(op, out)
        self._send(op.stage + 1, (ONWARD, op.stage + 1, op.microbatch), out)
        return None

    def pass_forward(
        self, passes: Passes, stage: int, key: Any, one: Microbatch, batch: Any, value: Any
    ) -> Any:
        """Send a microbatch through a stage; `value` came from the stage before, if there is one.

        The last stage makes its loss of it.
        """
        since = time.perf_counter()
        if self.spec.peers is not None:
            self.spec.peers.meet()
        # Chance must not depend on which process computes what, nor on when.
        lease = one.lease
        seed_all(mix(self.spec.reader.seed, 4, lease.epoch, lease.start, stage, one.number))
        if stage == 0:
            value = _cut(batch[0], one.start, one.stop)
        cost = self._cost(one, batch) if stage == self.last else None
        out = passes.forward(key, value, cost)
        self.samples = lease.samples
        self._spent(since, 1 / 3, one.pieces, lease.samples)
        return out

    def _cost(self, one: Microbatch, batch: Any) -> Cost | None:
        """What the last stage makes of its output: a share of the loss."""
        target, share = _cut(batch[1], one.start, one.stop), one.share

        def cost(output: Any) -> Tensor:
            assert not isinstance(self.spec.loss, BatchLoss)
            return self.spec.loss(output, target) * share

        return cost

    def _ended(self, op: Op, out: Any) -> float | None:
        """A microbatch has come through the last stage."""
        return float(out.item())

    def _backward(self, op: Op, pieces: int) -> None:
        passes, key = self.passes[op.stage], op.microbatch
        split = self.cut.layout.schedule == "zero-bubble"
        if op.kind != BACKWARD:
            since = time.perf_counter()
            passes.backward_weight(key)
            self._spent(since, 1 / 3, pieces, self.samples)
            return
        gradients = self._gradients(op)
        since = time.perf_counter()
        made = (passes.backward_input if split else passes.backward)(key, gradients)
        self._spent(since, (1 if split else 2) / 3, pieces, self.samples)
        if op.stage:
            self._send(op.stage - 1, (BACK, op.stage - 1, key), made)
        else:
            self._returned(op, made)

    def _gradients(self, op: Op) -> Gradients:
        """What to descend from; the last stage has its loss for that."""
        if op.stage == self.last:
            return []
        gradients: Gradients = self._receive(op.stage + 1, (BACK, op.stage, op.microbatch))
        return gradients

    def _returned(self, op: Op, gradients: Gradients) -> None:
        """A microbatch has come back through the first stage; nobody asks what its inputs get."""

    def _spent(self, since: float, share: float, pieces: int, samples: int) -> None:
        """A pass is done; with emulated speeds it takes its share of the step at the least."""
        least = self.spec.least.of(samples) * share / pieces / self.cut.layout.chunks
        missing = least - (time.perf_counter() - since)
        if missing > 0:
            _NEVER.wait(missing)
        self.busy += time.perf_counter() - since

    @torch.no_grad()
    def sum_tied(self, mine: Mapping[tuple[int, str], nn.Parameter]) -> None:
        """The owner of a tied parameter adds up the gradients of all stages, in their order."""
        for stage in self.numbers:
            for held in self.cut.borrowed(stage):
                gradient = mine[stage, held.name].grad
                self._send(held.owner, (TIED, held.owner, stage), [held.name, gradient])
        for stage in self.numbers:
            for name, later in self.cut.borrowers(stage):
                told, gradient = self._receive(later, (TIED, stage, later))
                assert told == name
                own = mine[stage, name]
                if gradient is not None:
                    own.grad = gradient if own.grad is None else own.grad + gradient

    # ------------------------------------------------------------ to and from other stages

    def _process(self, stage: int) -> int:
        shard = 0 if self.spec.peers is None else self.spec.peers.me
        return self.mesh.me if self.all else self.cut.process_of(stage, shard)

    def _send(self, stage: int, tag: Tag, value: Any) -> None:
        self.mesh.send(self._process(stage), tag, value)

    def _receive(self, stage: int, tag: Tag) -> Any:
        # What comes from another process comes by way of the CPU.
        return self.spec.device.batch(self.mesh.receive(self._process(stage), tag))


def pieces_of(samples: int, count: int) -> list[tuple[int, int]]:
    """Microbatches of a lease as ranges; the last lease of an epoch may have too few samples."""
    count = min(count, samples)
    return list(pairwise(samples * number // count for number in range(count + 1)))


def _cut(value: Any, start: int, stop: int) -> Any:
    return mapped(lambda tensor: tensor[start:stop], value)
