"""All shards of a replica in one process: they take turns, and compute what processes would."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.data.lease import Lease
from offbeat.data.random_state import RandomState
from offbeat.errors import ConfigError, RunError
from offbeat.model.copies import tried
from offbeat.split.channel import alone
from offbeat.split.part import Part, PartSpec
from offbeat.split.plan.cut import Cut
from offbeat.split.stages import near
from offbeat.split.tensor_group import TensorGroup
from offbeat.split.tensor_parallel import share
from offbeat.split.tensor_shards import ANNOTATION
from offbeat.split.tree import tensors


class Baton:
    """Who has it computes; it goes round whenever all have to hear from each other.

    So each shard runs the very code that it would run in a process of its own, one at a time, with
    random numbers of its own.
    """

    def __init__(self, count: int):
        self.count = count
        self.turns = [threading.Semaphore(0) for _ in range(count)]
        self.brought: dict[int, list[Tensor | None]] = {}
        self.over: set[int] = set()
        self.failed: BaseException | None = None

    def run(self, mains: Sequence[Callable[[], None]]) -> None:
        """Run one function for each shard until all have returned; the first runs right here."""
        self.over, self.failed, self.brought = set(), None, {}
        threads = torch.get_num_threads()
        others = [
            threading.Thread(target=self._body, args=(shard, mains[shard], threads))
            for shard in range(1, self.count)
        ]
        for thread in others:
            thread.start()
        self.turns[0].release()
        self._body(0, mains[0], threads)
        for thread in others:
            thread.join()
        if self.failed is not None:
            raise self.failed

    def _body(self, shard: int, main: Callable[[], None], threads: int) -> None:
        self.turns[shard].acquire()
        try:
            if self.failed is None:
                torch.set_num_threads(threads)  # of a thread, as far as OpenMP is concerned
                main()
        except BaseException as error:
            self.failed = self.failed or error
        finally:
            self.over.add(shard)
            self._pass_on(shard)

    def _pass_on(self, shard: int) -> None:
        for other in [*range(shard + 1, self.count), *range(shard + 1)]:
            if other not in self.over:
                self.turns[other].release()
                return

    def everyone(self, shard: int, turn: int, tensor: Tensor) -> list[Tensor]:
        """What all have brought to their exchange number `turn`."""
        self.brought.setdefault(turn, [None] * self.count)[shard] = tensor.detach().clone(
            memory_format=torch.contiguous_format
        )
        chance = RandomState()
        self._pass_on(shard)
        self.turns[shard].acquire()
        chance.recall()
        self.brought.pop(turn - 1, None)  # whoever is here has read the one before
        found = [brought for brought in self.brought[turn] if brought is not None]
        if self.failed is not None or len(found) < self.count:
            raise RunError("the shards of a stage did not exchange the same tensors")
        return found


class InProcessTensorGroup(TensorGroup):
    """TensorGroup that take turns in one process."""

    def __init__(self, me: int, baton: Baton):
        super().__init__(me, baton.count)
        self.baton, self.turn = baton, 0

    def everyone(self, tensor: Tensor) -> list[Tensor]:
        self.turn += 1
        return self.baton.everyone(self.me, self.turn, tensor)


class PartsInOneProcess(Part):
    """All stages of a replica, and all shards of each."""

    def __init__(self, model: nn.Module, spec: PartSpec):
        assert spec.cut.shards is not None
        self.spec, self.cut, self.mesh = spec, spec.cut, spec.mesh
        self.shards, self.baton = spec.cut.shards, Baton(spec.cut.shards.count)
        self.parts = [
            Part(
                model,
                replace(spec, mesh=alone(), peers=InProcessTensorGroup(shard, self.baton)),
            )
            for shard in range(self.baton.count)
        ]
        self.numbers = self.parts[0].numbers
        owned = self.parts[0].owned()
        self.whole = {
            name: nn.Parameter(p.detach()) for name, p in model.named_parameters() if name in owned
        }
        self.scale = self.parts[0].scale
        self.busy = self.total = 0.0
        self.steps = 0
        self.loss = None

    def train(self, mode: bool = True) -> None:
        for part in self.parts:
            part.train(mode)

    def parameters(self) -> Iterator[tuple[int, str, str, nn.Parameter]]:
        for stage in self.numbers:
            for name in self.cut.owned(stage):
                yield stage, name, name, self.whole[name]

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for part in self.parts:
            yield from part.named_buffers()

    def overflowed(self) -> None:
        for part in self.parts:
            part.overflowed()

    def load_scale(self, state: Tensor | None) -> None:
        for part in self.parts:
            part.load_scale(state)

    def compute(self, lease: Lease) -> None:
        self._hand_out()
        self.baton.run([partial(part.compute, lease) for part in self.parts])
        self._put_together()
        self.steps += 1
        self.loss = self.parts[0].loss
        self.busy, self.total = self.parts[0].busy, self.parts[0].total

    @torch.no_grad()
    def _hand_out(self) -> None:
        """To every shard its part of the parameters, which may have changed."""
        for shard, part in enumerate(self.parts):
            for _, _, name, parameter in part.parameters():
                parameter.copy_(self.shards.own(name, self.whole[name], shard))

    @torch.no_grad()
    def _put_together(self) -> None:
        """From every shard its part of the gradients; where all have the whole, from the first."""
        for whole in self.whole.values():
            whole.grad = None
        for shard, part in enumerate(self.parts):
            for name, parameter in part.owned().items():
                whole = self.whole[name]
                if parameter.grad is None or (shard and name not in self.shards.dims):
                    continue
                if whole.grad is None:
                    whole.grad = torch.zeros_like(whole)
                self.shards.own(name, whole.grad, shard).copy_(parameter.grad)


# ---------------------------------------------------------------- a plan tried out


def check(cut: Cut, model: nn.Module, sample: Any) -> None:
    """Refuse a plan with which the model gives something else, or gradients that are wrong."""
    with tried(model) as own:
        _check(cut, own, sample)


def _check(cut: Cut, model: nn.Module, sample: Any) -> None:
    assert cut.shards is not None
    whole = _Trial(cut, model)
    whole(sample)
    baton = Baton(cut.shards.count)
    trials = [
        _Trial(cut, model, InProcessTensorGroup(shard, baton)) for shard in range(baton.count)
    ]
    try:
        baton.run([partial(trial, sample) for trial in trials])
    except Exception as error:
        raise ConfigError(
            f"with {ANNOTATION} {type(model).__name__} fails ({type(error).__name__}: {error}): "
            "between a 'column' and the 'row' after it a process has only its part of the last "
            "dimension, so write -1 for the number of heads, or 'gathered' instead of 'column'"
        ) from error
    if not all(near(whole.outputs, trial.outputs) for trial in trials):
        raise ConfigError(
            f"with {ANNOTATION} {type(model).__name__} does not give what the whole model gives: "
            "after a 'column' only what works on each number by itself may come before the 'row'; "
            "otherwise write 'gathered'"
        )
    first = trials[0].gradients()
    for trial in trials[1:]:
        for name, gradient in trial.gradients().items():
            if name not in cut.shards.dims and not _same(first[name], gradient):
                raise ConfigError(
                    f"{name} is used between a 'column' and a 'row', where each process knows a "
                    "part of its gradient alone: write 'gathered' for the 'column' before it"
                )


class _Trial:
    """One pass there and back over all stages, without chance."""

    def __init__(self, cut: Cut, model: nn.Module, peers: TensorGroup | None = None):
        self.cut = cut
        self.stages = [cut.stage(model, number) for number in range(cut.stages)]
        for stage in self.stages:
            stage.eval()
            if peers is not None:
                assert cut.shards is not None
                share(stage, cut.shards, peers)
        self.outputs: list[Tensor] = []

    def __call__(self, sample: Any) -> None:
        value = sample
        for stage in self.stages:
            value = stage(value)
        taught = [tensor for tensor in tensors(value) if tensor.requires_grad]
        seeds = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape) for t in taught]
        if taught:
            torch.autograd.backward(taught, seeds)
        self.outputs = [tensor.detach() for tensor in tensors(value)]

    def gradients(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {}
        for stage, held in zip(self.stages, self.cut.held, strict=True):
            mine = dict(stage.named_parameters())
            found |= {one.name: mine[one.here].grad for one in held}
        return found


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
