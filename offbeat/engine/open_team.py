"""A worker of several processes whose leader runs a script: its loss lies between two halves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from offbeat.contribution import Snapshot
from offbeat.engine.split import SplitReplica
from offbeat.engine.team import (
    Answer,
    Back,
    Backward,
    Finish,
    Forward,
    Halves,
    Orders,
    Share,
    SplitSender,
    Start,
    Team,
)
from offbeat.job import Place
from offbeat.link.mesh import Mesh
from offbeat.replica.open import Asked, OpenReplica
from offbeat.replica.part import Seat
from offbeat.replica.passes import Gradients
from offbeat.store.core import Store
from offbeat.worker import NumberWorker


class OpenShare(Share):
    """One process's share, which also makes the halves of a step.

    In the leader `given` is what the script gave, and `made` what it gets for that.
    """

    given: Any = None
    made: Sequence[Any] = ()

    def obey(self, order: Orders) -> Answer:
        if not isinstance(order, Halves):
            return super().obey(order)
        assert self.sender is not None
        replica = self.replica
        assert isinstance(replica, OpenReplica)
        if isinstance(order, Start):
            self.sender.begin()
        elif isinstance(order, Finish):
            self.sender.finish()
        elif isinstance(order, Back):
            self.sender.back_to_version()
        elif isinstance(order, Forward):
            self.made = replica.forward(order.asked, self.given)
        else:
            self.made = replica.backward(self.given or ())
        return Answer()


class ScriptSender(SplitSender):
    """The leader's sender under a script's own loop."""

    def begin(self) -> None:
        self.team.tell(Start())

    def finish(self) -> None:
        # Done by all before the script goes on: it may write what the others would read only then.
        self.team.ask(Finish())

    def back_to_version(self) -> None:
        if not self.team.asking:  # else an error in a pass has ended the loop, and nobody listens
            self.team.ask(Back())

    def accept(self, snapshot: Snapshot) -> None:
        self.team.ask(self.accepting(snapshot))

    def forward(self, asked: Asked, inputs: Any) -> list[Any]:
        """A batch through all stages: the outputs of its microbatches."""
        self.replica.reclaim()  # before any of them looks there
        return self._made(Forward(asked), inputs)

    def backward(self, gradients: Sequence[Gradients]) -> list[Gradients]:
        """And back again: the gradients of its inputs, by microbatch."""
        return self._made(Backward(), gradients)

    def _made(self, order: Orders, given: Any) -> list[Any]:
        share = self.team.share
        assert isinstance(share, OpenShare)
        share.given = given
        self.team.ask(order)
        found, share.given, share.made = list(share.made), None, ()
        return found


@dataclass(frozen=True)
class OpenSplit(SplitReplica):
    """How the processes of one worker are made where a script computes the loss."""

    script: nn.Module | None = None

    def seat(self, process: int, mesh: Mesh) -> Seat:
        return replace(super().seat(process, mesh), script=self.script)

    def _share(self, process: int, mesh: Mesh) -> Share:
        plain = super()._share(process, mesh)
        return OpenShare(plain.make, plain.bench, plain.skips)

    def make(
        self, team: Team, store: Store, number: int, incarnation: int, place: Place
    ) -> NumberWorker:
        return self.job.worker_of(store, number, incarnation, ScriptSender(team, self.slot))
