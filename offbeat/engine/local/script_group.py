"""A worker of several processes whose leader runs a script: its loss lies between two halves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from offbeat.config.job import WorkerMemory
from offbeat.engine.local.replica_group import (
    Back,
    Backward,
    Finish,
    Forward,
    GroupAnswer,
    GroupMember,
    GroupOrders,
    Halves,
    ReplicaGroup,
    SplitSender,
    Start,
)
from offbeat.engine.local.split_worker import SplitWorker
from offbeat.log.records import Settings
from offbeat.split.channel import Mesh
from offbeat.split.part import PartSpec
from offbeat.split.passes import Gradients
from offbeat.split.script_replica import Asked, ScriptReplica
from offbeat.store.store import Store
from offbeat.worker.contribution import Snapshot
from offbeat.worker.worker import NumberWorker


class ScriptMember(GroupMember):
    """One process's share, which also makes the halves of a step.

    In the leader `given` is what the script gave, and `made` what it gets for that.
    """

    given: Any = None
    made: Sequence[Any] = ()

    def obey(self, order: GroupOrders) -> GroupAnswer:
        if not isinstance(order, Halves):
            return super().obey(order)
        assert self.sender is not None
        replica = self.replica
        assert isinstance(replica, ScriptReplica)
        if isinstance(order, Start):
            self.sender.begin()
        elif isinstance(order, Finish):
            self.sender.set(order.settings)
            self.sender.finish()
        elif isinstance(order, Back):
            self.sender.back_to_version()
        elif isinstance(order, Forward):
            self.made = replica.forward(order.asked, self.given)
        else:
            self.made = replica.backward(self.given or ())
        return GroupAnswer()


class ScriptSender(SplitSender):
    """The leader's sender under a script's own loop."""

    settings: Settings | None = None

    def begin(self) -> None:
        self.group.tell(Start())

    def set(self, settings: Settings | None) -> None:
        self.settings = settings

    def finish(self) -> None:
        # Done by all before the script goes on: it may write what the others would read only then.
        self.group.ask(Finish(self.settings))

    def back_to_version(self) -> None:
        if not self.group.asking:  # else an error in a pass has ended the loop, and nobody listens
            self.group.ask(Back())

    def accept(self, snapshot: Snapshot) -> None:
        self.group.ask(self.accepting(snapshot))

    def forward(self, asked: Asked, inputs: Any) -> list[Any]:
        """A batch through all stages: the outputs of its microbatches."""
        self.replica.reclaim()  # before any of them looks there
        return self._made(Forward(asked), inputs)

    def backward(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """And back again: the gradients of its inputs, by microbatch."""
        return self._made(Backward(), gradients)

    def _made(self, order: GroupOrders, given: Any) -> list[Any]:
        share = self.group.share
        assert isinstance(share, ScriptMember)
        share.given = given
        self.group.ask(order)
        found, share.given, share.made = list(share.made), None, ()
        return found


@dataclass(frozen=True)
class ScriptSplitWorker(SplitWorker):
    """How the processes of one worker are made where a script computes the loss."""

    script: nn.Module | None = None

    def spec(self, process: int, mesh: Mesh) -> PartSpec:
        return replace(super().spec(process, mesh), script=self.script)

    def _share(self, spec: PartSpec) -> GroupMember:
        plain = super()._share(spec)
        return ScriptMember(plain.make, plain.own_memory, plain.skips)

    def make(
        self, group: ReplicaGroup, store: Store, number: int, incarnation: int, place: WorkerMemory
    ) -> NumberWorker:
        return self.job.worker_of(store, number, incarnation, ScriptSender(group, self.slot))
