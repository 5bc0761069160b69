"""What a worker does next: told what has happened, a small value says so."""

from enum import Enum

import msgspec

from offbeat.discipline.discipline import Discipline


class Action(Enum):
    """What a worker does next."""

    PULL = "pull"
    LEASE = "lease"
    COMPUTE = "compute"
    PUSH = "push"
    REST = "rest"


# An attribute of an Enum costs more than what is done with it here, and every step asks for many.
PULL, LEASE, COMPUTE, PUSH, REST = Action


class Cycle(msgspec.Struct):
    """The loop of a worker as a small value: told what has happened, it says what comes next.

    Every engine drives the same cycle; only how long things take and where they run differ.
    """

    fetch: int = 0  # steps between pulls; 0 pulls after every push
    centre: bool = False  # pull right before a push (elastic exchange)
    ahead: bool = False  # compute the next step while a contribution is under way
    flying: bool = False  # one is under way, and what follows it has not been pulled
    due: int = 1  # steps until the next push
    since_push: int = 0
    since_pull: int = 0
    action: Action = PULL

    @classmethod
    def of(cls, discipline: Discipline, ahead: bool = False) -> "Cycle":
        """A worker's at its beginning; with `ahead` it computes on while it exchanges."""
        return cls(fetch=discipline.send.fetch, centre=discipline.send.centre, ahead=ahead)

    def pulled(self, steps: int) -> None:
        self.due, self.since_pull, self.flying = steps, 0, False
        exchanging = (self.centre or self.ahead) and self.since_push > 0
        self.action = PUSH if exchanging else LEASE

    def leased(self, found: bool) -> None:
        if found:
            self.action = COMPUTE
        elif self.flying:
            self.action = PULL
        elif self.since_push:  # the last, shorter block
            self._sync()
        else:
            self.action = REST

    def computed(self) -> None:
        self.since_push += 1
        self.since_pull += 1
        if self.since_push >= self.due:
            self._sync()
        elif self.fetch and self.since_pull >= self.fetch:
            self.action = PULL
        else:
            self.action = LEASE

    @property
    def pull_follows(self) -> bool:
        """Whether a pull follows the next push, at once or after another step."""
        fresh = self.centre or (self.fetch and self.since_pull < self.fetch)
        return self.ahead or not fresh

    def pushed(self) -> bool:
        """Returns whether a pull follows, at once or after another step."""
        follows = self.pull_follows
        self.since_push = 0
        self.flying = self.ahead
        self.action = PULL if follows and not self.ahead else LEASE
        return follows

    def woken(self) -> None:
        self.action = PULL

    def _sync(self) -> None:
        self.action = PULL if self.centre or self.flying else PUSH
