"""The simulated cluster: real gradients under a virtual clock, the same bits for the same seed."""

import heapq
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import msgspec

from offbeat.config.job import AnyJob
from offbeat.data.lease import Lease
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.compute_times import ComputeTimes
from offbeat.errors import RunError
from offbeat.log.records import Part
from offbeat.protocol.cycle import COMPUTE, LEASE, PULL, PUSH, Cycle
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    Go,
    Join,
    Leased,
    Leave,
    Message,
    Pull,
    Push,
    Rejoin,
    Rest,
    Wake,
    Welcome,
)
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.board import Row
from offbeat.store.store import Store
from offbeat.worker.contribution import Snapshot
from offbeat.worker.worker import LeftLoop, Timing, Unfinished, Worker

ASK = AskLeases()


class EventKind(StrEnum):
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
    # The number of these four is a host's, not a worker's.
    CUT = "cut"  # nothing gets through to it
    HEAL = "heal"
    HOST_FAIL = "host fails"
    SHARE = "share"  # it has another part of its bandwidth


# A pause holds up what the worker itself does; what the store does goes on.
_OWN = (EventKind.BEGIN, EventKind.COMPUTED, EventKind.ARRIVED)
# These belong to one incarnation and are void once it is gone.
_BOUND = frozenset((*_OWN, EventKind.SERVED))


class SimEvent(NamedTuple):
    """Something that will happen, ordered by time and then by when it was planned."""

    time: float
    order: int
    kind: EventKind
    worker: int
    token: int  # an event whose token is no longer its worker's is void
    extra: float = 0.0


_COMPUTED = EventKind.COMPUTED  # an attribute of an Enum costs more than planning the event
_event = partial(tuple.__new__, SimEvent)  # of a whole tuple, in two thirds of the time


class SimWorker(msgspec.Struct):
    """The simulator's view of one worker."""

    cycle: Cycle
    timing: Timing
    token: int = 0
    step: int = 0  # index of its next compute time
    sequence: int = 0
    alive: bool = False
    silent_until: float = 0.0  # end of a pause


class Simulation:
    """An event heap over the store and the workers of a job.

    Each worker has a link of its own here; `network_simulation` has those with shared ones.
    """

    def __init__(self, job: AnyJob, cluster: Cluster, store: Store):
        job.check_simulated()
        self.job, self.cluster, self.store = job, cluster, store
        self.now = 0.0
        self.heap: list[SimEvent] = []
        self.planned = 0
        self.store_free = 0.0
        # What is described to fail is no accident, and workers come when they are said to come.
        settings = ServerSettings(
            cluster.patience, ahead=None, together=False, forgives=True, digits=None
        )
        self.server = ServerProtocol(store, len(cluster.machines), settings)
        self.agents = [SimWorker(Cycle(), Timing()) for _ in cluster.machines]
        self.workers: dict[int, Worker] = {}
        self.paces = [
            ComputeTimes(machine.compute, job.seed, number)
            for number, machine in enumerate(cluster.machines)
        ]
        self.overheads = [machine.overhead for machine in cluster.machines]
        updater = job.updater_bytes(store)
        self.push_bytes = job.push_bytes(store) + updater
        self.pull_bytes = job.pull_bytes(store)
        self.full_pull_bytes = self.pull_bytes + updater
        self.push_seconds = self._link_times(self.push_bytes)
        self.pull_seconds = self._link_times(self.pull_bytes)
        self.full_pull_seconds = self._link_times(self.full_pull_bytes)
        self._handlers: dict[EventKind, Callable[[SimEvent], None]] = {
            EventKind.JOIN: lambda event: self._join(event.worker),
            EventKind.BEGIN: lambda event: self._advance(event.worker),
            EventKind.COMPUTED: self._computed,
            EventKind.ARRIVED: lambda event: self._arrived(event.worker),
            EventKind.SERVED: lambda event: self._serve(event.worker),
            EventKind.PAUSE: self._pause,
            EventKind.WAKE: self._wake,
            EventKind.FAIL: self._fail,
            EventKind.GIVE_UP: self._give_up,
        }
        self._answers: dict[type[Message], Callable[[int, Any, Any], None]] = {
            Welcome: self._welcomed,
            Go: self._went,
            Accepted: lambda worker, message, snapshot: self._advance(worker),
            Rejoin: lambda worker, message, snapshot: self._join(worker),
            Wake: self._woken,
        }

    def _link_times(self, nbytes: int) -> list[float]:
        return [m.latency + nbytes / m.bandwidth for m in self.cluster.machines]

    # ------------------------------------------------------------ the loop

    def start(self) -> None:
        """Plan what the cluster description says will happen."""
        for number, machine in enumerate(self.cluster.machines):
            self._plan(EventKind.JOIN, number, machine.joins_at)
            for pause in machine.pauses:
                self._plan(EventKind.PAUSE, number, pause.at, pause.lasting)
            for failure in machine.failures:
                back = -1.0 if failure.returns_after is None else failure.returns_after
                self._plan(EventKind.FAIL, number, failure.at, back)

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
        time, _, kind, worker, token, _ = event
        if kind in _BOUND and token != self.agents[worker].token:
            return True
        self.now = time
        self._handlers[kind](event)
        self._deliver()
        return True

    def _deliver(self) -> None:
        """Whatever the server says arrives, and whoever may goes on, one by one."""
        server, answers = self.server, self._answers
        while server.outgoing or (server.ready and server.proceed(self.now)):
            for worker, message, snapshot in server.take():
                answers[type(message)](worker, message, snapshot)

    def _plan(self, kind: EventKind, worker: int, at: float, extra: float = 0.0) -> None:
        token = self.agents[worker].token
        heapq.heappush(self.heap, SimEvent(at, self.planned, kind, worker, token, extra))
        self.planned += 1

    def _plan_own(self, kind: EventKind, worker: int, seconds: float) -> None:
        """Something the worker does itself: a pause delays it."""
        agent = self.agents[worker]
        start = agent.silent_until if agent.silent_until > self.now else self.now
        event = (start + seconds, self.planned, kind, worker, agent.token, 0.0)
        heapq.heappush(self.heap, _event(event))
        self.planned += 1

    # ------------------------------------------------------------ the path of a gradient
    # What a worker says is heard at once: the time it takes has passed by then.

    def _join(self, number: int) -> None:
        self.server.connect(number, self.now)
        self.server.receive(number, Join(), None, self.now)

    def _welcomed(self, number: int, message: Welcome, snapshot: None) -> None:
        agent = self.agents[number]
        agent.cycle = Cycle.of(self.store.discipline)
        agent.timing = Timing()
        agent.token += 1
        agent.sequence, agent.alive = 0, True
        agent.silent_until = self.now  # a pause ends with the process that was paused
        self.workers[number] = self.job.make_worker_here(self.store, number, message.incarnation)
        self._advance(number)

    def _advance(self, number: int) -> None:
        """Follow the worker's cycle until something takes time."""
        agent, worker = self.agents[number], self.workers[number]
        cycle = agent.cycle
        while True:
            if cycle.action is COMPUTE:
                _, start, stop = worker.todo[-1]
                share = (stop - start) / self.job.batch_size
                seconds = self.overheads[number] + self.paces[number][agent.step] * share
                agent.step += 1
                agent.timing.compute += seconds
                self._plan_own(_COMPUTED, number, seconds)
                return
            if cycle.action is PUSH:
                self._push(number)
                return
            if cycle.action is LEASE:
                if not self._lease(number):
                    return
            elif cycle.action is PULL:
                self._pull(number)
                return
            else:
                self._rest(number)
                return

    def _push(self, number: int) -> None:
        """A contribution goes out."""
        agent, seconds = self.agents[number], self.push_seconds[number]
        agent.timing.communication += seconds
        if seconds or agent.silent_until > self.now:
            self._plan_own(EventKind.ARRIVED, number, seconds)
        elif self.cluster.apply == 0:
            self._serve(number)
        else:
            self._arrived(number)

    def _pull(self, number: int) -> None:
        agent = self.agents[number]
        # One that was given up computes nothing more: it will be told to join again.
        lost = agent.silent_until and self.store.lost(number)
        computed = [] if lost else self._caught_up(number)
        if computed is not None:
            pull = Pull(computed, not agent.cycle.centre)
            self.server.receive(number, pull, None, self.now)

    def _rest(self, number: int) -> None:
        agent = self.agents[number]
        timing, agent.timing = agent.timing, Timing()
        rest = Rest(timing.wait, timing.communication)
        self.server.receive(number, rest, None, self.now)

    def _lease(self, number: int) -> bool:
        """Ask for samples; False if this worker has been given up, and is told to join again."""
        self.server.receive(number, ASK, None, self.now)
        answer = self.server.outgoing[-1][1]
        if not isinstance(answer, Leased):
            return False
        self.server.outgoing.pop()
        self._leased(number, answer.leases)
        return True

    def _leased(self, number: int, leases: list[Lease]) -> None:
        for lease in leases:
            self.workers[number].take(lease)
        self.agents[number].cycle.leased(bool(leases))

    def _went(self, number: int, go: Go, snapshot: Snapshot) -> None:
        """The worker goes on: it takes this version and its next samples with it."""
        agent, worker = self.agents[number], self.workers[number]
        cycle = agent.cycle
        agent.timing.wait += go.waited
        worker.accept(snapshot)
        cycle.pulled(go.steps)
        if cycle.action is LEASE:
            if cycle.centre:  # it pulls before it exchanges, and gets samples afterwards
                self._lease(number)
            else:
                for lease in go.leases:
                    worker.take(lease)
                cycle.leased(bool(go.leases))
        self._bring(number, snapshot)

    def _bring(self, number: int, snapshot: Snapshot) -> None:
        """What a worker has pulled comes in."""
        agent = self.agents[number]
        times = self.full_pull_seconds if snapshot.updater else self.pull_seconds
        seconds = times[number]
        agent.timing.communication += seconds
        if seconds or agent.silent_until > self.now:
            self._plan_own(EventKind.BEGIN, number, seconds)
        else:
            self._advance(number)

    def _computed(self, event: SimEvent) -> None:
        self.agents[event.worker].cycle.computed()
        self._advance(event.worker)

    def _arrived(self, number: int) -> None:
        """One contribution at a time: the store may still be busy with an earlier one."""
        if self.cluster.apply == 0:
            self._serve(number)
            return
        self.store_free = max(self.now, self.store_free) + self.cluster.apply
        self.agents[number].timing.communication += self.store_free - self.now
        self._plan(EventKind.SERVED, number, self.store_free)

    def _serve(self, number: int) -> None:
        agent, worker = self.agents[number], self.workers[number]
        if agent.silent_until and self.store.lost(number):
            # A contribution of the dead is refused unread, so there is no need to compute it.
            unread = Part(number, worker.incarnation, agent.sequence, worker.base, [], 0)
            self.server.receive(number, Push(unread, pull=True), None, self.now)
            return
        if self._caught_up(number) is None:
            return
        contribution = worker.contribution(agent.sequence, agent.timing, self.job.seed)
        agent.sequence += 1
        agent.timing = Timing()
        push = Push(contribution.part, agent.cycle.pushed())
        self.server.receive(number, push, contribution, self.now)

    def _caught_up(self, number: int) -> list[Lease] | None:
        """What a worker has computed by now; None if its script has left or ended its loop."""
        try:
            return self.workers[number].catch_up()
        except LeftLoop:
            self._leave(number)
        except Unfinished:  # whoever goes on from here computes it
            self._plan_own(EventKind.BEGIN, number, 0.0)
        return None

    def _leave(self, number: int) -> None:
        agent = self.agents[number]
        agent.alive, agent.silent_until = False, self.now
        agent.token += 1
        self.server.receive(number, Leave(), None, self.now)
        self.server.disconnect(number)

    # ------------------------------------------------------------ faults

    def _pause(self, event: SimEvent) -> None:
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
        self._plan(EventKind.WAKE, event.worker, agent.silent_until)
        if not any(self._ends(e, event.worker) for e in self.heap):
            self.server.silent_since(event.worker, self.now)
        if event.extra > self.cluster.patience:
            self._plan(EventKind.GIVE_UP, event.worker, self.now + self.cluster.patience)

    def _own(self, event: SimEvent, number: int) -> bool:
        mine = event.worker == number and event.token == self.agents[number].token
        return mine and event.kind in _OWN

    def _ends(self, event: SimEvent, number: int) -> bool:
        """Whether this is the end of patience with a worker that is silent already."""
        mine = event.worker == number and event.token == self.agents[number].token
        return mine and event.kind is EventKind.GIVE_UP

    def _wake(self, event: SimEvent) -> None:
        """A worker that was given up while it waited has nothing planned: it must join again."""
        agent = self.agents[event.worker]
        waited = agent.alive and self.store.lost(event.worker)
        if waited and not any(self._own(e, event.worker) for e in self.heap):
            self._join(event.worker)

    def _fail(self, event: SimEvent) -> None:
        agent = self.agents[event.worker]
        if not agent.alive:
            return
        agent.alive, agent.silent_until = False, self.now
        agent.token += 1
        self.server.unreachable(event.worker, self.now)
        self._plan(EventKind.GIVE_UP, event.worker, self.now + self.cluster.patience)
        if event.extra >= 0:
            self._plan(EventKind.JOIN, event.worker, self.now + event.extra)

    def _give_up(self, event: SimEvent) -> None:
        self.server.look(self.now, self._spoken)
        self.server.take_silent()  # nobody is replaced who was not said to return

    def _spoken(self, number: int) -> bool:
        """Whoever is alive and not paused would have been heard of."""
        agent = self.agents[number]
        return agent.alive and agent.silent_until <= self.now

    def _woken(self, number: int, message: Wake, snapshot: None) -> None:
        """Leases have come back; a worker that died at rest takes none, and is given up."""
        self.agents[number].cycle.woken()
        if self.agents[number].alive:
            self._advance(number)

    # ------------------------------------------------------------ state

    def meta(self) -> dict[str, Any]:
        """The state between two events, but for tensors."""
        assert not self.server.ready
        return {
            "now": self.now,
            "planned": self.planned,
            "store_free": self.store_free,
            "heap": sorted(self.heap),
            "agents": self.agents,
            "workers": {number: worker.meta() for number, worker in self.workers.items()},
            "held_since": {str(k): v for k, v in self.server.held_since.items()},
            "computed": {str(k): v for k, v in self.server.computed.items()},
            "deadline": {str(k): v for k, v in self.server.deadline.items()},
        }

    def load_meta(self, meta: dict[str, Any]) -> None:
        self.now, self.planned = meta["now"], meta["planned"]
        self.store_free = meta["store_free"]
        self.heap = [SimEvent(t, o, EventKind(k), *rest) for t, o, k, *rest in meta["heap"]]
        self.agents = msgspec.convert(meta["agents"], list[SimWorker])
        self._load_server(meta)

    def _load_server(self, meta: dict[str, Any]) -> None:
        """What the server knows beside the store; older checkpoints tell it in other places."""
        server = self.server
        server.connected = {n for n, agent in enumerate(self.agents) if agent.alive}
        if "deadline" in meta:
            server.deadline = {int(k): v for k, v in meta["deadline"].items()}
        else:
            server.deadline = {e.worker: e.time for e in self.heap if self._ends(e, e.worker)}
        if "held_since" in meta:
            server.held_since = {int(k): v for k, v in meta["held_since"].items()}
            computed = meta["computed"].items()
            server.computed = {int(k): [Lease(*lease) for lease in v] for k, v in computed}
        else:
            waiting = [n for n in server.connected if self.store.cells.item(Row.WAITING, n)]
            server.held_since = {n: meta["agents"][n]["waiting_since"] for n in waiting}

    def catch_up_waiting(self) -> None:
        """With a checkpoint of before, waiting workers may have something left to compute."""
        for number in self.server.held_since:
            if self.workers[number].todo:
                self.server.computed[number] = self.workers[number].catch_up()
