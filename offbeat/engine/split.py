"""How the processes of a worker are made where a replica is split over several."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from offbeat.choices import Elastic
from offbeat.engine.bench import Bench, ShardBench
from offbeat.engine.flow import FlowSender, FlowShare
from offbeat.engine.team import LEADER, Share, SplitSender, Team
from offbeat.job import Job, Numbers, Place
from offbeat.layout.cut import Cut
from offbeat.link.memory import Slot
from offbeat.link.mesh import Mesh
from offbeat.link.peers import MeshPeers
from offbeat.link.posts import Posts
from offbeat.replica.flow import Flow
from offbeat.replica.part import Seat
from offbeat.replica.passes import ready_for_halves
from offbeat.replica.split import PartReplica
from offbeat.send import Sender
from offbeat.store.core import Store
from offbeat.worker import Worker


def prepare(cut: Cut) -> None:
    """In the launcher: what would else be done in each of its processes, and in the first step."""
    if cut.layout.schedule == "zero-bubble":
        ready_for_halves()


@dataclass(frozen=True)
class SplitReplica:
    """How the processes of one worker are made: its job, where it is cut, and its slot."""

    job: Job
    cut: Cut
    slot: Slot
    posts: Posts
    buffers: Mapping[str, Tensor]  # what they begin with, looked at when the worker has joined
    least: float = 0.0

    def team(self, number: int, wire: socket.socket, threads: int) -> Team:
        """In the leader: fork the others, who have no use for its wire to the server."""

        def share(process: int, mesh: Mesh) -> Share:
            if process != LEADER:
                wire.close()
            return self.share(process, mesh)

        layout = self.cut.layout
        return Team(layout.pp * layout.tp, share, f"offbeat {number}", threads)

    def share(self, process: int, mesh: Mesh) -> Share:
        """In each process: what it has of the replica."""
        share = self._share(process, mesh)
        mesh.waits = self.posts.writer(process, lambda: share.steps)
        return share

    def seat(self, process: int, mesh: Mesh) -> Seat:
        content = self.job.content
        assert isinstance(content, Numbers)
        return Seat(self.cut, process, mesh, content.reader, content.loss, self.least)

    def _share(self, process: int, mesh: Mesh) -> Share:
        job, seat, cut = self.job, self.seat(process, mesh), self.cut
        tables = cut.tables_of(cut.stages_of(process))
        bench = Bench(self.slot, tables)
        if cut.shards is not None:
            peers = MeshPeers(mesh, cut.peers_of(process))
            seat = replace(seat, peers=peers)
            bench = ShardBench(self.slot, tables, cut.shards, peers.me)
        own = isinstance(job.discipline.send, Elastic)  # its parameters are not what it pulls
        if self.cut.layout.asynchronous:
            return FlowShare(partial(self._flowing, seat, bench), bench, job.skips, mesh)

        def make() -> Sender:
            replica = job.make_part(seat, None if own else bench.incoming(0))
            replica.load_buffers(self.buffers)
            replica.borrow(self.slot.incoming[0])
            return job.make_sender(replica, bench.outgoing())

        return Share(make, bench, job.skips)

    def _flowing(self, seat: Seat, bench: Bench) -> Sender:
        assert isinstance(self.job.content, Numbers)
        flow = Flow(self.job.content.model, seat, self.slot.incoming, self.slot.outgoing)
        tables = [flat.table for flat in bench.incoming(0)]
        replica = PartReplica(flow, tables, bench.incoming(0))
        replica.load_buffers(self.buffers)
        return self.job.make_sender(replica, bench.outgoing())

    def make(self, team: Team, store: Store, number: int, incarnation: int, place: Place) -> Worker:
        """In the leader: a worker of an incarnation."""
        kind = FlowSender if self.cut.layout.asynchronous else SplitSender
        return self.job.worker_of(store, number, incarnation, kind(team, self.slot))
