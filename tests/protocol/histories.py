"""Histories of a run in virtual time: workers that are late, fall silent, die and come back.

A server's protocol over a real store without numbers. Every link keeps its order, and only a push
may come twice. Nothing here has a clock, a thread or a socket, and a seed makes a history.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from offbeat.data.lease import Lease, Leases
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.parts import All, Gradient
from offbeat.log.log import Log
from offbeat.log.records import Joined, Part, Updated
from offbeat.protocol.cycle import Action, Cycle
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    Go,
    Goodbye,
    Join,
    Leased,
    Leave,
    Message,
    Pull,
    Push,
    Rejoin,
    Rest,
    Stop,
    Wake,
    Welcome,
)
from offbeat.protocol.server import ServerProtocol, ServerSettings
from offbeat.store.board import Row, State
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.store import Store
from offbeat.worker.contribution import Contribution
from tests.contract.common import Records, recount

PATIENCE = 10.0
DELAY, STEP = 1.5, 3.0  # the longest of each: an answer comes within patience unless somebody fails
LONGEST = 12 * PATIENCE  # that anybody waits for an answer, whoever else is silent meanwhile
EVENTS = 20_000  # in one history; there are a few hundred
FAULTS = ("silent", "silent for ever", "dies", "dies unseen", "leaves")


class Worker:
    """One process: it does what a worker's loop and client do, when events let it."""

    def __init__(self, history: "History", number: int, life: int):
        self.history, self.number, self.life = history, number, life
        self.inbox: deque[Message] = deque()
        self.leases: deque[Lease] = deque()
        self.done: list[Lease] = []
        self.cycle = Cycle()
        self.wants: type[Message] | None = None
        self.asked_at = 0.0
        self.promised = self.stopped = False
        self.incarnation = self.sequence = self.base = self.reported = 0
        self.silent_until = 0.0

    # ------------------------------------------------------------ what it says

    def begin(self) -> None:
        self._say(Join())
        self._want(Welcome)

    def _say(self, message: Message, contribution: Contribution | None = None) -> None:
        self.history.send(self, message, contribution)

    def _want(self, kind: type[Message]) -> None:
        self.wants, self.asked_at = kind, self.history.now
        self.look()

    def advance(self) -> None:
        """Follow the cycle until an answer is needed, or time."""
        cycle = self.cycle
        while True:
            if cycle.action is Action.LEASE:
                if not self.leases and not self.promised:
                    self._say(AskLeases())
                    self._want(Leased)
                    return
                cycle.leased(bool(self.leases))
            elif cycle.action is Action.COMPUTE:
                self._compute()
                return
            elif cycle.action is Action.PULL:
                if not self.promised:
                    computed, self.reported = self.done[self.reported :], len(self.done)
                    self._say(Pull(computed, not cycle.centre))
                self.promised = False
                self._want(Go)
                return
            elif cycle.action is Action.PUSH:
                if not self._push():
                    return
            else:
                self._say(Rest(0.0, 0.0))
                self._want(Wake)
                return

    def _compute(self) -> None:
        lease, based_on = self.leases.popleft(), self.base
        seconds = self.history.draw.uniform(0.1, STEP)

        def computed() -> None:
            self.done.append(lease)
            self.computed_on = based_on
            self.cycle.computed()
            self.advance()

        self.history.later(self, seconds, computed)

    def _push(self) -> bool:
        """Whether it goes on without an answer."""
        leases, self.done, self.reported = self.done, [], 0
        samples = sum(lease.samples for lease in leases)
        part = Part(self.number, self.incarnation, self.sequence, self.computed_on, leases, samples)
        self.sequence += 1
        self.promised = self.cycle.pull_follows
        ahead = [self.leases[0]] if self.cycle.ahead and self.leases else []
        self.cycle.pushed()
        self._say(Push(part, self.promised, ahead), Contribution(part))
        if not self.promised:
            self._want(Accepted)
        return self.promised

    # ------------------------------------------------------------ what it is told

    def look(self) -> None:
        """Take what lies in the inbox, as far as it is wanted now."""
        while self.wants is not None and self.inbox and not self.stopped:
            self._hear(self.inbox.popleft())

    def _hear(self, message: Message) -> None:
        assert self.wants is not None
        if isinstance(message, Stop):
            self.stopped, self.wants = True, None
            self._say(Goodbye({}))
        elif self.wants is Welcome:
            if isinstance(message, Welcome):  # the rest was for an earlier incarnation
                self._welcomed(message)
        elif isinstance(message, Rejoin):
            self.leases.clear()
            self.promised = False
            self.begin()
        else:
            assert isinstance(message, self.wants), (self.number, self.wants, message)
            self._answered(message)

    def _welcomed(self, message: Welcome) -> None:
        self.wants = None
        self.incarnation, self.sequence = message.incarnation, 0
        self.leases.clear()
        self.done, self.reported, self.promised = [], 0, False
        self.cycle = Cycle.of(self.history.discipline, self.history.overlap)
        self.advance()

    def _answered(self, message: Any) -> None:
        self.wants = None
        if isinstance(message, Accepted | Go | Leased):
            self.leases.extend(message.leases)
        if isinstance(message, Go):
            self.base = message.version
            self.cycle.pulled(message.steps)
        elif isinstance(message, Leased):
            self.cycle.leased(bool(self.leases))
        elif isinstance(message, Wake):
            self.cycle.woken()
        self.advance()


class Wire:
    """One way of a link: what is sent first arrives first, at whatever time."""

    def __init__(self) -> None:
        self.last = 0.0

    def arrival(self, now: float, delay: float) -> float:
        self.last = max(self.last, now + delay)
        return self.last


class History:
    """A server's protocol, workers, and faults that are drawn from a seed."""

    kind: type[Worker] = Worker

    def __init__(self, discipline: Discipline, seed: int, least: int = 1, faults: int = 6):
        self.draw = random.Random(seed)
        self.count = self.draw.randint(least, 5)
        self.discipline = discipline.for_workers(self.count)
        self.barrier = isinstance(discipline.gather, All)
        self.slack = None if self.barrier else discipline.wait
        gradient = isinstance(discipline.send, Gradient) and not self.discipline.drops
        self.overlap = gradient and self._overlaps()
        self.records = Records()
        log = Log()
        log.listeners.append(self.records)
        self.samples, self.epochs = self.draw.choice([9, 40, 121]), self.draw.randint(1, 3)
        leases = Leases(self.samples, 4, self.epochs)
        self.store = Store(discipline, self.count, leases, log, CostOnlyParameters())
        # However often one falls silent here, it is no fault of the run.
        settings = ServerSettings(PATIENCE, self.draw.randint(0, 2), forgives=True)
        self.protocol = self._protocol(settings)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.planned = 0
        self.busy_until = 0.0  # somebody has stopped the server
        self.heard: list[deque[tuple[Message, Contribution | None] | None]] = [
            deque() for _ in range(self.count)
        ]
        self.workers: dict[int, Worker] = {}  # those that live
        self.lives = [0] * self.count
        self.left: set[int] = set()
        self.replaced: set[int] = set()  # whom the server wants to be started anew
        self.ways: dict[tuple[int, int], tuple[Wire, Wire]] = {}  # to server and back, of each life
        self.welcomed = [0] * self.count
        self.joins = 0  # messages that the server has dealt with
        spread, until = self.draw.choice([1.0, 20.0]), self.draw.choice([15.0, 60.0])
        for worker in range(self.count):
            self._at(self.draw.uniform(0.0, spread), lambda worker=worker: self.start(worker))
        for _ in range(self.draw.randint(0, faults)):
            self._at(self.draw.uniform(0.5, until), self._fault)

    def _overlaps(self) -> bool:
        return self.draw.random() < 0.5

    def _protocol(self, settings: ServerSettings) -> ServerProtocol:
        return ServerProtocol(self.store, self.count, settings)

    # ------------------------------------------------------------ time

    def _at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when, self.planned, what))
        self.planned += 1

    def later(self, worker: Worker, seconds: float, what: Callable[[], None]) -> None:
        """Something that a process does itself: nothing if it is dead, and not while it is held up.

        So it is with what arrives.
        """
        self._do_at(worker, self.now + seconds, what)

    def _do_at(self, worker: Worker, when: float, what: Callable[[], None]) -> None:
        def do() -> None:
            if self.workers.get(worker.number) is not worker:
                return
            if worker.silent_until == math.inf:
                return
            if worker.silent_until > self.now:
                self._at(worker.silent_until, do)
            else:
                what()

        self._at(when, do)

    def run(self) -> bool:
        """Let everything happen until all samples are done, and everybody has heard of it.

        Returns False where a run cannot go on, and is begun again from a checkpoint.
        """
        events = 0
        while not self.store.finished:
            events += 1
            assert events < EVENTS, "it goes on for ever"
            if not self.step():
                return False
            self.check()
        self.protocol.dismiss()
        self._deliver()
        self.settle()
        return True

    def step(self) -> bool:
        """The next thing happens, or somebody's time runs out."""
        spoken = self.spoken
        ends = self.protocol.next_deadline(self.now, spoken)
        ends = None if ends is None else max(ends, self.busy_until)
        if self.heap and (ends is None or self.heap[0][0] <= ends):
            self.now, _, what = heapq.heappop(self.heap)
            what()
        else:
            assert ends is not None, "everybody waits for everybody"
            self.now = max(self.now, ends)
            self.protocol.look(self.now, spoken)
            self._deliver()
        return True

    def settle(self) -> None:
        """Whoever lives hears of the end, whatever it was about."""
        while self.heap and not self._all_stopped():
            self.now, _, what = heapq.heappop(self.heap)
            what()
        assert self._all_stopped()

    def _all_stopped(self) -> bool:
        return all(w.stopped or w.silent_until == math.inf for w in self.workers.values())

    # ------------------------------------------------------------ messages

    def spoken(self, worker: int) -> bool:
        return bool(self.heard[worker])

    def send(self, worker: Worker, message: Message, contribution: Contribution | None) -> None:
        """From a worker to the server; a push may come twice."""
        again = isinstance(message, Push) and self.draw.random() < 0.2
        for _ in range(1 + again):
            self._carry(worker, (message, contribution))

    def _carry(self, worker: Worker, what: tuple[Message, Contribution | None] | None) -> None:
        """What was sent arrives, even if its process has ended since, unless another has come."""
        number, life = worker.number, worker.life
        when = self.ways[number, life][0].arrival(self.now, self.draw.uniform(0.0, DELAY))

        def arrive() -> None:
            if self.lives[number] == life:
                self.heard[number].append(what)
                self._hear()

        self._at(when, arrive)

    def _hear(self) -> None:
        """Deal with all that has come, in any order but each worker's own."""
        if self.busy_until > self.now:
            return
        while waiting := [n for n in range(self.count) if self.heard[n]]:
            number = self.draw.choice(waiting)
            found = self.heard[number].popleft()
            if number not in self.protocol.connected:
                continue  # it was let go meanwhile
            if found is None:
                self.protocol.gone(number, self.now)
            else:
                self.joins += isinstance(found[0], Join) and self.protocol.over is None
                self.protocol.receive(number, *found, self.now)
            self._deliver()
            if self.draw.random() < 0.3:
                self.protocol.look(self.now, self.spoken)
                self._deliver()

    def _deliver(self) -> None:
        while self.protocol.proceed(self.now):
            pass
        for number, message, _ in self.protocol.take():
            if number not in self.protocol.connected:
                continue
            self.told(number, message)
            worker, life = self.workers.get(number), self.lives[number]
            if worker is not None:
                way = self.ways[number, life][1]
                self._bring(worker, message, way.arrival(self.now, self.draw.uniform(0.0, DELAY)))
        for number in self.protocol.take_silent():
            self.replaced.add(number)
            self._at(self.now, lambda number=number: self._replace(number))

    def _bring(self, worker: Worker, message: Message, when: float) -> None:
        def arrive() -> None:
            worker.inbox.append(message)
            worker.look()

        self._do_at(worker, when, arrive)

    def told(self, number: int, message: Message) -> None:
        """Something is said to a worker: what must hold at that moment."""
        if isinstance(message, Welcome):
            assert message.incarnation > self.welcomed[number]  # one may not have got through
            self.welcomed[number] = message.incarnation
        if isinstance(message, Go):
            most = 2 * message.steps + self.protocol.settings.ahead + 1  # some may be under way
            assert self.store.leased(number) <= most
        if isinstance(message, Go) and self.slack is not None:
            cells = self.store.cells
            at_work = cells[Row.CLOCK][cells[Row.STATE] == State.ACTIVE]
            assert cells[Row.CLOCK, number] - at_work.min() <= self.slack

    # ------------------------------------------------------------ processes and faults

    def start(self, number: int) -> None:
        """A process begins; what an earlier one said and has not been heard is gone."""
        if self.store.finished:
            return
        self.replaced.discard(number)
        self.lives[number] += 1
        life = self.lives[number]
        self.ways[number, life] = Wire(), Wire()
        self.heard[number].clear()
        worker = self.workers[number] = self.kind(self, number, life)
        self.protocol.disconnect(number)
        self.protocol.connect(number, self.now)
        self._deliver()
        worker.begin()

    def _replace(self, number: int) -> None:
        if number not in self.left:
            self.start(number)

    def _fault(self) -> None:
        if not self.workers or self.store.finished:
            return
        if self.draw.random() < 0.2:
            self.busy_until = self.now + self.draw.uniform(0.0, 2 * PATIENCE)
            self._at(self.busy_until, self._hear)
            return
        worker = self.workers[self.draw.choice(sorted(self.workers))]
        self.strike(worker, self.draw.choice(FAULTS))

    def strike(self, worker: Worker, how: str) -> None:
        number = worker.number
        if how == "silent":
            until = self.now + self.draw.uniform(0.0, 2 * PATIENCE)
            worker.silent_until = max(worker.silent_until, until)
        elif how == "silent for ever":
            worker.silent_until = math.inf  # somebody has to notice, and start another
        elif how == "leaves":
            if number == 0 or worker.wants is Welcome or worker.silent_until > self.now:
                return  # somebody has to stay
            worker._say(Leave())
            worker._say(Goodbye({}))
            self.left.add(number)
            self.end(worker, seen=True)
        else:
            self.end(worker, how == "dies")
            if how == "dies":
                self._carry(worker, None)
            else:  # its machine is cut off: what is under way is lost, and nobody hears of its end
                self.lives[number] += 1
                self.heard[number].clear()
                self.protocol.unreachable(number, self.now)
            if number == 0 or self.draw.random() < 0.5:  # the others may stay away
                back = self.draw.uniform(0.0, 3 * PATIENCE)
                self._at(self.now + back, lambda: self._back(number))

    def end(self, worker: Worker, seen: bool) -> None:
        """A process is gone; unless that is `seen`, nobody hears of it."""
        del self.workers[worker.number]

    def _back(self, number: int) -> None:
        if number not in self.workers and number not in self.left:
            self.start(number)

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """At any time: whoever has asked is answered, and no silence goes unnoticed."""
        for worker in self.workers.values():
            waits = worker.wants not in (None, Wake) and worker.silent_until <= self.now
            begun = self.protocol.run_time.since or 0.0
            since = max(worker.asked_at, worker.silent_until, self.busy_until, begun)
            longest = self.longest(worker.wants)
            assert not waits or self.now - since < longest, (worker.number, worker.wants)
        protocol = self.protocol
        for number in protocol.connected:
            watched = number in protocol.deadline or number in protocol.frozen
            assert watched or self.may_be_silent(number), number

    def longest(self, wanted: type[Message] | None) -> float:
        """That anybody waits for what it wants."""
        free = self.slack is None and not self.barrier and self.protocol.run_time.since is not None
        others = wanted is Go and not free  # whether it may have to wait for them
        return LONGEST if others else 2 * DELAY + 0.1

    def may_be_silent(self, number: int) -> bool:
        """Whether it is not a connected worker's turn; one who never comes back is replaced."""
        if number in self.replaced or number in self.protocol.left:
            return True
        held = number in self.protocol.held_since or number in self.protocol.ready
        return held or self.store.cells[Row.STATE, number] == State.RESTING

    def check_end(self) -> None:
        """Every sample once, every contribution once, one incarnation for each join."""
        ledger = self.store.leases.ledger.summary()
        assert len(ledger) == self.epochs
        counted = recount(self.records.all, self.samples, self.epochs)
        for mine, theirs in zip(counted, ledger, strict=True):
            assert mine["repeated"] == mine["missing"] == 0
            assert theirs["repeated"] == theirs["missing"] == 0
            # What was skipped is in an update too, without its numbers.
            assert mine["applied"] == theirs["applied"] + theirs["skipped"]
            assert mine["dropped"] == theirs["dropped"]
            assert mine["applied"] + mine["dropped"] == self.samples
        parts = [part for record in self.records.of(Updated) for part in record.parts]
        keys = [(part.worker, part.incarnation, part.sequence) for part in parts]
        assert len(set(keys)) == len(keys)
        joined = [(record.worker, record.incarnation) for record in self.records.of(Joined)]
        assert len(set(joined)) == len(joined)
        for worker in range(self.count):
            mine = [incarnation for number, incarnation in joined if number == worker]
            assert mine == list(range(1, len(mine) + 1))
        self.check_joins(len(joined))

    def check_joins(self, joined: int) -> None:
        assert joined == self.joins
