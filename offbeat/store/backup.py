"""A second copy of the store's numbers: it follows every update, and is there when they are not."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from offbeat.log.records import Part
from offbeat.protocol.messages import Push
from offbeat.store.parameters import Parameters
from offbeat.store.pulls import WholePulls
from offbeat.worker.contribution import Contribution

# ---------------------------------------------------------------- what is said


class BackupWord(msgspec.Struct, array_like=True, tag=True):
    """From a store to its backup; contributions are found where their workers have put them."""


class FollowFrom(BackupWord):
    """All that the store is at this version has been laid down: take it, and follow from there."""

    version: int


class WorkerEntered(BackupWord):
    """A worker has joined."""

    worker: int


class WorkerForgotten(BackupWord):
    """A worker is lost, or has left."""

    worker: int


class VersionRead(BackupWord):
    """A worker reads the parameters now; the weighing of what it sends may need a copy of them."""

    worker: int
    version: int


class KeepWaiting(BackupWord):
    """Own a contribution that waits for others; answered with BackupDone."""

    push: Push


class WaitsOn(BackupWord):
    """A contribution that was computed on this version waits for others."""

    base: int


class MakeUpdate(BackupWord):
    """Make the next version of these contributions; answered with BackupDone.

    With `copies` their numbers are copied first, as the store is about to write where they lie;
    that is answered with another BackupDone.
    """

    pushes: list[Push]
    copies: bool


class AdvanceTo(BackupWord):
    """Let the schedules catch up."""

    version: int
    epoch: int
    progress: int


class BackupDone(msgspec.Struct, array_like=True, tag=True):
    """From a backup to its store: what was said is done."""


BackupWords = (
    FollowFrom
    | WorkerEntered
    | WorkerForgotten
    | VersionRead
    | KeepWaiting
    | WaitsOn
    | MakeUpdate
    | AdvanceTo
)


State = tuple[Mapping[str, Tensor], Mapping[str, Any]]  # tensors by name, and what else there is


class LastUpdate(NamedTuple):
    """What a log says of an update."""

    parts: list[Part]
    rate: float


# ---------------------------------------------------------------- who follows


class Backup:
    """Does to its own `parameters` all that a store says it does to its own, in the same order.

    The same code does the same to the same numbers, so both have the same bits.
    """

    def __init__(
        self,
        parameters: Parameters,
        find: Callable[[Push], Contribution],
        laid_down: Callable[[], State],
    ):
        """`find` looks up what has come with a push, `laid_down` the state of the store."""
        self.parameters, self.find, self.laid_down = parameters, find, laid_down
        parameters.pulls = WholePulls()  # what workers get is the store's alone
        self.version: int | None = None  # None while there is nothing to follow from
        self.last: LastUpdate | None = None
        self.kept: dict[tuple[int, int, int], Contribution] = {}
        self.handlers: dict[type[BackupWord], Callable[[Any], None]] = {
            FollowFrom: self._follow_from,
            WorkerEntered: lambda word: parameters.enter(word.worker),
            WorkerForgotten: lambda word: parameters.forget(word.worker),
            VersionRead: lambda word: parameters.remember(word.worker, word.version),
            WaitsOn: lambda word: parameters.reads.waiting.append(word.base),
            AdvanceTo: lambda word: parameters.advance(word.version, word.epoch, word.progress),
        }

    def follow(self, word: BackupWord) -> Iterator[BackupDone]:
        """Do what the store does; what it yields is to be said to the store at once."""
        if isinstance(word, MakeUpdate):
            yield from self._update(word)
        elif isinstance(word, KeepWaiting):
            self._keep(word.push)
            yield BackupDone()
        else:
            self.handlers[type(word)](word)

    def _follow_from(self, word: FollowFrom) -> None:
        self.parameters.load(*self.laid_down())
        self.version = word.version

    def _keep(self, push: Push) -> None:
        contribution = self.find(push)
        contribution.keep()
        self.kept[_key(push.part)] = contribution

    def _update(self, word: MakeUpdate) -> Iterator[BackupDone]:
        assert self.version is not None
        group = [self._found(push) for push in word.pushes]
        if word.copies:
            for one in group:
                one.keep()
            yield BackupDone()
        for one, push in zip(group, word.pushes, strict=True):
            one.part = push.part  # as weighed
        rate = self.parameters.update(group)
        self.last = LastUpdate([one.part for one in group], rate)
        self.version += 1
        yield BackupDone()

    def _found(self, push: Push) -> Contribution:
        key = _key(push.part)
        return self.kept.pop(key) if key in self.kept else self.find(push)

    # ------------------------------------------------------------ what it hands on

    def state(self) -> State:
        """What a store goes on from; nobody who has read an earlier version is there any more."""
        found = self.parameters.state().items()
        tensors = {name: t for name, t in found if not name.startswith("weigh/backup/")}
        return tensors, self.parameters.meta() | {"reads": {"pulls": [], "waiting": []}}


def _key(part: Part) -> tuple[int, int, int]:
    return part.worker, part.incarnation, part.sequence
