"""A server that keeps no parameters: it says who meets in a round, and when the mean counts."""

import time
from dataclasses import dataclass, field
from typing import cast

from offbeat import board
from offbeat.engine.server import Server, Watch
from offbeat.errors import RunError
from offbeat.link.keys import KeyFile
from offbeat.link.memory import Shared
from offbeat.link.messages import (
    Apart,
    Applied,
    Apply,
    Ask,
    Go,
    Here,
    Knock,
    Leased,
    Meet,
    Met,
    Push,
)
from offbeat.store.core import Store
from offbeat.store.mirror import Mirror, Replicated
from offbeat.store.parameters import lift

ATTEMPTS = 8  # at one round, beyond one for each worker


class Bereft(Exception):
    """Nobody has the parameters any more: everybody starts from the last checkpoint."""


@dataclass
class Round:
    """Who takes part with how many samples, and how far each of them is."""

    members: dict[int, int]
    attempts: int = 0
    pushed: dict[int, Push] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    applying: bool = False  # from here on the round counts, whoever dies
    applied: set[int] = field(default_factory=set)
    buried: dict[int, str] = field(default_factory=dict)  # who was lost while applying, and why
    knocked: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether every contribution has been made."""
        return len(self.pushed) == len(self.members)


class Rounds(Server):
    """Serves workers who add up and apply among themselves.

    A round: everybody who is at work gets leases and the list of members, computes, and pushes.
    The members add up. When all have the mean the round counts, all apply it, and when they have,
    it is a version. Whoever joins waits for the next round.
    """

    def __init__(self, store: Store, shared: Shared, patience: float, ahead: int, clock: Watch):
        super().__init__(store, shared, patience, ahead, clock)
        self.shortest = patience / 2
        self.mirror = cast("Mirror", store.parameters)
        self.replicas = [Replicated(s.incoming[0], s.home, s.updater) for s in shared.slots]
        self.holds: dict[int, int] = {}  # the version that each worker has
        self.round: Round | None = None
        self.joining: list[int] = []  # who has come while a round was under way
        self.attempt = self.group = 0
        self.together: list[int] = []  # members of the group
        self.keys = KeyFile()  # where the members of a group find each other
        self.handlers |= {
            Met: self._met,
            Apart: self._apart,
            Applied: self._applied,
            Here: self._here,
        }

    @property
    def quiet(self) -> bool:  # type: ignore[override]
        return self.round is None or not self.round.applying

    # ------------------------------------------------------------ a round begins

    def _drain(self) -> None:
        if len(self.met) < len(self.shared.slots) or self.round is not None:
            return
        self.clock.go()
        here = {n for n in self.ready if n in self.wires and not self.store.lost(n)}
        if len(here) < board.active(self.store.cells):
            return  # somebody is on the way
        self.ready.clear()
        self._convene(sorted(here))

    def _convene(self, numbers: list[int]) -> None:
        now = self.clock()
        goes = {number: self._go(number, now) for number in numbers}
        members = {}
        for number, go in goes.items():
            todo = self.store.leases.held.get(number, [])[: go.steps]
            if todo:
                members[number] = sum(lease.samples for lease in todo)
        if members:
            self.round = Round(members)
            meet = self._meeting(anew=list(members) != self.together)
            for number in members:
                goes[number].meet = meet
        for number, go in goes.items():
            self._send(number, go)
            self._expect(number)

    def _meeting(self, anew: bool) -> Meet:
        assert self.round is not None
        self.attempt += 1
        self.round.attempts += 1
        if anew:
            self.group += 1
            self.keys.renew()
        self.together = list(self.round.members)
        members = sorted(self.round.members.items())
        return Meet(self.attempt, self.group, members, self.keys.path, self.keys.secret)

    def _go(self, number: int, now: float) -> Go:
        """A worker that has just come gets what the others hold; the rest have it already."""
        fresh = self.holds.get(number) != self.store.version
        go = super()._go(number, now)
        averaged = self.mirror.averaged()
        go.fresh, go.updater = fresh, bool(averaged)
        go.lacking = self.mirror.unlearnt(self.shared.slots[number].updater.views)
        return go

    def _give(self, number: int, place: int) -> None:
        if self.holds.get(number) == self.store.version:
            return
        self.holds[number] = self.store.version
        slot, found, mirror = self.shared.slots[number], self.mirror.looked_at, self.mirror
        flats = mirror.flats if found is None else found.flats
        slot.put(place, mirror.held, flats, mirror.averaged())
        slot.home.write(mirror.rule_state() if found is None else found.home.read())

    def _ask(self, number: int, message: Ask) -> None:
        # Leases come with a round alone, or its members would not know its samples.
        self._send(number, Leased([]))
        self._expect(number)

    # ------------------------------------------------------------ computed, added up, applied

    def _push(self, number: int, message: Push) -> None:
        assert self.round is not None
        self.round.pushed[number] = message
        self._if_whole()

    def _if_whole(self) -> None:
        """Everybody has computed; whatever is not finite is left out of the sum."""
        found = self.round
        if found is None or not found.whole:
            return
        skipped = [n for n, push in found.pushed.items() if push.part.skipped and found.members[n]]
        for number in skipped:
            found.members[number] = 0
        if skipped:
            self._again("")
            return
        for number in found.members:
            self._watch(number)

    def _met(self, number: int, message: Met) -> None:
        found = self.round
        if found is None or number not in found.members:
            return
        if message.attempt == self.attempt:
            found.met.add(number)
        elif found.whole:
            self._watch(number)
        if found.whole and len(found.met) == len(found.members):
            self._count(found)

    def _count(self, found: Round) -> None:
        """Everybody has the mean, so it counts."""
        found.applying = True
        live = [push for push in found.pushed.values() if not push.part.skipped]
        absent = set.intersection(*(set(push.absent) for push in live)) if live else set()
        lifts = self._lifts(live)
        for number in found.members:
            self._send(number, Apply(sorted(absent), bool(live), lifts))
            self._expect(number)

    def _lifts(self, live: list[Push]) -> dict[int, float]:
        """What local state that some lack is multiplied by; what all lack is nobody's."""
        if not live:
            return {}
        lacking = [set(push.lacking) for push in live]
        nobodys = set.intersection(*lacking)
        table = self.shared.plan.updater
        self.mirror.nobodys = frozenset(e.name for i, e in enumerate(table) if i in nobodys)
        some = set().union(*lacking) - nobodys
        total = sum(push.part.samples for push in live)
        having = {
            name: [push.part.samples for push in live if name not in push.lacking] for name in some
        }
        return {name: lift(total, samples) for name, samples in sorted(having.items())}

    def _applied(self, number: int, message: Applied) -> None:
        assert self.round is not None
        self.round.applied.add(number)
        self._if_applied()

    def _if_applied(self) -> None:
        found = self.round
        assert found is not None
        living = [number for number in found.members if number not in found.buried]
        if not living:
            raise Bereft
        if not found.applied >= set(living):
            return
        self.round = None
        self.mirror.look_at(self.replicas[min(living)])
        self.holds |= dict.fromkeys(living, self.store.version + 1)
        for number, push in sorted(found.pushed.items()):
            super()._push(number, push)
        for number, why in found.buried.items():
            self._lose(number, why)
        self._over()

    def _over(self) -> None:
        """Between two rounds whoever wants to may come in."""
        joining, self.joining = self.joining, []
        for number in joining:
            super()._join(number)
        self._wake_resting()

    # ------------------------------------------------------------ who comes, and who dies

    def _join(self, number: int) -> None:
        if self.round is not None and number in self.round.members:
            self._lose(number)
        if self.round is None:
            super()._join(number)
        else:
            self.joining.append(number)

    def _wake_resting(self) -> None:
        if self.round is None:
            super()._wake_resting()

    def _lose(self, number: int, why: str = "") -> None:
        found = self.round
        self.joining = [one for one in self.joining if one != number]
        if found is not None and number in found.members and found.applying:
            self.met.add(number)
            found.buried[number] = why
            self._if_applied()
            return
        self._look_away(number)
        if found is None or number not in found.members:
            super()._lose(number, why)
            return
        del found.members[number]
        found.pushed.pop(number, None)
        if not found.members:
            self.round = None
        super()._lose(number, why)
        if found.members:
            self._again(f"worker {number} was lost")
            self._if_whole()
        else:
            self._over()

    def _look_away(self, number: int) -> None:
        """What a lost worker holds may be written by its next incarnation."""
        self.holds.pop(number, None)
        if self.mirror.looked_at is not self.replicas[number]:
            return
        others = [n for n, v in self.holds.items() if v == self.store.version]
        if others:
            self.mirror.look_at(self.replicas[min(others)])
        else:
            self.mirror.refresh()
            self.mirror.look_at(None)

    def _apart(self, number: int, message: Apart) -> None:
        found = self.round
        if found is None or number not in found.members or found.applying:
            return
        if message.group == self.group:
            self._again(message.reason)
        elif found.whole:
            self._watch(number)

    def _again(self, reason: str) -> None:
        """The members add up again, in a new group: gloo's cannot lose one."""
        found = self.round
        assert found is not None
        if found.attempts > ATTEMPTS + len(self.shared.slots):
            raise RunError(
                f"workers {sorted(found.members)} cannot add up, after {found.attempts} attempts "
                f"({reason}): use via='store'"
            )
        found.met.clear()
        meet = self._meeting(anew=True)
        for number in found.members:
            self._send(number, meet)
            if found.whole:
                self._watch(number)

    # ------------------------------------------------------------ patience while adding up

    def _watch(self, number: int) -> None:
        """Everybody waits for everybody: after half of patience the silent are asked."""
        assert self.round is not None
        self.round.knocked.discard(number)
        self.deadline[number] = time.monotonic() + self.shortest

    def _here(self, number: int, message: Here) -> None:
        if self.round is not None and number in self.round.members:
            self._watch(number)

    def give_up_the_silent(self, now: float) -> None:
        found = self.round
        if found is not None and found.whole and not found.applying:
            for number in self._overdue(self.deadline, now):
                if number in found.members and number not in found.knocked:
                    found.knocked.add(number)
                    self.deadline[number] = now + self.shortest
                    self._send(number, Knock())
        super().give_up_the_silent(now)
