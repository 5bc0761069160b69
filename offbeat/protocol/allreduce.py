"""A server that keeps no parameters: it says who meets in a round, and when the mean counts."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from offbeat.errors import RunError
from offbeat.log.records import Part
from offbeat.protocol.messages import (
    Applied,
    ApplyMean,
    AskLeases,
    Go,
    GroupFailed,
    HasMean,
    Join,
    Leased,
    Message,
    Ping,
    Pong,
    Push,
    Rest,
    Seen,
    Show,
    Shown,
    StartRound,
)
from offbeat.protocol.round import Copies, Pushed, Round, Rounds
from offbeat.protocol.server import ServerProtocol, ServerSettings

ATTEMPTS = 8  # at one round, beyond one for each worker
UNREACHED = 3  # times in a row that a worker is dialled in vain by others, half of patience each


class ParametersLost(Exception):
    """Nobody has the parameters any more: everybody starts from the last checkpoint."""


class AllreduceProtocol(ServerProtocol):
    """Serves workers who add up and apply among themselves.

    A round: everybody who is at work gets leases and the list of members, computes, and pushes.
    The members add up. When all have the mean the round counts, all apply it, and when they have,
    it is a version. Whoever joins waits for the next round.
    """

    store: Rounds

    def __init__(
        self,
        store: Rounds,
        workers: int,
        settings: ServerSettings,
        why: Callable[[int], str],
        copies: Copies,
        new_secret: Callable[[], bytes],
    ):
        """`new_secret` makes what the members of a group prove to each other."""
        super().__init__(store, workers, settings, why)
        self.copies, self.new_secret, self.secret = copies, new_secret, b""
        self.places: dict[int, str] = {}  # where workers reach each other
        self.shortest = settings.patience / 2
        self.holds: dict[int, int] = {}  # the version that each worker has
        self.round: Round | None = None
        self.joining: list[int] = []  # who has come while a round was under way
        self.attempt = self.group = 0
        self.together: list[int] = []  # members of the group
        self.asked: int | None = None  # who is to show what it holds
        self.unreached: Counter[int] = Counter()  # times that others could not reach a worker
        self.handlers |= {
            HasMean: self._has_mean,
            GroupFailed: self._group_failed,
            Applied: self._applied,
            Pong: self._pong,
            Shown: self._shown,
        }

    # ------------------------------------------------------------ what the workers hold

    def settle(self) -> bool:
        applying = self.round is not None and self.round.applying
        if not self.copies.distant:
            return not applying
        if not self.copies.here and not applying:
            self._ask_to_show()
        return self.copies.here  # and written by nobody, even if a round is being applied

    def _ask_to_show(self) -> None:
        """Whoever holds the last version will do; it answers when it is not computing."""
        version = self.store.next_version() - 1
        holders = [worker for worker, held in self.holds.items() if held == version]
        if self.asked is None and holders:
            self.asked = min(holders)
            self._send(self.asked, Show(version))
            self._expect(self.asked)

    def _shown(self, worker: int, message: Shown, contribution: Any) -> None:
        found = self.round
        if self.asked == worker:
            self.asked = None
        changing = found is not None and found.applying
        if message.version == self.store.next_version() - 1 and not changing:
            self.copies.take(worker)
        self._send(worker, Seen())
        if self.store.working(worker):  # else it rests
            self._nothing_new(worker)
        self._if_met()

    # ------------------------------------------------------------ a round begins

    def proceed(self, now: float) -> bool:
        if now > self.now:
            self._answers_begin(now)
        if len(self.met) < self.workers or self.round is not None or not self.ready:
            return False
        self.run_time.begin(now)
        self.time = self.run_time.at(now)
        here = self.connected.intersection(self.ready)
        if len(here) < self.store.active():
            return False  # somebody is on the way
        version = self.store.next_version() - 1
        if not self.copies.here and any(self.holds.get(worker) != version for worker in here):
            self._ask_to_show()  # for one who has nothing yet
            return False
        self.ready.clear()
        self._convene(sorted(here))
        return True

    def _convene(self, workers: list[int]) -> None:
        goes = {worker: self._go(worker) for worker in workers}
        members = {}
        for worker, (go, _) in goes.items():
            samples = self.store.samples_of(worker, go.steps)
            if samples:
                members[worker] = samples
        start = None
        if members:
            self.round = Round(members)
            start = self._start(anew=list(members) != self.together)
        for worker, (go, snapshot) in goes.items():
            if worker in members:
                go.start = start
            self._send(worker, go, snapshot)
            self._expect(worker)

    def _start(self, anew: bool) -> StartRound:
        assert self.round is not None
        self.attempt += 1
        self.round.attempts += 1
        if anew:
            self.group += 1
            self.secret = self.new_secret()
        self.together = list(self.round.members)
        members = sorted(self.round.members.items())
        places = [self.places.get(worker, "") for worker, _ in members]
        return StartRound(self.attempt, self.group, members, self.secret, places)

    def _go(self, worker: int) -> tuple[Go, Any]:
        """A worker that has just come gets what the others hold; the rest have it already."""
        go, snapshot = super()._go(worker)
        go.fresh = self.holds.get(worker) != go.version
        self.holds[worker] = go.version
        return go, snapshot

    def _ask(self, worker: int, message: AskLeases, contribution: Any) -> None:
        # Leases come with a round alone, or its members would not know its samples.
        self._send(worker, Leased([]))
        self._expect(worker)

    # ------------------------------------------------------------ computed, added up, applied

    def _push(self, worker: int, message: Push, contribution: Any) -> None:
        found, part = self.round, message.part
        if found is None or worker not in found.members or self._repeated(found, part):
            self._nothing_new(worker)
            return
        found.pushed[worker] = Pushed(message, contribution)
        self._if_whole()

    def _repeated(self, found: Round, part: Part) -> bool:
        """Whether this contribution has come before, in this round or in an earlier one."""
        return part.worker in found.pushed or self.store.admitted(
            part.worker, part.incarnation, part.sequence
        )

    def _nothing_new(self, worker: int) -> None:
        """A worker lives, and that is all: it is still its turn, unless it waits for others."""
        found = self.round
        if found is not None and worker in found.pushed:
            if found.whole and worker not in found.met and not found.applying:
                self._watch(worker)
            elif found.applying and worker not in found.applied:
                self._expect(worker)
        elif worker not in self.held_since and worker not in self.joining:
            self._expect(worker)

    def _if_whole(self) -> None:
        """Everybody has computed; whatever is not finite is left out of the sum."""
        found = self.round
        if found is None or not found.whole:
            return
        skipped = [
            worker
            for worker, (push, _) in found.pushed.items()
            if push.part.skipped and found.members[worker]
        ]
        for worker in skipped:
            found.members[worker] = 0
        if skipped:
            self._again("")
            return
        for worker in found.members:
            self._watch_anew(worker)

    def _has_mean(self, worker: int, message: HasMean, contribution: Any) -> None:
        found = self.round
        late = found is not None and found.applying
        if found is None or worker not in found.members or late or message.attempt != self.attempt:
            self._nothing_new(worker)
            return
        found.met.add(worker)
        self.unreached.clear()
        self._if_met()

    def _if_met(self) -> None:
        """What a worker is about to show must not change."""
        found = self.round
        if found is None or found.applying or self.asked is not None:
            return
        if found.whole and len(found.met) == len(found.members):
            self._count(found)

    def _count(self, found: Round) -> None:
        """Everybody has the mean, so it counts."""
        found.applying = True
        live = [push for push, _ in found.pushed.values() if not push.part.skipped]
        absent = set.intersection(*(set(push.absent) for push in live)) if live else set()
        lifts = self._lifts(live)
        hashed = self.copies.distant and self.store.hashed(self.store.next_version())
        first = min(live, key=lambda push: push.part.worker, default=None)
        settings = None if first is None else first.part.settings  # as a store has it
        for worker in found.members:
            self._send(worker, ApplyMean(sorted(absent), bool(live), lifts, hashed, settings))
            if worker in self.connected:
                self.deadline.pop(worker, None)  # all of patience, though it was asked before
            self._expect(worker)

    def _lifts(self, live: list[Push]) -> dict[int, float]:
        """What local state that some lack is multiplied by; what all lack is nobody's.

        The sum has shares of all samples in it, and is to be the mean over those who have it.
        """
        if not live:
            return {}
        lacking = [set(push.lacking) for push in live]
        nobodys = set.intersection(*lacking)
        self.copies.lacking(nobodys)
        some = set().union(*lacking) - nobodys
        total = sum(push.part.samples for push in live)
        having = {
            place: [push.part.samples for push in live if place not in push.lacking]
            for place in some
        }
        return {place: total / sum(samples) for place, samples in sorted(having.items())}

    def _applied(self, worker: int, message: Applied, contribution: Any) -> None:
        assert self.round is not None
        self.round.applied[worker] = message.hash
        self._if_applied()

    def _if_applied(self) -> None:
        """The round is over when all have applied it, and whoever got no samples has gone to rest.

        The store would wait for one that is on its way there, and others be woken meanwhile.
        """
        found = self.round
        if found is None or not found.applying:
            return
        living = [worker for worker in found.members if worker not in found.buried]
        if not living:
            raise ParametersLost
        at_work = sum(self.store.working(worker) for worker in found.members)
        if not found.applied.keys() >= set(living) or self.store.active() > at_work:
            return
        self._compare({worker: found.applied[worker] for worker in living})
        self.round = None
        self.copies.look_at(min(living))
        self.holds |= dict.fromkeys(living, self.store.next_version())
        for worker, (message, contribution) in sorted(found.pushed.items()):
            super()._push(worker, message, contribution)
        for worker, why in found.buried.items():
            self._look_away(worker)
            super()._lose(worker, why)  # its successor may be about to join
        self._over()

    def _compare(self, hashes: dict[int, str]) -> None:
        """All that have applied a mean hold the same."""
        first, *others = hashes
        for other in others:
            if hashes[other] != hashes[first]:
                raise RunError(
                    f"workers {first} and {other} hold different parameters at version "
                    f"{self.store.next_version()}, so their processors compute differently: use "
                    "machines of one kind, or via='store'"
                )
        if hashes[first]:
            self.copies.told(hashes[first])

    def _over(self) -> None:
        """Between two rounds whoever wants to may come in."""
        joining, self.joining = self.joining, []
        for worker in joining:
            super()._join(worker)
        self._wake_resting()

    # ------------------------------------------------------------ who comes, and who dies

    def _comes_or_goes(self, worker: int, message: Message) -> None:
        if isinstance(message, Join):
            self.places[worker] = message.place
        super()._comes_or_goes(worker, message)

    def _join(self, worker: int) -> None:
        if self.round is not None and self.store.present(worker):
            self._lose(worker)
        if self.round is None:
            super()._join(worker)
        elif worker not in self.joining:  # an earlier process of it may have waited
            self.joining.append(worker)

    def _counts(self, worker: int) -> bool:
        buried = self.round is not None and worker in self.round.buried
        return super()._counts(worker) and not buried

    def _rest(self, worker: int, message: Rest, contribution: Any) -> None:
        super()._rest(worker, message, contribution)
        self._if_applied()

    def _wake_resting(self) -> None:
        if self.round is None:
            super()._wake_resting()

    def _lose(self, worker: int, why: str = "") -> None:
        found = self.round
        self.joining = [one for one in self.joining if one != worker]
        if self.asked == worker:
            self.asked = None  # whoever wants to look will ask another
        if found is not None and worker in found.members and found.applying:
            self.met.add(worker)
            found.buried.setdefault(worker, why)
            self._if_applied()
            return
        self._look_away(worker)
        if found is None or worker not in found.members:
            super()._lose(worker, why)
            self._if_applied()
            self._if_met()
            return
        del found.members[worker]
        found.pushed.pop(worker, None)
        if not found.members:
            self.round = None
        super()._lose(worker, why)
        if found.members:
            self._again(f"worker {worker} was lost")
            self._if_whole()
        else:
            self._over()

    def _look_away(self, worker: int) -> None:
        """What a lost worker holds may be written by its next incarnation, which is in no group."""
        self.holds.pop(worker, None)
        if worker in self.together:
            self.together = []
        if not self.copies.looks_at(worker):
            return
        version = self.store.next_version() - 1
        others = [other for other, held in self.holds.items() if held == version]
        if others:
            self.copies.look_at(min(others))
        elif not self.copies.take_over():
            raise ParametersLost

    def _group_failed(self, worker: int, message: GroupFailed, contribution: Any) -> None:
        found = self.round
        late = found is not None and found.applying
        if found is None or worker not in found.members or late or message.group != self.group:
            self._nothing_new(worker)
        else:
            self._count_unreached(message)
            self._again(message.reason)

    def _count_unreached(self, message: GroupFailed) -> None:
        """One that is dead has been given up before the others have tried so often."""
        worker = message.unreached
        self.unreached[worker] += worker >= 0
        if self.unreached[worker] >= UNREACHED:
            raise RunError(
                f"{message.reason}, and via='allreduce' needs workers that reach each other: open "
                "the way between their hosts, or leave via out: bsp makes the same updates over "
                "the store, which workers only dial"
            )

    def _again(self, reason: str) -> None:
        """The members add up again, in a new group: one cannot lose a member."""
        found = self.round
        assert found is not None
        if found.attempts > ATTEMPTS + self.workers:
            raise RunError(
                f"workers {sorted(found.members)} cannot add up, after {found.attempts} attempts "
                f"({reason}): use via='store'"
            )
        found.met.clear()
        start = self._start(anew=True)
        for worker in found.members:
            self._send(worker, start)
            if found.whole:
                self._watch_anew(worker)

    # ------------------------------------------------------------ patience while adding up

    def _watch(self, worker: int) -> None:
        """Everybody waits for everybody: after half of patience the silent are asked."""
        assert self.round is not None
        self.round.pinged.discard(worker)
        self.deadline[worker] = self.now + self.shortest

    def _watch_anew(self, worker: int) -> None:
        """The same without a sign of life: one that has been silent before has no more time."""
        if worker not in self.deadline:
            self._watch(worker)

    def _pong(self, worker: int, message: Pong, contribution: Any) -> None:
        self._nothing_new(worker)

    def look(self, now: float, spoken: Callable[[int], bool]) -> None:
        found = self.round
        self._at(now)
        if found is not None and found.whole and not found.applying:
            # Whatever else is a sign of life: being asked costs one who lives nothing.
            for worker in self._overdue(self.deadline, lambda worker: False):
                asked = worker in found.pinged or worker not in self.connected
                if worker in found.members and not asked:
                    found.pinged.add(worker)
                    self.deadline[worker] = now + self.shortest
                    self._send(worker, Ping())
        super().look(now, spoken)
