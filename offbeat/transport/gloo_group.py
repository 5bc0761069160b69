"""Workers on one machine that are connected by gloo."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from offbeat.transport.group import Addition, Group, add_up
from offbeat.transport.group_keys import Keys


class GlooGroup(Group):
    """A group over gloo: one that is left goes on until gloo gives up, with memory of its own.

    One that ended while the interpreter does would take the process with it.
    """

    def __init__(self, number: int, members: Sequence[int], me: int, keys: Keys):
        super().__init__(number, members, me)
        self.keys = keys
        self.gloo: Any = None

    def _connect(self) -> None:
        self.gloo = self.keys.connect(self.number, self.rank, len(self.members))

    def _close(self) -> None:
        self.keys.close()

    @torch.no_grad()
    def _add(self, what: Addition) -> None:
        """gloo's own all-reduce moves as many bytes, but the order in which it adds depends on the
        place in the buffer, so that no store and no replay could arrive at the same bits.
        """
        count, size, give, get = len(self.members), what.give.numel(), what.give, what.get
        chunk = -(-size // count)
        sizes = [max(0, min(chunk, size - rank * chunk)) for rank in range(count)]
        room = get if chunk * count == size else give.new_empty(chunk * count)
        mine = sizes[self.rank]
        self.gloo.alltoall_base(
            room[: mine * count], give, [mine] * count, sizes, dist.AllToAllOptions()
        ).wait()
        total = give.new_zeros(chunk)
        add_up(total[:mine], [room[r * mine : (r + 1) * mine] for r in range(count)], what)
        self.gloo._allgather_base(room, total).wait()
        if room is not get:
            get.copy_(room[:size])
