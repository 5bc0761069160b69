"""A layout settled for one model: which stage has which blocks, and which process has which stages.

A parameter that is tied over several stages belongs to the first of them: there the gradients of
all are summed, and under that stage the store holds it.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor, nn

from offbeat.split.layout import Layout
from offbeat.split.plan.blocks import Block
from offbeat.split.stages import Stage
from offbeat.split.tensor_shards import Shards


@dataclass(frozen=True)
class ProcessTensors:
    """A trainable parameter in a stage: its name there, its name in the store, and its owner."""

    here: str
    name: str
    owner: int  # a stage


@dataclass(frozen=True)
class Cut:
    """Where the model is cut: `starts` are the numbers of the first block of each stage."""

    layout: Layout
    blocks: tuple[Block, ...]
    starts: tuple[int, ...]
    held: tuple[tuple[ProcessTensors, ...], ...]  # of each stage
    predicted: tuple[float, float] | None = None  # seconds of a step, and the idle share
    shards: Shards | None = None  # what the processes of a stage share, if they are several

    @classmethod
    def of(
        cls, layout: Layout, model: nn.Module, blocks: Sequence[Block], starts: Sequence[int]
    ) -> "Cut":
        names = {id(p): name for name, p in model.named_parameters()}
        owners: dict[str, int] = {}
        held = []
        for stage, (first, last) in enumerate(pairwise([*starts, len(blocks)])):
            mine = []
            for here, parameter in Stage(model, blocks[first:last]).named_parameters():
                if parameter.requires_grad:
                    name = names[id(parameter)]
                    mine.append(ProcessTensors(here, name, owners.setdefault(name, stage)))
            held.append(tuple(mine))
        split = tuple(blocks[start].name for start in starts[1:])
        named = replace(layout, split=split) if split else layout
        return cls(named, tuple(blocks), tuple(starts), tuple(held))

    @property
    def stages(self) -> int:
        return len(self.starts)

    def process_of(self, stage: int, shard: int = 0) -> int:
        """Which process of a replica has this stage, or its `shard` of it."""
        return stage % self.layout.pp * self.layout.tp + shard

    def place_of(self, process: int) -> tuple[int, int]:
        """A process's place among those that follow each other, and its shard of its stages."""
        return divmod(process, self.layout.tp)

    def stages_of(self, process: int) -> list[int]:
        return list(range(self.place_of(process)[0], self.stages, self.layout.pp))

    def peers_of(self, process: int) -> list[int]:
        """The processes that share the stages of this one, itself among them."""
        first = self.place_of(process)[0] * self.layout.tp
        return list(range(first, first + self.layout.tp))

    def owned(self, stage: int) -> list[str]:
        """What the store holds under this stage."""
        return [held.name for held in self.held[stage] if held.owner == stage]

    def borrowed(self, stage: int) -> list[ProcessTensors]:
        """Parameters of this stage that belong to an earlier one."""
        return [held for held in self.held[stage] if held.owner != stage]

    def borrowers(self, stage: int) -> list[tuple[str, int]]:
        """Parameters that this stage owns, with each later stage that has them too."""
        return [
            (held.name, later)
            for later in range(stage + 1, self.stages)
            for held in self.borrowed(later)
            if held.owner == stage
        ]

    def ties(self) -> list[str]:
        """Parameters that several stages have."""
        return sorted({held.name for stage in range(self.stages) for held in self.borrowed(stage)})

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The store's tables: one for each stage that owns anything."""
        found = [tuple(self.owned(stage)) for stage in range(self.stages)]
        return tuple(names for names in found if names)

    def tables_of(self, stages: Sequence[int]) -> list[int]:
        """The numbers of the tables that hold what these stages own."""
        owning = [stage for stage in range(self.stages) if self.owned(stage)]
        return [number for number, stage in enumerate(owning) if stage in stages]

    def stage(self, model: nn.Module, number: int, buffers_of: Stage | None = None) -> Stage:
        """A stage with modules and parameters of its own over the model's memory.

        Of its own, because two stages may share a module, and a gradient must be known by stage.
        With `buffers_of` the buffers are those of another copy of this stage.
        """
        ends = [*self.starts, len(self.blocks)]
        whole = Stage(model, self.blocks[ends[number] : ends[number + 1]])
        memo: dict[int, Tensor] = {
            id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
            for p in whole.parameters()
        }
        if buffers_of is not None:
            theirs = dict(buffers_of.named_buffers())
            memo |= {id(b): theirs[name] for name, b in whole.named_buffers()}
        return copy.deepcopy(whole, memo)
