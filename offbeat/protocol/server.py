"""The server's side of a run: what workers say goes in, answers and deadlines come out.

It knows neither sockets nor clocks. Whoever drives it (the simulator under virtual time, a process
on this machine) tells it what has happened and when, lets workers proceed one by one, and delivers
what it finds in `outgoing`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from offbeat.data.lease import Lease
from offbeat.errors import RunError
from offbeat.protocol.messages import (
    Accepted,
    AskLeases,
    EndRun,
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

FROZEN = 3  # times patience that a silent worker may take to wake before it is replaced
IN_VAIN = 3  # times in a row that one may be given up without a contribution between them


class Authority(Protocol):
    """What the protocol asks of a store; contributions and snapshots pass through unread."""

    version: int

    @property
    def finished(self) -> bool:
        """Whether every sample has been dealt with."""

    def join(self, worker: int, now: float) -> int:
        """Enter or enter again; returns the incarnation."""

    def lose(self, worker: int, now: float, why: str = "") -> None:
        """Give a worker up."""

    def leave(self, worker: int, now: float) -> None:
        """A worker goes of its own accord."""

    def rest(self, worker: int, now: float, wait: float, communication: float) -> None:
        """A worker found nothing to do."""

    def wake(self) -> list[int]:
        """Resting workers for whom there is something to do again."""

    def lease(self, worker: int) -> Lease | None:
        """The next samples for a worker."""

    def leased(self, worker: int) -> int:
        """How many leases a worker holds."""

    def present(self, worker: int) -> bool:
        """Whether a worker has joined and has not been given up since."""

    def working(self, worker: int) -> bool:
        """Whether a worker is present and does not rest."""

    def push(self, contribution: Any, now: float) -> Any:
        """Admit a contribution; says what became of it."""

    def refuse(self, worker: int, incarnation: int, sequence: int, now: float) -> Any:
        """Turn away a contribution of an incarnation that was given up."""

    def own_gathered(self, worker: int) -> None:
        """Copy what a worker has sent that waits for others: its buffers are used again."""

    def hold(self, worker: int) -> list[int]:
        """A worker wants to go on; all who may go now."""

    def released(self) -> list[int]:
        """Waiting workers that may go on since the board last moved."""

    def pull(self, worker: int, now: float, computed: list[Lease]) -> Any:
        """The parameters of this version, for a worker that goes on."""


@dataclass(frozen=True)
class ServerSettings:
    """How a server treats its workers.

    `ahead` is how many leases a worker has beside those of its next steps; None gives out one at a
    time. With `together` the first step begins when everybody is there, or as many as are to
    `begin`. A server that `forgives` gives a worker up any number of times without a contribution
    between them.
    """

    patience: float
    ahead: int | None = 0
    together: bool = True
    begin: int | None = None
    forgives: bool = False
    digits: int | None = 7  # of times in the log; more are noise, and half of its size


# A worker, a message for it, and the parameters that travel beside that, if any do.
Outgoing = tuple[int, Message, Any]


class RunTime:
    """Seconds since a run began: it stands at `start` until the first step."""

    def __init__(self, digits: int | None, running: bool):
        self.start, self.digits = 0.0, digits
        self.since: float | None = 0.0 if running else None

    def at(self, now: float) -> float:
        passed = self.start if self.since is None else self.start + (now - self.since)
        return passed if self.digits is None else round(passed, self.digits)

    def begin(self, now: float) -> None:
        if self.since is None:
            self.since = now


class ServerProtocol:
    """Who is there, whose turn it is, who has been silent for too long, and what each is told."""

    def __init__(
        self,
        store: Authority,
        workers: int,
        settings: ServerSettings,
        why: Callable[[int], str] = lambda worker: "",
    ):
        """`why` says what holds up a worker that is silent, as far as somebody knows."""
        self.store, self.workers, self.settings, self.why = store, workers, settings, why
        self.patience = self.shortest = settings.patience  # until one who is expected is given up
        self.run_time = RunTime(settings.digits, running=not settings.together)
        self.now = self.time = 0.0  # of the event that is dealt with; `time` is the run's
        self.moved = 0.0  # when something last happened, before the store has dealt with it
        self.outgoing: list[Outgoing] = []
        self.to_replace: list[int] = []  # workers that have been silent for very long
        self.connected: set[int] = set()
        self.ready: deque[int] = deque()  # workers that may go on
        self.held_since: dict[int, float] = {}
        self.early: dict[int, float] = {}  # who was held before the run began, and since when
        self.computed: dict[int, list[Lease]] = {}  # steps to be recorded with the next pull
        self.unpushed = [0] * workers  # leases each has told of and not yet pushed
        self.deadline: dict[int, float] = {}  # workers whose turn it is, and until when
        self.not_its_turn: set[int] = set()  # who has a deadline only because its way has broken
        self.frozen: dict[int, float] = {}  # lost workers that may wake, and until when
        self.in_vain = [0] * workers  # times each was given up since it contributed
        self.met: set[int] = set()  # workers that have joined at least once, or died trying
        self.left: set[int] = set()  # workers whose script has left its loop
        self.ended_by: int | None = None  # the worker whose script has ended the run
        self.over: Stop | None = None  # what everyone has been told at the end
        self.goodbyes: dict[int, dict[str, float]] = {}  # what each said at the end
        self.handlers: dict[type[Message], Callable[[int, Any, Any], None]] = {
            Push: self._push,
            Pull: self._pull,
            AskLeases: self._ask,
            Rest: self._rest,
        }

    # ------------------------------------------------------------ what happens

    def connect(self, worker: int, now: float) -> None:
        """A worker can be reached, for the first time or again."""
        self._at(now)
        self.connected.add(worker)
        self.frozen.pop(worker, None)
        if self.over is None:
            self._expect(worker)
        else:  # it was started a moment ago
            self._send(worker, self.over)

    def disconnect(self, worker: int) -> None:
        """A worker cannot be reached any more, and nobody minds."""
        self.connected.discard(worker)
        self.deadline.pop(worker, None)
        self.not_its_turn.discard(worker)
        self.frozen.pop(worker, None)

    def gone(self, worker: int, now: float) -> None:
        """A worker's process has ended: no need to wait for patience to run out."""
        self._at(now)
        self.disconnect(worker)
        if self.over is None:
            self._lose(worker)

    def unreachable(self, worker: int, now: float) -> None:
        """Nothing gets through to a worker any more; it has `patience` to come back."""
        self.connected.discard(worker)
        self.silent_since(worker, now)

    def interrupted(self, worker: int, now: float) -> None:
        """The way to a worker has broken; it has `patience` to be there again, as it was.

        What it is told meanwhile waits for it.
        """
        self._at(now)
        if worker not in self.deadline and self.over is None:
            self.not_its_turn.add(worker)
            self.deadline[worker] = now + self.patience

    def restored(self, worker: int, now: float) -> None:
        """It is there again, and nothing that was said is lost."""
        self._at(now)
        self.frozen.pop(worker, None)
        if self.over is not None:
            return
        if worker in self.met and not self.store.present(worker) and worker not in self.left:
            self._send(worker, Rejoin())  # it may be waiting for an answer that nobody gives
            self.deadline[worker] = now + self.patience
        elif worker in self.not_its_turn:
            del self.deadline[worker]
        elif worker in self.deadline:
            self.deadline[worker] = now + self.patience
        self.not_its_turn.discard(worker)

    def silent_since(self, worker: int, now: float) -> None:
        """From now on nothing is heard of a worker, whether it is its turn or not."""
        self.deadline[worker] = now + self.patience

    def receive(self, worker: int, message: Message, contribution: Any, now: float) -> None:
        """A worker has said something."""
        self.now = now
        self.time = self.moved = self.run_time.at(now)
        handle = self.handlers.get(type(message))
        if self.over is None:
            self.deadline.pop(worker, None)
            if self.not_its_turn:
                self.not_its_turn.discard(worker)
            if handle is None:
                self._comes_or_goes(worker, message)
            elif self._counts(worker):
                handle(worker, message, contribution)
            else:
                self._turn_away(worker, message)
        elif isinstance(message, Goodbye):
            self._said_goodbye(worker, message)

    def _comes_or_goes(self, worker: int, message: Message) -> None:
        if isinstance(message, Goodbye):
            self._said_goodbye(worker, message)
        elif isinstance(message, Join):
            self.frozen.pop(worker, None)
            self._join(worker)
        elif isinstance(message, EndRun):
            self.ended_by = worker
        elif isinstance(message, Leave):
            self.left.add(worker)
            self._lose(worker)

    def _said_goodbye(self, worker: int, message: Goodbye) -> None:
        self.goodbyes[worker] = message.figures
        self.disconnect(worker)

    def proceed(self, now: float) -> bool:
        """Let the next worker go on that may; False when there is none."""
        if now > self.now:
            self._answers_begin(now)
        if self.run_time.since is None:
            if len(self.met) < (self.settings.begin or self.workers):
                return False  # the first step begins when everybody is there
            self.run_time.begin(now)
            self.time = self.run_time.at(now)
        while self.ready:
            worker = self.ready.popleft()
            if worker in self.connected:
                go, snapshot = self._go(worker)
                self.outgoing.append((worker, go, snapshot))
                self._expect(worker)
                return True
        return False

    def settle(self) -> bool:
        """Whether what tests and checkpoints read is there, and nobody writes it."""
        return True

    def dismiss(self) -> None:
        """Tell everyone that it is over; from here on only goodbyes count."""
        self.over = Stop(self.store.finished or self.ended, self.store.version)
        self.deadline.clear()
        for worker in sorted(self.connected):
            self._send(worker, self.over)

    @property
    def ended(self) -> bool:
        """Whether scripts have decided that it is over: one for all, or each for itself."""
        alone = len(self.left) == self.workers and self.left <= self.goodbyes.keys()
        return self.ended_by is not None or alone

    def take_silent(self) -> list[int]:
        """Workers that have been silent for very long, and are to be replaced."""
        silent, self.to_replace = self.to_replace, []
        return silent

    def take(self) -> list[Outgoing]:
        """What is to be delivered."""
        out, self.outgoing = self.outgoing, []
        return out

    def _at(self, now: float) -> None:
        """Somebody may be held or released by this; what the store then takes is not waiting."""
        self.now, self.time = now, self.run_time.at(now)
        self.moved = self.time

    def _answers_begin(self, now: float) -> None:
        """The store has taken its time; whoever is answered now has not been silent meanwhile."""
        since, until = self.now + self.patience, now + self.patience
        self.deadline = {w: until if at == since else at for w, at in self.deadline.items()}
        self.now, self.time = now, self.run_time.at(now)

    # ------------------------------------------------------------ the path of a gradient

    def _join(self, worker: int) -> None:
        self.store.own_gathered(worker)
        self._forget_turn(worker)
        incarnation = self.store.join(worker, self.time)
        self.met.add(worker)
        self.left.discard(worker)
        self.goodbyes.pop(worker, None)
        self.unpushed[worker] = 0
        self._send(worker, Welcome(incarnation))
        self._board_moved()
        self._expect(worker)
        self._wake_resting()

    def _forget_turn(self, worker: int) -> None:
        """The turn of an earlier incarnation is not this one's."""
        while worker in self.ready:
            self.ready.remove(worker)
        self.held_since.pop(worker, None)
        self.early.pop(worker, None)
        self.computed.pop(worker, None)

    def _push(self, worker: int, message: Push, contribution: Any) -> None:
        verdict = self.store.push(contribution, self.time)
        if not verdict.counts:
            if verdict.refused:
                self._send(worker, Rejoin())
            if worker not in self.held_since:  # a repeated one may already wait for its answer
                self._expect(worker)
            return
        self.in_vain[worker] = 0
        self.unpushed[worker] = len(message.ahead)
        if message.pull:
            self._want(worker, message.ahead)
        else:
            self._send(worker, Accepted(self._top_up(worker)))
            self._expect(worker)
            self._board_moved()

    def _pull(self, worker: int, message: Pull, contribution: Any) -> None:
        self.unpushed[worker] += len(message.computed)
        if message.waits:
            self._want(worker, message.computed)
        else:
            self.computed[worker] = message.computed
            self.ready.append(worker)

    def _ask(self, worker: int, message: AskLeases, contribution: Any) -> None:
        self._send(worker, Leased(self._top_up(worker, at_least=1)))
        self._expect(worker)

    def _rest(self, worker: int, message: Rest, contribution: Any) -> None:
        self.store.rest(worker, self.time, message.wait, message.communication)
        self._board_moved()
        self._wake_resting()

    def _want(self, worker: int, computed: list[Lease]) -> None:
        if computed:
            self.computed[worker] = computed
        self.held_since[worker] = self.time
        if self.run_time.since is None:
            self.early[worker] = self.now
        self.ready.extend(self.store.hold(worker))

    def _go(self, worker: int) -> tuple[Go, Any]:
        """A worker's turn: what it pulls, and the message that goes with it."""
        computed = self.computed.pop(worker, None) or []
        snapshot = self.store.pull(worker, self.time, computed)
        held = self.held_since.pop(worker, None)
        waited = 0.0 if held is None else self.moved - held
        # One that does not wait for others exchanges first, and asks when it needs samples.
        one = self.settings.ahead is None and held is not None
        leases = self._top_up(worker, snapshot.steps, int(one))
        go = Go(snapshot.version, snapshot.steps, snapshot.epoch, leases, waited)
        go.progress = snapshot.progress
        if self.early:
            go.before = max(0.0, self.now - self.early.pop(worker, self.now))
        return go, snapshot

    def _top_up(self, worker: int, steps: int = 0, at_least: int = 0) -> list[Lease]:
        """Leases for `steps` steps and some ahead, less what the worker still has."""
        missing, ahead = at_least, self.settings.ahead
        if ahead is not None:
            has = self.store.leased(worker) - self.unpushed[worker]
            missing = max(at_least, steps + ahead - has)
        found: list[Lease] = []
        while len(found) < missing and (lease := self.store.lease(worker)) is not None:
            found.append(lease)
        return found

    def _board_moved(self) -> None:
        self.ready.extend(self.store.released())

    # ------------------------------------------------------------ the silent and the dead

    def _expect(self, worker: int) -> None:
        """It is the worker's turn; after `patience` without a word it counts as lost.

        Not later than that if it has been silent before: what is said to it is no sign of life.
        """
        if self.not_its_turn:
            self.not_its_turn.discard(worker)
        self.deadline.setdefault(worker, self.now + self.patience)

    def next_deadline(self, now: float, spoken: Callable[[int], bool]) -> float | None:
        """When somebody's time runs out next; whoever has `spoken` will be heard before."""
        waits = (*self.deadline.items(), *self.frozen.items())
        return min((at for worker, at in waits if at > now or not spoken(worker)), default=None)

    def look(self, now: float, spoken: Callable[[int], bool]) -> None:
        """Go on without those whose time has run out, and see who has not woken since.

        Nobody is silent of whom something has come that has not been dealt with yet (`spoken`).
        """
        self._at(now)
        for worker in self._overdue(self.deadline, spoken):
            del self.deadline[worker]
            self.not_its_turn.discard(worker)
            self.frozen[worker] = now + FROZEN * self.patience
            why = self.why(worker)
            self._count_in_vain(worker, why)
            self._lose(worker, why)
        for worker in self._overdue(self.frozen, spoken):
            del self.frozen[worker]
            self.to_replace.append(worker)

    def _overdue(self, ends: dict[int, float], spoken: Callable[[int], bool]) -> list[int]:
        return [worker for worker, at in ends.items() if at <= self.now and not spoken(worker)]

    def _counts(self, worker: int) -> bool:
        """Whether a worker takes part; one that was given up has to join again."""
        return self.store.present(worker)

    def _turn_away(self, worker: int, message: Message) -> None:
        """One that was given up speaks as if nothing had happened: it has to join again."""
        self.frozen.pop(worker, None)
        if isinstance(message, Push):
            part = message.part
            self.store.refuse(worker, part.incarnation, part.sequence, self.time)
        self._send(worker, Rejoin())
        self._expect(worker)

    def _count_in_vain(self, worker: int, why: str) -> None:
        """One that is given up before every contribution would go on like that for ever."""
        if self.settings.forgives or not self.store.working(worker):
            return
        self.in_vain[worker] += 1
        if self.in_vain[worker] >= IN_VAIN:
            reason = f" ({why})" if why else ""
            raise RunError(
                f"worker {worker} was silent for longer than patience ({self.patience:g} s) "
                f"{IN_VAIN} times in a row before it could contribute: if its steps take that "
                f"long, pass a larger patience; if not, look for what holds it up{reason}"
            )

    def _lose(self, worker: int, why: str = "") -> None:
        self.met.add(worker)  # nobody waits for one that died before it joined
        if self.store.present(worker):
            self._forget_turn(worker)
            self.store.own_gathered(worker)
            if worker in self.left:
                self.store.leave(worker, self.time)
            else:
                self.store.lose(worker, self.time, why)
            self._board_moved()
            self._wake_resting()

    def _wake_resting(self) -> None:
        for worker in self.store.wake():
            self._send(worker, Wake())
            self._expect(worker)

    def _send(self, worker: int, message: Message, snapshot: Any = None) -> None:
        self.outgoing.append((worker, message, snapshot))
