"""A worker whose leases flow through an asynchronous pipeline: its team, and its loop."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.contribution import Snapshot
from offbeat.engine.bench import Bench
from offbeat.engine.team import (
    LEADER,
    Answer,
    Orders,
    Run,
    Share,
    SplitSender,
    Team,
)
from offbeat.lease import Lease
from offbeat.link.base import Over, Refused
from offbeat.link.memory import Slot
from offbeat.link.mesh import Mesh, Parted, Tag
from offbeat.link.shared import SharedLink
from offbeat.loop import Loop
from offbeat.replica.flow import Flow, Made
from offbeat.send import Sender
from offbeat.store.table import Flat
from offbeat.worker import Cycle, StreamWorker

MADE: Tag = ("made", 0, 0)


class FlowShare(Share):
    """A process's share in such a worker: its stage, through which leases flow."""

    def __init__(self, make: Callable[[], Sender], bench: Bench, skips: bool, mesh: Mesh):
        super().__init__(make, bench, skips)
        self.mesh = mesh

    @property
    def flow(self) -> Flow:
        part = self.replica.part
        assert isinstance(part, Flow)
        return part

    def obey(self, order: Orders) -> Answer:
        if not isinstance(order, Run):
            return super().obey(order)
        self.flow.run(self._tell)
        return Answer()

    def _tell(self, made: Made) -> None:
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


class FlowSender(SplitSender):
    """The leader's sender: the gradient of the lease that came through last lies in the slot."""

    def __init__(self, team: Team, slot: Slot, still: bool = False):
        super().__init__(team, slot, still)
        team.start(Run())
        assert isinstance(team.share, FlowShare)
        self.flow = team.share.flow
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
            told = [mine, *(self._hear(process) for process in self.team.children)]
        except Parted:
            self.team.end()
        assert all(made.sequence == begun.sequence for made in told)
        self.out = self.slot.outgoing[begun.sequence % len(self.slot.outgoing)]
        self.absent = frozenset(name for made in told for name in made.absent)
        self.all_finite = all(made.finite for made in told)
        return begun, next(made.loss for made in told if made.loss is not None)

    def _hear(self, process: int) -> Made:
        told, named = self.team.mesh.receive(process, MADE)
        for name, buffer in named.items():
            if name in self.slot.statistics.views:
                self.slot.statistics.views[name].copy_(buffer)
        return Made(*told)

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
            self.team.end()
        self.team.answers()

    def retire(self) -> None:
        self.stop()


class FlowLoop(Loop):
    """Lets leases in while others are under way; the oldest goes out when it is through."""

    def __init__(self, link: SharedLink, worker: StreamWorker, cycle: Cycle, seed: int):
        super().__init__(link, worker, cycle, seed)
        assert isinstance(worker.sender, FlowSender)
        self.stream, self.sender = worker, worker.sender
        self.depth = len(link.slot.outgoing)
        self.wire = link
        link.begun = []

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
        except (Over, Refused):
            self.sender.stop()
            raise

    def _fill(self) -> None:
        while len(self.sender.under_way) < self.depth:
            lease = self.link.lease()
            if lease is None:
                return
            self.sender.let_in(lease, self.worker.base)
            assert self.wire.begun is not None
            self.wire.begun.append(lease)

    def _oldest_out(self) -> None:
        since = time.perf_counter()
        begun, loss = self.sender.oldest()
        self.stream.ready(begun.lease, loss, begun.base)
        assert self.wire.begun is not None
        if begun.lease in self.wire.begun:
            self.wire.begun.remove(begun.lease)
        ended = time.perf_counter()
        self.timing.compute += ended - since
        self._put(ended)
        self._push()
        self.wire.begun = []
        self._pull()
