"""A link to a store in the same process, for one worker alone."""

import time
from collections.abc import Callable

from offbeat.contribution import Contribution, Snapshot
from offbeat.errors import RunError
from offbeat.lease import Lease
from offbeat.link.base import Over
from offbeat.store.core import Store


class DirectLink:
    """Calls the store; nobody else does, so nothing is ever waited for."""

    def __init__(self, store: Store, clock: Callable[[], float]):
        self.store, self.clock = store, clock
        self.waited = self.came = 0.0
        self.ready: Contribution | None = None

    def join(self) -> int:
        return self.store.join(0, self.clock())

    def pull(self, computed: list[Lease]) -> Snapshot:
        self.store.hold(0)
        snapshot = self.store.pull(0, self.clock(), computed)
        self.came = time.perf_counter()
        return snapshot

    def lease(self) -> Lease | None:
        return self.store.lease(0)

    def put(self, contribution: Contribution, then_pull: bool) -> None:
        self.ready = contribution

    def push(self) -> None:
        assert self.ready is not None
        self.store.push(self.ready, self.clock())

    def rest(self, wait: float, communication: float) -> None:
        if not self.store.finished:
            # Contributions that waited for others go in when nobody is left to add to them.
            self.store.rest(0, self.clock(), wait, communication)
        if not self.store.finished:
            raise RunError(f"samples are missing at version {self.store.version}, and none is left")
        raise Over
