"""A worker whose leases flow through an asynchronous pipeline: its processes, and its loop."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.data.lease import Lease
from offbeat.engine.local.group_memory import MemberMemory
from offbeat.engine.local.replica_group import (
    LEADER,
    GroupAnswer,
    GroupMember,
    GroupOrders,
    ReplicaGroup,
    RunPipeline,
    SplitSender,
)
from offbeat.model.table import Flat
from offbeat.protocol.cycle import Cycle
from offbeat.split.async_pipeline import AsyncPipeline, PipelineResult
from offbeat.split.channel import Mesh, Parted, Tag
from offbeat.store.slot import Slot
from offbeat.transport.link import GivenUp, RunOver
from offbeat.worker.client import StoreClient
from offbeat.worker.contribution import Snapshot
from offbeat.worker.loop import Loop
from offbeat.worker.send import Sender
from offbeat.worker.worker import StreamWorker

MADE: Tag = ("made", 0, 0)


class PipelineMember(GroupMember):
    """A process's share in such a worker: its stage, through which leases flow."""

    def __init__(
        self, make: Callable[[], Sender], own_memory: MemberMemory, skips: bool, mesh: Mesh
    ):
        super().__init__(make, own_memory, skips)
        self.mesh = mesh

    @property
    def flow(self) -> AsyncPipeline:
        part = self.replica.part
        assert isinstance(part, AsyncPipeline)
        return part

    def obey(self, order: GroupOrders) -> GroupAnswer:
        if not isinstance(order, RunPipeline):
            return super().obey(order)
        self.flow.run(self._tell)
        return GroupAnswer()

    def _tell(self, made: PipelineResult) -> None:
        """To the leader, with the statistics as they are now: the slot is the leader's to write."""
        named = {name: b.clone() for name, b in self.replica.named_buffers()}
        told = [made.sequence, made.loss, made.absent, made.finite]
        self.mesh.send(LEADER, MADE, [told, named])


@dataclass
class _Begun:
    """A lease under way."""

    sequence: int
    lease: Lease
    base: int


class PipelineSender(SplitSender):
    """The leader's sender: the gradient of the lease that came through last lies in the slot."""

    def __init__(self, group: ReplicaGroup, slot: Slot, still: bool = False):
        super().__init__(group, slot, still)
        group.start(RunPipeline())
        assert isinstance(group.share, PipelineMember)
        self.flow = group.share.flow
        self.place = 0
        self.count = 0  # leases let in
        self.under_way: deque[_Begun] = deque()
        self.running = True

    def accept(self, snapshot: Snapshot) -> None:
        self.place = self.place_of(snapshot)

    def let_in(self, lease: Lease, base: int) -> None:
        out = self.count % len(self.slot.outgoing)
        self.flow.put(self.count, lease, self.place, out)
        self.under_way.append(_Begun(self.count, lease, base))
        self.count += 1

    def oldest(self) -> tuple[_Begun, float]:
        """Make passes until the oldest lease is through; returns it and its loss."""
        begun = self.under_way.popleft()
        try:
            mine = None
            while mine is None:
                mine = self.flow.advance()
            told = [mine, *(self._hear(process) for process in self.group.children)]
        except Parted:
            self.group.end()
        assert all(made.sequence == begun.sequence for made in told)
        self.out = self.slot.outgoing[begun.sequence % len(self.slot.outgoing)]
        self.absent = frozenset(name for made in told for name in made.absent)
        self.all_finite = all(made.finite for made in told)
        return begun, next(made.loss for made in told if made.loss is not None)

    def _hear(self, process: int) -> PipelineResult:
        told, named = self.group.mesh.receive(process, MADE)
        for name, buffer in named.items():
            if name in self.slot.statistics.views:
                self.slot.statistics.views[name].copy_(buffer)
        return PipelineResult(*told)

    def payload(self) -> list[Flat]:
        return self.out

    def turn(self) -> None:
        """Every lease has a place of its own."""

    def stop(self) -> None:
        """Bring back what is inside, for nobody, and wait for orders again."""
        if not self.running:
            return
        self.running = False
        while self.under_way:
            self.oldest()
        try:
            self.flow.drain(ending=True)
        except Parted:
            self.group.end()
        self.group.answers()

    def retire(self) -> None:
        self.stop()


class PipelineLoop(Loop):
    """Lets leases in while others are under way; the oldest goes out when it is through."""

    def __init__(
        self, client: StoreClient, worker: StreamWorker, cycle: Cycle, seed: int, depth: int
    ):
        """`depth` is how many leases are under way at once."""
        super().__init__(client, worker, cycle, seed)
        assert isinstance(worker.sender, PipelineSender)
        self.stream, self.sender, self.depth = worker, worker.sender, depth
        self.begun = client.begun
        self.begun.clear()

    def run(self) -> None:
        try:
            self._pull()
            while True:
                self._fill()
                if not self.sender.under_way:
                    self._rest()
                    self._pull()
                    continue
                self._oldest_out()
        except (RunOver, GivenUp):
            self.sender.stop()
            raise

    def _fill(self) -> None:
        while len(self.sender.under_way) < self.depth:
            lease = self.client.lease()
            if lease is None:
                return
            self.sender.let_in(lease, self.worker.base)
            self.begun.append(lease)

    def _oldest_out(self) -> None:
        since = time.perf_counter()
        begun, loss = self.sender.oldest()
        self.stream.ready(begun.lease, loss, begun.base)
        if begun.lease in self.begun:
            self.begun.remove(begun.lease)
        ended = time.perf_counter()
        self.timing.compute += ended - since
        self._put(ended)
        self._push()
        self.begun.clear()
        self._pull()
