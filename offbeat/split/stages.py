"""A model in parts: stages that hold only their own blocks, under the names of the whole model."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.data.random_state import RandomState
from offbeat.errors import ConfigError
from offbeat.model.copies import tried
from offbeat.split.plan.blocks import ANNOTATION, Block, Tie
from offbeat.split.tree import mapped, tensors

# Of the last digits: a model in parts may add up in another order than the whole.
CLOSE = 1e-4


class Stage(nn.Module):
    """Some consecutive blocks of a model; their tensors are the model's own, not copies.

    `state_dict` and `named_parameters` have the names of the whole model.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]):
        super().__init__()
        self.blocks = tuple(blocks)
        kept = sorted({use for block in self.blocks for use in block.uses})
        part = pruned(model, kept)
        self.training = part.training
        # The part's tensors and modules are the stage's own, so that no name gets a prefix. The
        # part itself is kept out of the registered modules for the same reason.
        self._modules, self._parameters, self._buffers = (
            part._modules,
            part._parameters,
            part._buffers,
        )
        self._non_persistent_buffers_set = part._non_persistent_buffers_set
        self._part = (part,)

    def forward(self, value: Any) -> Any:
        """What the blocks make of `value`, one after the other."""
        for block in self.blocks:
            value = run(block, self._part[0], value)
        return value

    def train(self, mode: bool = True) -> "Stage":
        super().train(mode)
        # Methods of the model may ask for its mode.
        for module in self._part[0].modules():
            module.training = mode
        return self


def cut(model: nn.Module, blocks: Sequence[Block], starts: Sequence[int]) -> list[Stage]:
    """The stages whose first blocks have the numbers `starts`, of which the first is 0."""
    return [Stage(model, blocks[first:last]) for first, last in pairwise([*starts, len(blocks)])]


def tied_across(found: Sequence[Tie], starts: Sequence[int]) -> list[tuple[Tie, tuple[int, ...]]]:
    """Ties whose blocks are in several stages, with the numbers of these stages."""
    across = []
    for tie in found:
        held = sorted({sum(start <= block for start in starts) - 1 for block in tie.blocks})
        if len(held) > 1:
            across.append((tie, tuple(held)))
    return across


def run(block: Block, model: nn.Module, value: Any) -> Any:
    """Run a block; a module that it does not say it uses is named in the error."""
    try:
        return block.run(model, value)
    except AttributeError as error:
        if block.step is None or error.obj is not model.get_submodule(block.owner):
            raise
        raise ConfigError(
            f"the block {block.name!r} uses {error.name!r}, which {ANNOTATION} does not give it: "
            f"add {error.name!r} to its brackets"
        ) from error


def pruned(module: nn.Module, kept: Sequence[str], name: str = "") -> nn.Module:
    """A copy of the tree of modules with only the branches `kept`; tensors are shared."""
    if name in kept:
        return module
    part = type(module).__new__(type(module))
    part.__dict__.update(module.__dict__)
    part._modules = {
        key: pruned(child, kept, f"{name}.{key}" if name else key)
        for key, child in module._modules.items()
        if child is not None and _leads(f"{name}.{key}" if name else key, kept)
    }
    mine = {
        key: f"{name}.{key}" if name else key for key in [*module._parameters, *module._buffers]
    }
    part._parameters = {k: v for k, v in module._parameters.items() if mine[k] in kept}
    part._buffers = {k: v for k, v in module._buffers.items() if mine[k] in kept}
    part._non_persistent_buffers_set = module._non_persistent_buffers_set & set(part._buffers)
    return part


def _leads(name: str, kept: Sequence[str]) -> bool:
    return any(use == name or use.startswith(f"{name}.") for use in kept)


def check_same(model: nn.Module, blocks: Sequence[Block], sample: Any) -> None:
    """Refuse blocks that, run one after the other, are another function than the model."""
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return  # these have no forward to compare with
    # Without dropout and without statistics that move, both are functions of the sample.
    with tried(model) as own, torch.no_grad():
        own.eval()
        drawn = RandomState()
        # Copies, for blocks that write in place.
        wanted = list(tensors(own(mapped(Tensor.clone, sample))))
        drawn.recall()  # some draw in evaluation mode too
        value = mapped(Tensor.clone, sample)
        for stage in cut(own, blocks, range(len(blocks))):
            value = stage(value)
        found = list(tensors(value))
    if not near(wanted, found):
        raise ConfigError(
            f"the blocks of {type(model).__name__}, run one after the other, do not give what the "
            f"model gives: correct {ANNOTATION}, whose blocks each take what the one before returns"
        )


def near(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal but for the last digits."""
    return [t.shape for t in wanted] == [t.shape for t in found] and all(_near(wanted, found))


def _near(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> Iterator[bool]:
    for one, other in zip(wanted, found, strict=True):
        largest = one.abs().max().item() if one.numel() else 0.0
        yield torch.allclose(one, other, rtol=CLOSE, atol=CLOSE * largest, equal_nan=True)
