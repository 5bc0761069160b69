"""A worker in real time: the cycle says what comes next, the client asks the store for it."""

import time

from offbeat.config.units import AS_FAST_AS_CAN_BE, LeastTime
from offbeat.data.lease import Lease
from offbeat.protocol.cycle import LEASE, PULL, PUSH, Cycle
from offbeat.worker.client import StoreClient
from offbeat.worker.worker import Timing, Worker


class Loop:
    """One incarnation: `next` gives samples to compute, `computed` hands the step over.

    `least` is what a step takes at the least: the real gradient, then waiting, so that unequal
    machines can be studied on one.
    """

    def __init__(
        self,
        client: StoreClient,
        worker: Worker,
        cycle: Cycle,
        seed: int,
        least: LeastTime = AS_FAST_AS_CAN_BE,
    ):
        self.client, self.worker, self.cycle = client, worker, cycle
        self.seed, self.least = seed, least
        self.timing = Timing()
        self.sequence = 0
        self.reported = 0  # steps of this block that a pull has told the store of
        self.began = 0.0
        self.samples = 0  # of the step under way
        self.free: float | None = None  # when the answer came that lets the next step begin
        self.ended: float | None = None  # when the step ended whose contribution is ready to go
        self.in_flight = 0.0  # since when a contribution has been under way
        self.steps = self.unsent = 0  # with the last contribution under way, and still then
        self.flying = self.hidden = 0.0  # seconds of exchange, and how many of them behind a step

    def next(self) -> Lease:
        """The samples to compute now; raises RunOver when there will be no more."""
        while True:
            if self.cycle.action is LEASE:
                lease = self.client.lease()
                self.cycle.leased(lease is not None)
                if lease is not None:
                    self.began, self.samples = self._since(), lease.samples
                    return lease
            self._exchange()

    def run(self) -> None:
        """Compute until the run is over."""
        while True:
            self.worker.take(self.next())
            self.worker.catch_up()
            self.computed()

    def computed(self) -> None:
        """The step is done: send, wait and pull as the discipline has it."""
        self.cycle.computed()
        now, pulled = time.perf_counter(), 0.0
        over = max(now, self.began + self.least.of(self.samples))
        if self.cycle.flying and self.cycle.action is PULL:
            self._pull()  # the answer came while this step was computed
            pulled = time.perf_counter() - now
            self.steps += 1
            self.unsent += self.client.came > over
            # A device that is so slow would have computed while others were waited for.
            hidden = min(self.timing.wait, over - now)
            self.timing.wait -= hidden
            self.timing.compute += hidden
        end = max(now + pulled, over)
        self.timing.compute += end - self.began - pulled
        if self.cycle.action is PUSH:
            self._put(end)  # a slow device has done that when its step is over
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        self._exchange()

    def _put(self, ended: float) -> None:
        """Make a contribution of everything up to a step that is over at `ended`."""
        spent = self.timing  # more digits than these are noise, and half of the log
        timing = Timing(
            round(spent.compute, 7), round(spent.wait, 7), round(spent.communication, 7)
        )
        made = self.worker.contribution(self.sequence, timing, self.seed)
        self.client.put(made, then_pull=self.cycle.pull_follows)
        self.sequence += 1
        self.timing = Timing()
        self.reported = 0
        self.ended = ended

    def _since(self) -> float:
        """From when on the worker's time is its own: taking an answer over is part of a step."""
        since, self.free = self.free, None
        return time.perf_counter() if since is None else since

    def _exchange(self) -> None:
        while self.cycle.action is not LEASE:
            if self.cycle.action is PULL:
                self._pull()
            elif self.cycle.action is PUSH:
                self._push()
            else:
                self._rest()

    def _pull(self) -> None:
        start = time.perf_counter()
        computed = self.worker.done[self.reported :]
        self.reported = len(self.worker.done)
        snapshot = self.client.pull(computed)
        end = self.free = self.client.came
        self.worker.accept(snapshot)
        self.cycle.pulled(snapshot.steps)
        if self.in_flight:
            self.flying += end - self.in_flight
            self.hidden += start - self.in_flight
            self.in_flight = 0.0
        start = min(end, start + self.client.before)
        waited = min(self.client.waited, end - start)
        self.timing.wait += waited
        self.timing.communication += end - start - waited

    def _push(self) -> None:
        if self.ended is None:  # the centre was pulled first, or no step came after all
            self._put(self._since())
        assert self.ended is not None
        self.client.push()
        self.cycle.pushed()
        end = time.perf_counter()
        self.timing.communication += end - self.ended
        self.ended = self.free = None
        if self.cycle.ahead:
            self.in_flight = end

    def _rest(self) -> None:
        timing, self.timing = self.timing, Timing()
        self.client.rest(timing.wait, timing.communication)
        self.cycle.woken()
