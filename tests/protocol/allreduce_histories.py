"""Histories of workers who add up among themselves, in virtual time.

Groups of members are played: all who have given what they have get the sum, one by one; a group
that has lost a member fails the others, sooner or later.
"""

from offbeat.discipline.discipline import Discipline
from offbeat.log.records import Part
from offbeat.protocol.allreduce import AllreduceProtocol, ParametersLost
from offbeat.protocol.messages import (
    Applied,
    ApplyMean,
    Go,
    GroupFailed,
    HasMean,
    Leased,
    Message,
    Ping,
    Pong,
    Push,
    StartRound,
    Welcome,
)
from offbeat.protocol.round import Round
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.worker.contribution import Contribution
from tests.protocol.histories import DELAY, LONGEST, History, Worker

SKIPPED = 0.05  # of all contributions are not finite


class PlayedCopies:
    """Whose parameters count, by the versions that the workers really hold."""

    distant, here = False, True

    def __init__(self, history: "AllreduceHistory"):
        self.history = history
        self.looked_at: int | None = None
        self.version = 0  # of the store's own copy

    def look_at(self, worker: int) -> None:
        self.looked_at = worker

    def looks_at(self, worker: int) -> bool:
        return self.looked_at == worker

    def take_over(self) -> bool:
        assert self.looked_at is not None
        self.version = self.history.held[self.looked_at]
        self.looked_at = None
        return True

    def told(self, hash: str) -> None:
        raise AssertionError("nobody has asked for it")

    def take(self, worker: int) -> None:
        raise AssertionError("nobody has asked for it")

    def lacking(self, nobodys: set[int]) -> None:
        assert nobodys == set()

    def now(self) -> int:
        """The version that one gets who has none."""
        return self.version if self.looked_at is None else self.history.held[self.looked_at]


class AllreduceWorker(Worker):
    """One process: it does what a worker's loop and its client among others do."""

    history: "AllreduceHistory"
    round: StartRound | None = None
    pushed = False  # whether its contribution is whole

    def begin(self) -> None:
        self.round, self.pushed = None, False
        super().begin()

    def _push(self) -> bool:
        leases, self.done, self.reported = self.done, [], 0
        samples = sum(lease.samples for lease in leases)
        skipped = self.history.draw.random() < SKIPPED
        part = Part(
            self.number, self.incarnation, self.sequence, self.base, leases, samples,
            skipped=skipped,
        )  # fmt: skip
        self.sequence += 1
        self.promised = True
        self.cycle.pushed()
        self._say(Push(part, True), Contribution(part))
        self.pushed = True
        self._give()
        self._want(ApplyMean)
        return False

    def _give(self) -> None:
        """All of its contribution goes to the group of this attempt."""
        assert self.round is not None
        self.history.groups.give(self, self.round)

    def summed(self, attempt: int) -> None:
        """From the group: all have given, and here is the sum."""
        if self.round is not None and self.pushed and self.round.attempt == attempt:
            self._say(HasMean(attempt))

    def failed(self, group: int) -> None:
        """From the group: somebody is gone."""
        if self.round is not None and self.pushed and self.round.group == group:
            self._say(GroupFailed(group, "somebody is gone"))

    def _hear(self, message: Message) -> None:
        """Some things may be said at any time."""
        if isinstance(message, StartRound):
            self.round = message
            if self.pushed:
                self._give()
        elif isinstance(message, Ping):
            self._say(Pong())
        else:
            super()._hear(message)

    def _answered(self, message: Message) -> None:
        if isinstance(message, ApplyMean):
            self.wants = None
            self.history.later(self, self.history.draw.uniform(0.0, 2.0), self._apply)
            return
        if isinstance(message, Go):
            self.round, self.pushed = message.start, False
        super()._answered(message)

    def _apply(self) -> None:
        self.history.held[self.number] += 1
        self.pushed = False
        self._say(Applied())
        self.advance()


class Groups:
    """What the members of a group do for each other, as far as the server can see it."""

    def __init__(self, history: "AllreduceHistory"):
        self.history = history
        self.lives: dict[int, dict[int, int]] = {}  # of a group's members, when it was made
        self.given: dict[int, list[AllreduceWorker]] = {}  # who has given all, of each attempt

    def made(self, start: StartRound) -> None:
        if start.group not in self.lives:
            lives = self.history.lives
            self.lives[start.group] = {number: lives[number] for number, _ in start.members}

    def give(self, worker: AllreduceWorker, start: StartRound) -> None:
        given = self.given.setdefault(start.attempt, [])
        given.append(worker)
        if len(start.members) == 1:
            worker.summed(start.attempt)
        elif self._broken(start.group):
            if not self.history.cut_off(self.lives[start.group]):
                self._fail(worker, start.group)
        elif {one.number for one in given} == {number for number, _ in start.members}:
            for one in given:
                self._sum(one, start)

    def _sum(self, worker: AllreduceWorker, start: StartRound) -> None:
        def summed() -> None:
            if not self._broken(start.group):
                worker.summed(start.attempt)
            elif not self.history.cut_off(self.lives[start.group]):
                worker.failed(start.group)

        self.history.later(worker, self._seconds(), summed)

    def _fail(self, worker: AllreduceWorker, group: int) -> None:
        self.history.later(worker, self._seconds(), lambda: worker.failed(group))

    def _seconds(self) -> float:
        return self.history.draw.uniform(0.0, DELAY)

    def _broken(self, group: int) -> bool:
        living = {number: worker.life for number, worker in self.history.workers.items()}
        return not self.lives[group].items() <= living.items()

    def ended(self, number: int) -> None:
        """Whoever waits for somebody that is gone finds out, sooner or later."""
        for other in self.history.workers.values():
            assert isinstance(other, AllreduceWorker)
            round = other.round
            if round is not None and number in dict(round.members) and other.pushed:
                self._fail(other, round.group)


class AllreduceHistory(History):
    """Workers that hold the parameters, and a server that says who meets."""

    kind = AllreduceWorker

    def __init__(self, discipline: Discipline, seed: int):
        super().__init__(discipline, seed)
        self.groups = Groups(self)
        self.cut: set[tuple[int, int]] = set()
        self.held = [-1] * self.count  # the version in each worker's memory, which outlives it

    def _overlaps(self) -> bool:
        return False

    def _protocol(self, settings: ServerSettings) -> ServerProtocol:
        self.copies = PlayedCopies(self)
        count = self.count
        return AllreduceProtocol(
            self.store, count, settings, lambda worker: "", self.copies, lambda: b"secret"
        )

    @property
    def round(self) -> Round | None:
        assert isinstance(self.protocol, AllreduceProtocol)
        return self.protocol.round

    def step(self) -> bool:
        try:
            return super().step()
        except ParametersLost:
            found = self.round
            assert found is not None
            assert found.buried.keys() == found.members.keys()
            return False

    def told(self, number: int, message: Message) -> None:
        super().told(number, message)
        start = message.start if isinstance(message, Go) else message
        if isinstance(start, StartRound):
            self.groups.made(start)
        if isinstance(message, Welcome):
            self.held[number] = -1  # its process begins with what lies there by chance
        if isinstance(message, Go):
            if message.fresh:  # it is copied into the worker's memory right now
                self.held[number] = self.copies.now()
            assert self.held[number] == message.version, (number, self.held, message)

    def end(self, worker: Worker, seen: bool) -> None:
        super().end(worker, seen)
        if seen:
            self.groups.ended(worker.number)
        else:  # it answers nothing, not even that it is gone
            self.cut.add((worker.number, worker.life))

    def cut_off(self, lives: dict[int, int]) -> bool:
        """Whether one of these was cut off, so that whoever waits for it waits."""
        return not self.cut.isdisjoint(lives.items())

    def longest(self, wanted: type[Message] | None) -> float:
        return 2 * DELAY + 0.1 if wanted is Leased else LONGEST

    def check_joins(self, joined: int) -> None:
        assert joined <= self.joins  # some end while they wait for a round to be over

    def may_be_silent(self, number: int) -> bool:
        assert isinstance(self.protocol, AllreduceProtocol)
        found = self.round
        if super().may_be_silent(number) or number in self.protocol.joining:
            return True
        if found is None or number not in found.members:
            return False
        waits = number in found.pushed and not found.whole
        return waits or number in found.met or number in found.applied
