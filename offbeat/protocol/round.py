"""A round of workers who add up among themselves, and what its server has to know of others."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from offbeat.protocol.messages import Push
from offbeat.protocol.server import Authority


class Rounds(Authority, Protocol):
    """A store of which the workers hold the parameters."""

    def active(self) -> int:
        """How many workers are at work."""

    def samples_of(self, worker: int, steps: int) -> int:
        """Samples in the next `steps` leases that a worker holds."""

    def next_version(self) -> int:
        """The version that the round under way will make."""

    def hashed(self, version: int) -> bool:
        """Whether the log has a hash of this version."""

    def admitted(self, worker: int, incarnation: int, sequence: int) -> bool:
        """Whether this very contribution has been taken before."""


class Copies(Protocol):
    """Whose parameters count for the store: those of one worker that holds the last version.

    Where the store can look at them, all of this is in its memory; else a worker has to show them.
    """

    distant: bool  # whether workers have to show what they hold, and say its hash

    @property
    def here(self) -> bool:
        """Whether the store can look at the last version."""

    def told(self, hash: str) -> None:
        """The last version has this hash."""

    def take(self, worker: int) -> None:
        """A worker has shown the last version."""

    def look_at(self, worker: int) -> None:
        """A worker has the last version."""

    def looks_at(self, worker: int) -> bool:
        """Whether it is this worker's that count."""

    def take_over(self) -> bool:
        """Nobody has the last version any more, so the store's own copy counts, if it has one."""

    def lacking(self, nobodys: set[int]) -> None:
        """Places of averaged local state that no worker of the last round had."""


class Pushed(NamedTuple):
    """What a member of a round has pushed."""

    message: Push
    contribution: Any


@dataclass
class Round:
    """Who takes part with how many samples, and how far each of them is."""

    members: dict[int, int]
    attempts: int = 0
    pushed: dict[int, Pushed] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    applying: bool = False  # from here on the round counts, whoever dies
    applied: dict[int, str] = field(default_factory=dict)  # who has applied it, with which hash
    buried: dict[int, str] = field(default_factory=dict)  # who was lost while applying, and why
    pinged: set[int] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether every contribution has been made."""
        return len(self.pushed) == len(self.members)
