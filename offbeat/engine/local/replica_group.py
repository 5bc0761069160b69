"""A worker that is several processes: the leader talks to the store, the others do as it says."""

import os
import resource
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import msgspec
from torch import Tensor

from offbeat.data.lease import Lease
from offbeat.engine.local.group_memory import MemberMemory
from offbeat.engine.local.process import Child, fork
from offbeat.errors import RunError
from offbeat.log.records import Settings
from offbeat.model.table import Flat
from offbeat.split.channel import Mesh, Parted, Tag, Wires
from offbeat.split.replica import PartReplica
from offbeat.split.script_replica import Asked
from offbeat.store.slot import Slot
from offbeat.worker.contribution import Snapshot
from offbeat.worker.send import Sender

LEADER = 0
ORDER: Tag = ("order", 0, 0)
ANSWER: Tag = ("answer", 0, 0)


class GroupOrder(msgspec.Struct, array_like=True, tag=True):
    """From the leader to every process of its replica, itself included."""


class BeginIncarnation(GroupOrder):
    """A new incarnation: forget all that an earlier one had."""


class Still(GroupOrder):
    """Compute as in a test: no chance, no statistics that move."""


class ComputeStep(GroupOrder):
    """Compute a lease, each its part."""

    lease: Lease


class Start(GroupOrder):
    """A step is about to be computed by a script's own loop."""


class Forward(GroupOrder):
    """Send a script's batch through the stages; the leader has it."""

    asked: Asked


class Backward(GroupOrder):
    """Bring the gradients of that batch back; the leader has those of its output."""


class Finish(GroupOrder):
    """The gradient of a script's step lies on the parameters."""

    settings: Settings | None  # that the script has for the rule, where that works here


class Contribute(GroupOrder):
    """Leave what goes out in the worker's slot."""


class Accept(GroupOrder):
    """The parameters of a version lie in the slot."""

    version: int
    steps: int
    epoch: int
    place: int
    updater: bool
    progress: int
    lacking: list[str] = []  # averaged local state that nobody has yet


class Recover(GroupOrder):
    """Forget what a step that was not finite left behind."""


class Back(GroupOrder):
    """The script has left its loop: hold the version that was pulled."""


class RunPipeline(GroupOrder):
    """Let leases flow through until their end is told."""


class LeaveGroup(GroupOrder):
    """It is over: tell what this process held and did."""


class GroupAnswer(msgspec.Struct, array_like=True):
    """What an order came to in one process."""

    loss: float | None = None
    absent: list[str] = []
    finite: bool = True
    state: list[str] = []  # of the local optimiser, where it is averaged
    figures: dict[str, float] = {}


Halves = Start | Forward | Backward | Finish | Back
GroupOrders = (
    BeginIncarnation
    | Still
    | ComputeStep
    | Halves
    | Contribute
    | Accept
    | Recover
    | RunPipeline
    | LeaveGroup
)
_encode = msgspec.msgpack.Encoder().encode
_orders = msgspec.msgpack.Decoder(list[GroupOrders]).decode
_answer = msgspec.msgpack.Decoder(GroupAnswer).decode


class GroupMember:
    """One process's share in a worker: a sender over its part of the replica."""

    def __init__(self, make: Callable[[], Sender], own_memory: MemberMemory, skips: bool):
        """`skips` says whether contributions that are not finite are left out, and forgotten."""
        self.make, self.own_memory, self.skips = make, own_memory, skips
        self.sender: Sender | None = None
        self.good: dict[str, Any] = {}  # buffers to return to
        self.later: dict[str, Any] = {}  # those of the last contribution, until it has counted

    @property
    def replica(self) -> PartReplica:
        assert self.sender is not None
        assert isinstance(self.sender.replica, PartReplica)
        return self.sender.replica

    @property
    def steps(self) -> int:
        """Steps that this process has begun since it joined."""
        return 0 if self.sender is None else self.replica.part.steps

    def obey(self, order: GroupOrders) -> GroupAnswer:
        if isinstance(order, BeginIncarnation):
            self.sender = self.make()
            self.good, self.later = self.replica.buffers() if self.skips else {}, {}
            return GroupAnswer()
        if isinstance(order, LeaveGroup):  # perhaps before anything has begun
            return GroupAnswer(figures=self.figures())
        assert self.sender is not None
        if isinstance(order, ComputeStep):
            self.good, self.later = self.later or self.good, {}
            loss = self.sender.step(order.lease)
            return GroupAnswer(None if self.replica.part.loss is None else loss)
        if isinstance(order, Contribute):
            return self._contribute(self.sender)
        if isinstance(order, Accept):
            self._accept(self.sender, order)
        elif isinstance(order, Recover):
            self.later = {}
            self.sender.recover(self.good)
        elif isinstance(order, Still):
            self.replica.part.train(False)
        return GroupAnswer()

    def _contribute(self, sender: Sender) -> GroupAnswer:
        self.own_memory.push(sender.payload())
        replica = self.replica
        local = sender.updater_state()
        self.own_memory.push_beside(replica, local)
        if self.skips:  # the leader will say if another process's numbers were not finite
            self.later = replica.buffers()
        answer = GroupAnswer(None, sorted(sender.absent), sender.finite(), list(local))
        sender.turn()
        return answer

    def _accept(self, sender: Sender, order: Accept) -> None:
        mine = self.own_memory.incoming(order.place)
        self.replica.borrow(self.own_memory.slot.incoming[order.place])
        there = self.own_memory.updater() if order.updater else {}
        updater = {name: view for name, view in there.items() if name not in order.lacking}
        about = (order.version, order.steps, order.epoch)
        sender.accept(Snapshot(*about, mine, updater, order.progress))

    def figures(self) -> dict[str, float]:
        """What this process came to; one that never joined has held and done nothing."""
        peak = float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if self.sender is None:
            return {"nbytes": 0.0, "peak": peak, "busy": 0.0, "total": 0.0, "steps": 0.0}
        part = self.replica.part
        held = sum(flat.table.nbytes for flat in self.replica.flats) + self.sender.nbytes
        return {
            "nbytes": float(held),
            "peak": peak,
            "busy": part.busy,
            "total": part.total,
            "steps": float(part.steps),
        }


class ReplicaGroup:
    """The leader's view of its replica: an order goes to everybody, and everybody answers.

    The others are forked by the leader, so they end with it; if one of them ends, the leader does.
    """

    def __init__(
        self, processes: int, main: Callable[[int, Mesh], GroupMember], name: str, threads: int
    ):
        """`main` makes the share of a process, in that process."""
        wires = Wires(processes)
        self.children: dict[int, Child] = {}
        for process in range(1, processes):
            self.children[process] = fork(
                f"{name}.{process}", partial(_member, process, wires, main), threads
            )
        self.mesh = wires.mesh(LEADER)
        self.share = main(LEADER, self.mesh)
        self.untold: list[GroupOrders] = []
        self.asking = False  # whether an order is under way; it stays so if that has failed

    def tell(self, order: GroupOrders) -> None:
        """An order that nobody answers; the others hear it together with the next."""
        self.obey(order)
        self.untold.append(order)

    def ask(self, order: GroupOrders) -> list[GroupAnswer]:
        """Everybody's answer, in the order of the processes."""
        self.asking = True
        self.start(order)
        found = [self.obey(order), *self.answers()]
        self.asking = False
        return found

    def obey(self, order: GroupOrders) -> GroupAnswer:
        """The leader's own share of an order."""
        try:
            return self.share.obey(order)
        except Parted:
            self.end()

    def start(self, order: GroupOrders) -> None:
        """Let the others begin; their `answers` are to be taken."""
        packet, self.untold = _encode([*self.untold, order]), []
        for process in self.children:
            self.mesh.send(process, ORDER, packet)

    def answers(self) -> list[GroupAnswer]:
        try:
            return [_answer(self.mesh.receive(process, ANSWER)) for process in self.children]
        except Parted:
            self.end()

    def leave(self) -> dict[str, float]:
        """Send everybody home; returns what each process came to."""
        answers = self.ask(LeaveGroup())
        for child in self.children.values():
            child.reap()
        told: dict[str, float] = {}
        for process, answer in enumerate(answers):
            told |= {f"{process}/{key}": value for key, value in answer.figures.items()}
            for key in ("nbytes", "peak"):
                told[key] = max(told.get(key, 0.0), answer.figures[key])
        return told

    def end(self) -> NoReturn:
        """One of the others is gone, and without it the rest is nothing."""
        for child in self.children.values():
            child.kill()
        words = {process: child.reap() for process, child in self.children.items()}
        found = {process: left for process, left in words.items() if left is not None}
        if not found:
            os._exit(1)  # killed, and so the launcher is to see this process too
        process, left = next(iter(found.items()))
        if left.ours:
            raise RunError(left.message)
        raise MemberFailed(f"process {process} of its replica: {left.message}", left.trace)


class MemberFailed(Exception):
    """Another process of the replica failed; its traceback goes on as this one's."""

    def __init__(self, message: str, trace: str):
        super().__init__(message)
        self.add_note(trace)


def _member(process: int, wires: Wires, main: Callable[[int, Mesh], GroupMember]) -> None:
    mesh = wires.mesh(process)
    share = main(process, mesh)
    try:
        while True:
            for order in _orders(mesh.receive(LEADER, ORDER)):
                answer = share.obey(order)
            mesh.send(LEADER, ANSWER, _encode(answer))
            if isinstance(order, LeaveGroup):
                mesh.flush()
                return
    except Parted:
        os._exit(1)  # the leader finds out who was first


class SplitSender(Sender):
    """The leader's sender: what a sender does, done by every process of the replica."""

    def __init__(self, group: ReplicaGroup, slot: Slot, still: bool = False):
        """`still` computes as in a test."""
        self.group, self.slot = group, slot
        group.tell(BeginIncarnation())
        if still:
            group.tell(Still())
        self.replica = group.share.replica
        self.outs = slot.outgoing
        self.out = self.outs[0]
        self.absent: frozenset[str] = frozenset()
        self.feedback = None
        self.all_finite = True
        self.local: frozenset[str] = frozenset()  # state that the processes have left in the slot

    def step(self, lease: Lease) -> float:
        answers = self.group.ask(ComputeStep(lease))
        return next(answer.loss for answer in answers if answer.loss is not None)

    def payload(self) -> list[Flat]:
        answers = self.group.ask(Contribute())
        self.absent = frozenset(name for answer in answers for name in answer.absent)
        self.all_finite = all(answer.finite for answer in answers)
        self.local = frozenset(name for answer in answers for name in answer.state)
        return self.out

    def updater_state(self) -> dict[str, Tensor]:
        return {n: view for n, view in self.slot.updater.views.items() if n in self.local}

    def finite(self) -> bool:
        return self.all_finite

    def accept(self, snapshot: Snapshot) -> None:
        self.group.tell(self.accepting(snapshot))

    def accepting(self, snapshot: Snapshot) -> Accept:
        place, averaged = self.place_of(snapshot), bool(snapshot.updater)
        lacking = [n for n in self.slot.updater.views if averaged and n not in snapshot.updater]
        about = (snapshot.version, snapshot.steps, snapshot.epoch, place)
        return Accept(*about, averaged, snapshot.progress, lacking)

    def place_of(self, snapshot: Snapshot) -> int:
        # Lists of views, so found by identity: comparing would look into the tensors.
        return next(i for i, p in enumerate(self.slot.incoming) if p is snapshot.parameters)

    def recover(self, buffers: Mapping[str, Tensor]) -> None:
        self.group.tell(Recover())

    @property
    def nbytes(self) -> int:
        sender = self.group.share.sender
        return 0 if sender is None else sender.nbytes
