"""The seam between a worker's loop and the store, wherever the store is."""

from typing import Protocol

from offbeat.contribution import Contribution, Snapshot
from offbeat.lease import Lease


class Refused(Exception):
    """The store has given this incarnation up: join again."""


class Over(Exception):
    """There is nothing more to do for this process."""


class Stopped(Over):
    """The run was stopped before its end."""


class Gone(Over):
    """The store is gone; whoever started this process knows what comes next."""


class Link(Protocol):
    """What a worker's loop asks of the store; every call may raise Refused or Over."""

    waited: float  # seconds the last pull was held up by other workers
    came: float  # when its answer was there (perf_counter)

    def join(self) -> int:
        """Enter, or enter again; returns the incarnation."""

    def pull(self, computed: list[Lease]) -> Snapshot:
        """Wait until the discipline lets this worker go on, and take the parameters."""

    def lease(self) -> Lease | None:
        """The next samples, or None when there are none now."""

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        """Make a contribution ready, so that a push is a signal and nothing more.

        With `then_pull` a pull follows, so that one answer can serve for both.
        """

    def push(self) -> None:
        """Hand over what was put; its buffers are free when the next call has returned."""

    def rest(self, wait: float, communication: float) -> None:
        """Wait until leases have come back; the time since the last contribution is told."""
