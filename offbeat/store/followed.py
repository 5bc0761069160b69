"""The numbers of a store that has a backup: whatever changes them is said to that one too."""

from collections.abc import Sequence
from typing import Protocol

from offbeat.protocol.messages import Push
from offbeat.rules.fused import leaves_gradients
from offbeat.store.backup import (
    AdvanceTo,
    BackupWord,
    KeepWaiting,
    MakeUpdate,
    VersionRead,
    WaitsOn,
    WorkerEntered,
    WorkerForgotten,
)
from offbeat.store.gossip import GossipParameters
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import Contribution


class BackupChannel(Protocol):
    """The way to a backup; without one nothing is said, and nothing waited for."""

    @property
    def follows(self) -> bool:
        """Whether there is one."""

    def say(self, word: BackupWord) -> None:
        """Tell it what the store does."""

    def wait(self) -> None:
        """Until it has done one thing that it answers, or is gone."""


class NoBackup:
    """A channel to nobody."""

    follows = False

    def say(self, word: BackupWord) -> None:
        return

    def wait(self) -> None:
        return


class FollowedParameters(Parameters):
    """Parameters with a backup: no call that makes a version returns before the backup has it.

    So nothing that shows a version can leave before, and nobody who is answered can write where
    the backup still reads. Both work at the same time.
    """

    backup: BackupChannel = NoBackup()
    local_state: Sequence[str] = ()

    def followed_through(self, channel: BackupChannel, local_state: Sequence[str]) -> None:
        """From now on say through this channel what is done.

        `local_state` are the names of what workers average of their rules, as it lies in slots.
        """
        self.backup, self.local_state = channel, local_state

    # ------------------------------------------------------------ what makes a version

    def update(self, contributions: Sequence[Contribution]) -> float:
        if not self.backup.follows:
            return super().update(contributions)
        copies = self._writes_where_they_lie(contributions)
        self.backup.say(MakeUpdate([self._pushed(one) for one in contributions], copies))
        if copies:
            self.backup.wait()
        rate = super().update(contributions)
        self.backup.wait()
        return rate

    def _writes_where_they_lie(self, contributions: Sequence[Contribution]) -> bool:
        """Of several the sum is limited, and of one its own numbers."""
        live = sum(one.part.samples > 0 and not one.part.skipped for one in contributions)
        alone = live == 1 and not self.weigher.needed
        rules = (updater.rule for updater in self.updaters)
        return alone and (self.clip is not None or not all(leaves_gradients(r) for r in rules))

    def _pushed(self, one: Contribution) -> Push:
        names = enumerate(self.local_state)
        lacking = [place for place, name in names if name not in one.updater]
        return Push(one.part, False, [], sorted(one.absent), one.place, lacking)

    def keep(self, contribution: Contribution) -> None:
        lies_there = contribution.payload is not None and contribution.place >= 0
        if lies_there and self.backup.follows:
            self.backup.say(KeepWaiting(self._pushed(contribution)))
            super().keep(contribution)
            self.backup.wait()
        else:
            super().keep(contribution)

    # ------------------------------------------------------------ what later versions depend on

    def wait(self, contribution: Contribution) -> None:
        super().wait(contribution)
        if self.weigher.needed:
            self.backup.say(WaitsOn(contribution.part.base))

    def remember(self, worker: int, version: int) -> None:
        if self.weigher.needed:
            self.backup.say(VersionRead(worker, version))
        super().remember(worker, version)

    def enter(self, worker: int) -> None:
        self.backup.say(WorkerEntered(worker))
        super().enter(worker)

    def forget(self, worker: int) -> None:
        self.backup.say(WorkerForgotten(worker))
        super().forget(worker)

    def advance(self, version: int, epoch: int, progress: int) -> None:
        if self.recipe.schedule is not None:
            self.backup.say(AdvanceTo(version, epoch, progress))
        super().advance(version, epoch, progress)


class FollowedGossip(FollowedParameters, GossipParameters):
    """The same, of one set of parameters for each worker."""
