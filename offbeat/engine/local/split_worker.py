"""How the processes of a worker are made where a replica is split over several."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from offbeat.config.job import Job, WorkerMemory
from offbeat.config.units import AS_FAST_AS_CAN_BE, LeastTime
from offbeat.engine.local.group_memory import MemberMemory, ShardMemberMemory
from offbeat.engine.local.pipeline_group import PipelineMember, PipelineSender
from offbeat.engine.local.replica_group import LEADER, GroupMember, ReplicaGroup, SplitSender
from offbeat.model.device import Device
from offbeat.split.async_pipeline import AsyncPipeline
from offbeat.split.channel import Mesh
from offbeat.split.part import PartSpec
from offbeat.split.passes import ready_for_halves
from offbeat.split.plan.cut import Cut
from offbeat.split.replica import PartReplica
from offbeat.split.tensor_group import ProcessTensorGroup
from offbeat.split.wait_notes import WaitNotes
from offbeat.store.slot import Slot
from offbeat.store.store import Store
from offbeat.worker.send import Sender
from offbeat.worker.worker import Worker


def prepare(cut: Cut) -> None:
    """In the launcher: what would else be done in each of its processes, and in the first step."""
    if cut.layout.schedule == "zero-bubble":
        ready_for_halves()


@dataclass(frozen=True)
class SplitWorker:
    """How the processes of one worker are made: its job, where it is cut, and its slot."""

    job: Job
    cut: Cut
    slot: Slot
    wait_notes: WaitNotes
    buffers: Mapping[str, Tensor]  # what they begin with, looked at when the worker has joined
    least: LeastTime = AS_FAST_AS_CAN_BE

    def group(self, number: int, wire: socket.socket, threads: int) -> ReplicaGroup:
        """In the leader: fork the others, who have no use for its wire to the server."""

        def share(process: int, mesh: Mesh) -> GroupMember:
            if process != LEADER:
                wire.close()
            return self.share(process, mesh, self.job.content.devices.of(number, process))

        layout = self.cut.layout
        return ReplicaGroup(layout.pp * layout.tp, share, f"offbeat {number}", threads)

    def share(self, process: int, mesh: Mesh, device: Device) -> GroupMember:
        """In each process: what it has of the replica."""
        device.enter()
        share = self._share(replace(self.spec(process, mesh), device=device))
        mesh.subscribe(self.wait_notes.writer(process, lambda: share.steps))
        return share

    def spec(self, process: int, mesh: Mesh) -> PartSpec:
        content = self.job.content
        return PartSpec(self.cut, process, mesh, content.reader, content.loss, self.least)

    def _share(self, spec: PartSpec) -> GroupMember:
        job, cut, mesh = self.job, self.cut, spec.mesh
        tables = cut.tables_of(cut.stages_of(spec.process))
        own_memory = MemberMemory(self.slot, tables)
        if cut.shards is not None:
            peers = ProcessTensorGroup(mesh, cut.peers_of(spec.process))
            spec = replace(spec, peers=peers)
            own_memory = ShardMemberMemory(self.slot, tables, cut.shards, peers.me)
        own = job.discipline.send.centre  # its parameters are not what it pulls
        if self.cut.layout.asynchronous:
            return PipelineMember(
                partial(self._flowing, spec, own_memory), own_memory, job.skips, mesh
            )

        def make() -> Sender:
            replica = job.make_part(spec, None if own else own_memory.incoming(0))
            replica.load_buffers(self.buffers)
            replica.borrow(self.slot.incoming[0])
            return job.make_sender(replica, own_memory.outgoing())

        return GroupMember(make, own_memory, job.skips)

    def _flowing(self, spec: PartSpec, own_memory: MemberMemory) -> Sender:
        flow = AsyncPipeline(self.job.content.model, spec, self.slot.incoming, self.slot.outgoing)
        tables = [flat.table for flat in own_memory.incoming(0)]
        replica = PartReplica(flow, tables, own_memory.incoming(0))
        replica.load_buffers(self.buffers)
        return self.job.make_sender(replica, own_memory.outgoing())

    def make(
        self, group: ReplicaGroup, store: Store, number: int, incarnation: int, place: WorkerMemory
    ) -> Worker:
        """In the leader: a worker of an incarnation."""
        kind = PipelineSender if self.cut.layout.asynchronous else SplitSender
        return self.job.worker_of(store, number, incarnation, kind(group, self.slot))
