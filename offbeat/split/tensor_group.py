"""How the processes that share a stage come to the same tensors: everyone hears from everyone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from offbeat.data.random_state import RandomState, seed_all
from offbeat.split.channel import Mesh, Tag

SHARED: Tag = ("shard", 0, 0)


class TensorGroup:
    """The processes that share a stage, in the order of their shards; `me` is one of them."""

    def __init__(self, me: int, count: int):
        self.me, self.count = me, count
        self.chance: RandomState | None = None  # what goes on where all are whole again

    def part(self) -> None:
        """What follows is in parts, and each of them has random numbers of its own."""
        if self.chance is None:
            seed = int(torch.randint(1 << 62, ()))  # of what all have in common
            self.chance = RandomState()
            seed_all(seed + self.me)

    def meet(self) -> None:
        """What follows is whole, and chance is equal everywhere."""
        if self.chance is not None:
            self.chance.recall()
        self.chance = None

    def everyone(self, tensor: Tensor) -> list[Tensor]:
        """What each of them has brought, in their order; all of them call it at the same time."""
        raise NotImplementedError

    def total(self, tensor: Tensor) -> Tensor:
        """The sum of what each has brought: added up in their order, so it is equal everywhere."""
        first, *others = self.everyone(tensor)
        found = first.clone()
        for other in others:
            found += other
        return found

    def joined(self, tensor: Tensor) -> Tensor:
        """What each has brought, side by side along the last dimension."""
        return torch.cat(self.everyone(tensor), dim=-1)


class ProcessTensorGroup(TensorGroup):
    """Of processes of their own: `processes` are their numbers in the mesh."""

    def __init__(self, mesh: Mesh, processes: Sequence[int]):
        super().__init__(list(processes).index(mesh.me), len(processes))
        self.mesh, self.processes = mesh, list(processes)

    def everyone(self, tensor: Tensor) -> list[Tensor]:
        # In one piece everywhere: how a tensor lies in memory may change the bits of a product.
        mine = tensor.detach().contiguous()
        others = [process for process in self.processes if process != self.mesh.me]
        for process in others:
            self.mesh.send(process, SHARED, mine)
        return [
            mine if process == self.mesh.me else self._heard(process, mine.device)
            for process in self.processes
        ]

    def _heard(self, process: int, device: torch.device) -> Tensor:
        heard: Tensor = self.mesh.receive(process, SHARED)
        return heard.to(device)
