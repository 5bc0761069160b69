"""The simulated cluster: real gradients under a virtual clock, the same bits for the same seed."""

import heapq
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from offbeat.cluster import Cluster
from offbeat.contribution import Verdict
from offbeat.errors import RunError
from offbeat.job import Job
from offbeat.lease import Lease
from offbeat.pace import Pace
from offbeat.store.core import Store
from offbeat.worker import Action, Cycle, LeftLoop, Timing, Unfinished, Worker


class Kind(Enum):
    """What can happen at a moment of virtual time."""

    JOIN = "join"  # a worker enters, for the first time or after a failure
    BEGIN = "begin"  # what it pulled has arrived
    COMPUTED = "computed"  # a step is over
    ARRIVED = "arrived"  # its contribution has reached the store
    SERVED = "served"  # the store has got round to it
    PAUSE = "pause"
    WAKE = "wake"
    FAIL = "fail"
    GIVE_UP = "give up"  # patience with a silent worker has run out


# A pause holds up what the worker itself does; what the store does goes on.
_OWN = (Kind.BEGIN, Kind.COMPUTED, Kind.ARRIVED)
# These belong to one incarnation and are void once it is gone.
_BOUND = (*_OWN, Kind.SERVED)


class Event(NamedTuple):
    """Something that will happen, ordered by time and then by when it was planned."""

    time: float
    order: int
    kind: Kind
    worker: int
    token: int  # an event whose token is no longer its worker's is void
    extra: float = 0.0


class Agent(msgspec.Struct):
    """The simulator's view of one worker."""

    cycle: Cycle
    timing: Timing
    token: int = 0
    step: int = 0  # index of its next compute time
    sequence: int = 0
    alive: bool = False
    silent_until: float = 0.0  # end of a pause
    waiting_since: float = 0.0


class Simulation:
    """An event heap over the store and the workers of a job."""

    def __init__(self, job: Job, cluster: Cluster, store: Store):
        job.check_simulated()
        self.job, self.cluster, self.store = job, cluster, store
        self.now = 0.0
        self.heap: list[Event] = []
        self.planned = 0
        self.store_free = 0.0
        self.ready: deque[int] = deque()  # workers that may go on at this moment
        self.agents = [Agent(Cycle(), Timing()) for _ in cluster.machines]
        self.workers: dict[int, Worker] = {}
        self.paces = [
            Pace(machine.compute, job.seed, number)
            for number, machine in enumerate(cluster.machines)
        ]
        pull, updater = store.pull_bytes, job.updater_bytes(store)
        self.push_seconds = self._link_times(job.push_bytes(store) + updater)
        self.pull_seconds = self._link_times(pull)
        self.full_pull_seconds = self._link_times(pull + updater)
        self._handlers: dict[Kind, Callable[[Event], None]] = {
            Kind.JOIN: lambda event: self._join(event.worker),
            Kind.BEGIN: lambda event: self._advance(event.worker),
            Kind.COMPUTED: self._computed,
            Kind.ARRIVED: lambda event: self._arrived(event.worker),
            Kind.SERVED: lambda event: self._serve(event.worker),
            Kind.PAUSE: self._pause,
            Kind.WAKE: self._wake,
            Kind.FAIL: self._fail,
            Kind.GIVE_UP: self._give_up,
        }

    def _link_times(self, nbytes: int) -> list[float]:
        return [m.latency + nbytes / m.bandwidth for m in self.cluster.machines]

    # ------------------------------------------------------------ the loop

    def start(self) -> None:
        """Plan what the cluster description says will happen."""
        for number, machine in enumerate(self.cluster.machines):
            self._plan(Kind.JOIN, number, machine.joins_at)
            for pause in machine.pauses:
                self._plan(Kind.PAUSE, number, pause.at, pause.lasting)
            for failure in machine.failures:
                back = -1.0 if failure.returns_after is None else failure.returns_after
                self._plan(Kind.FAIL, number, failure.at, back)

    def step(self) -> bool:
        """Let the next thing happen; False when the run is over."""
        if self.store.finished:
            return False
        if not self.heap:
            raise RunError(
                f"no worker is left at {self.now:.6g} s and version {self.store.version}: all "
                "have failed for good; give failures a returns_after, or add workers"
            )
        event = heapq.heappop(self.heap)
        if event.kind in _BOUND and event.token != self.agents[event.worker].token:
            return True
        self.now = event.time
        self._handlers[event.kind](event)
        while self.ready:
            self._grant(self.ready.popleft())
        return True

    def _plan(self, kind: Kind, worker: int, at: float, extra: float = 0.0) -> None:
        token = self.agents[worker].token
        heapq.heappush(self.heap, Event(at, self.planned, kind, worker, token, extra))
        self.planned += 1

    def _plan_own(self, kind: Kind, worker: int, seconds: float) -> None:
        """Something the worker does itself: a pause delays it."""
        agent = self.agents[worker]
        start = agent.silent_until if agent.silent_until > self.now else self.now
        event = Event(start + seconds, self.planned, kind, worker, agent.token)
        heapq.heappush(self.heap, event)
        self.planned += 1

    # ------------------------------------------------------------ the path of a gradient

    def _join(self, number: int) -> None:
        agent = self.agents[number]
        incarnation = self.store.join(number, self.now)
        agent.cycle = Cycle.of(self.store.discipline)
        agent.timing = Timing()
        agent.token += 1
        agent.sequence, agent.alive, agent.waiting_since = 0, True, self.now
        agent.silent_until = self.now  # a pause ends with the process that was paused
        self.workers[number] = self.job.make_worker(self.store, number, incarnation)
        self._board_moved()
        self._advance(number)
        self._wake_resting()

    def _advance(self, number: int) -> None:
        """Follow the worker's cycle until something takes time."""
        agent, worker = self.agents[number], self.workers[number]
        cycle = agent.cycle
        while True:
            if cycle.action is Action.COMPUTE:
                _, start, stop = worker.todo[-1]
                share = (stop - start) / self.job.batch_size
                seconds = self.paces[number][agent.step] * share
                agent.step += 1
                agent.timing.compute += seconds
                self._plan_own(Kind.COMPUTED, number, seconds)
                return
            if cycle.action is Action.PUSH:
                seconds = self.push_seconds[number]
                agent.timing.communication += seconds
                if seconds or agent.silent_until > self.now:
                    self._plan_own(Kind.ARRIVED, number, seconds)
                else:
                    self._arrived(number)
                return
            if agent.silent_until and self.store.lost(number):  # given up while it was silent
                self._join(number)
                return
            if cycle.action is Action.LEASE:
                self._lease(number)
            elif cycle.action is Action.PULL:
                agent.waiting_since = self.now
                if cycle.centre:
                    self.ready.append(number)
                else:
                    self.ready.extend(self.store.hold(number))
                return
            else:
                timing, agent.timing = agent.timing, Timing()
                self.store.rest(number, self.now, timing.wait, timing.communication)
                self._board_moved()
                return

    def _lease(self, number: int) -> None:
        lease = self.store.lease(number)
        if lease is not None:
            self.workers[number].take(lease)
        self.agents[number].cycle.leased(lease is not None)

    def _grant(self, number: int) -> None:
        """The worker may go on: it takes this version and its next samples with it."""
        agent, worker = self.agents[number], self.workers[number]
        if not agent.alive:
            return
        computed = self._caught_up(number)
        if computed is None:
            return
        agent.timing.wait += self.now - agent.waiting_since
        snapshot = self.store.pull(number, self.now, computed)
        worker.accept(snapshot)
        agent.cycle.pulled(snapshot.steps)
        if agent.cycle.action is Action.LEASE:
            self._lease(number)
        times = self.full_pull_seconds if snapshot.updater else self.pull_seconds
        seconds = times[number]
        agent.timing.communication += seconds
        if seconds or agent.silent_until > self.now:
            self._plan_own(Kind.BEGIN, number, seconds)
        else:
            self._advance(number)

    def _computed(self, event: Event) -> None:
        self.agents[event.worker].cycle.computed()
        self._advance(event.worker)

    def _arrived(self, number: int) -> None:
        """One contribution at a time: the store may still be busy with an earlier one."""
        if self.cluster.apply == 0:
            self._serve(number)
            return
        self.store_free = max(self.now, self.store_free) + self.cluster.apply
        self.agents[number].timing.communication += self.store_free - self.now
        self._plan(Kind.SERVED, number, self.store_free)

    def _serve(self, number: int) -> None:
        agent, worker = self.agents[number], self.workers[number]
        if agent.silent_until and self.store.lost(number):
            # A contribution of the dead is refused unread, so there is no need to compute it.
            self.store.refuse(number, worker.incarnation, agent.sequence, self.now)
            self._join(number)
            return
        if self._caught_up(number) is None:
            return
        contribution = worker.contribution(agent.sequence, agent.timing, self.job.seed)
        agent.sequence += 1
        agent.timing = Timing()
        verdict = self.store.push(contribution, self.now)
        assert verdict in (Verdict.ADMITTED, Verdict.DROPPED), verdict
        agent.cycle.pushed()
        if agent.cycle.action is not Action.PULL:  # a pull asks the board anyway
            self._board_moved()
        self._advance(number)

    def _caught_up(self, number: int) -> list[Lease] | None:
        """What a worker has computed by now; None if its script has left or ended its loop."""
        try:
            return self.workers[number].catch_up()
        except LeftLoop:
            self._leave(number)
        except Unfinished:  # whoever goes on from here computes it
            self._plan_own(Kind.BEGIN, number, 0.0)
        return None

    def _leave(self, number: int) -> None:
        agent = self.agents[number]
        agent.alive, agent.silent_until = False, self.now
        agent.token += 1
        self.store.leave(number, self.now)
        self._board_moved()
        self._wake_resting()

    def _board_moved(self) -> None:
        self.ready.extend(self.store.released())

    # ------------------------------------------------------------ faults

    def _pause(self, event: Event) -> None:
        agent = self.agents[event.worker]
        if not agent.alive:
            return
        agent.silent_until = max(agent.silent_until, self.now + event.extra)
        # What it was doing goes on where it stopped.
        self.heap = [
            e._replace(time=e.time + event.extra) if self._own(e, event.worker) else e
            for e in self.heap
        ]
        heapq.heapify(self.heap)
        self._plan(Kind.WAKE, event.worker, agent.silent_until)
        if event.extra > self.cluster.patience:
            self._plan(Kind.GIVE_UP, event.worker, self.now + self.cluster.patience)

    def _own(self, event: Event, number: int) -> bool:
        mine = event.worker == number and event.token == self.agents[number].token
        return mine and event.kind in _OWN

    def _wake(self, event: Event) -> None:
        """A worker that was given up while it waited has nothing planned: it must join again."""
        agent = self.agents[event.worker]
        waited = agent.alive and self.store.lost(event.worker)
        if waited and not any(self._own(e, event.worker) for e in self.heap):
            self._join(event.worker)

    def _fail(self, event: Event) -> None:
        agent = self.agents[event.worker]
        if not agent.alive:
            return
        agent.alive, agent.silent_until = False, self.now
        agent.token += 1
        self._plan(Kind.GIVE_UP, event.worker, self.now + self.cluster.patience)
        if event.extra >= 0:
            self._plan(Kind.JOIN, event.worker, self.now + event.extra)

    def _give_up(self, event: Event) -> None:
        agent = self.agents[event.worker]
        silent = not agent.alive or agent.silent_until > self.now
        if event.token == agent.token and silent and not self.store.lost(event.worker):
            self.store.lose(event.worker, self.now)
            self._board_moved()
            self._wake_resting()

    def _wake_resting(self) -> None:
        """Offer leases that came back; a worker that died at rest takes none, and is given up."""
        for number in self.store.wake():
            self.agents[number].cycle.woken()
            if self.agents[number].alive:
                self._advance(number)

    # ------------------------------------------------------------ state

    def meta(self) -> dict[str, Any]:
        """The state between two events, but for tensors."""
        assert not self.ready
        return {
            "now": self.now,
            "planned": self.planned,
            "store_free": self.store_free,
            "heap": sorted(self.heap),
            "agents": self.agents,
            "workers": {number: worker.meta() for number, worker in self.workers.items()},
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        self.now, self.planned = meta["now"], meta["planned"]
        self.store_free = meta["store_free"]
        self.heap = [Event(t, o, Kind(k), *rest) for t, o, k, *rest in meta["heap"]]
        self.agents = msgspec.convert(meta["agents"], list[Agent])
