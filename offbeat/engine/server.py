"""The server process: packets in, the store's answers out, parameters written by nobody else."""

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from offbeat.board import Row, State
from offbeat.contribution import Contribution, Verdict
from offbeat.engine.answers import Answers
from offbeat.errors import RunError
from offbeat.lease import Lease
from offbeat.link.memory import Counts, Shared, without
from offbeat.link.messages import (
    Again,
    Ask,
    Bye,
    End,
    Go,
    Join,
    Leased,
    Leave,
    Message,
    Packets,
    Pull,
    Push,
    Rest,
    Stop,
    Took,
    Wake,
    Welcome,
    encode,
    to_store,
)
from offbeat.store.core import Store

FROZEN = 3  # times patience that a silent worker may take to wake before it is replaced
IN_VAIN = 3  # times in a row that one may be given up without a contribution between them


class Watch:
    """The run's clock: it stands at `start` until everybody is there."""

    def __init__(self, start: float = 0.0):
        self.start = start
        self.since: float | None = None

    def __call__(self) -> float:
        passed = 0.0 if self.since is None else time.monotonic() - self.since
        return round(self.start + passed, 7)  # more digits are noise, and half of the log

    def go(self) -> None:
        if self.since is None:
            self.since = time.monotonic()


class Server:
    """Serves the workers of one machine, one packet at a time, until every sample is done."""

    quiet = True  # whether nobody is writing what tests and checkpoints read

    def __init__(self, store: Store, shared: Shared, patience: float, ahead: int, clock: Watch):
        self.store, self.shared, self.patience = store, shared, patience
        self.shortest = patience  # seconds from when one is expected until one is given up
        self.ahead, self.clock = ahead, clock  # leases that a worker has beside the one in hand
        self.packets = Packets()
        self.wires: dict[int, socket.socket] = {}
        self.answers = Answers(len(shared.slots))
        self.ready: deque[int] = deque()
        self.held_since: dict[int, float] = {}
        self.computed: dict[int, list[Lease]] = {}  # steps to be told with the next pull
        self.unpushed = [0] * len(shared.slots)  # leases each has told of and not yet pushed
        self.pulls = [0] * len(shared.slots)
        self.deadline: dict[int, float] = {}  # workers whose turn it is, and until when
        self.frozen: dict[int, float] = {}  # lost workers that may wake, and until when
        self.in_vain = [0] * len(shared.slots)  # times each was given up since it contributed
        self.met: set[int] = set()  # workers that have joined at least once
        self.left: set[int] = set()  # workers whose script has left its loop
        self.ended_by: int | None = None  # the worker whose script has ended the run
        self.over: Stop | None = None  # what everyone has been told at the end
        self.words: dict[int, dict[str, float]] = {}  # what each said at the end
        self.silent: Callable[[int], None] = lambda number: None  # told when one is frozen
        self.give: Callable[[int, int], None] = (
            self._give
        )  # copies what is pulled into a worker's slot
        self.handlers: dict[type[Message], Callable[..., None]] = {
            Push: self._push,
            Pull: self._pull,
            Ask: self._ask,
            Rest: self._rest,
        }

    # ------------------------------------------------------------ packets

    def connect(self, number: int, wire: socket.socket) -> None:
        """A worker's wire; a new one takes the place of one that is dead."""
        self.disconnect(number)
        self.wires[number] = wire
        if self.over is None:
            self._expect(number)
        else:  # it was started a moment ago
            self._send(number, self.over)

    def disconnect(self, number: int) -> None:
        """Hear no more of this wire; whoever listens to it closes it."""
        old = self.wires.pop(number, None)
        if old is not None:
            with suppress(OSError):  # its other end may be gone
                old.shutdown(socket.SHUT_RDWR)
        self.deadline.pop(number, None)
        self.frozen.pop(number, None)

    def hear(self, number: int) -> None:
        """Take the next packet from a worker's wire, and deal with it."""
        packet = self.packets.receive(self.wires[number])
        if packet:
            self._receive(number, to_store(packet))
        else:  # the process is gone: no need to wait for patience to run out
            self.disconnect(number)
            if self.over is None:
                self._lose(number)
        if self.ready:
            self._drain()

    def unsaid(self) -> list[int]:
        """Who is to be sent something as soon as others have the floor; it is on record by then."""
        due = self.answers.take()
        if due:
            self.store.log.flush()
        return due

    def _receive(self, number: int, message: Message) -> None:
        if isinstance(message, Bye):
            self.words[number] = message.figures
            self.disconnect(number)
        elif isinstance(message, End) and self.over is None:
            self.deadline.pop(number, None)
            self.ended_by = number
        elif isinstance(message, Leave) and self.over is None:
            self.deadline.pop(number, None)
            self.left.add(number)
            self._lose(number)
        elif self.over is None:
            self.deadline.pop(number, None)
            if self.frozen:
                self.frozen.pop(number, None)
            if isinstance(message, Join):
                self._join(number)
            elif self.store.present(number):
                self.handlers[type(message)](number, message)
            else:
                self._turn_away(number, message)

    def dismiss(self) -> None:
        """Tell everyone that it is over; from here on only last words count."""
        self.over = Stop(self.store.finished or self.ended)
        self.deadline.clear()
        for number in list(self.wires):
            self._send(number, self.over)

    @property
    def ended(self) -> bool:
        """Whether scripts have decided that it is over: one for all, or each for itself."""
        alone = len(self.left) == len(self.shared.slots) and self.left <= self.words.keys()
        return self.ended_by is not None or alone

    def _turn_away(self, number: int, message: Message) -> None:
        """One that was given up speaks as if nothing had happened: it has to join again."""
        if isinstance(message, Push):
            part = message.part
            self.store.refuse(number, part.incarnation, part.sequence, self.clock())
        self._send(number, Again())
        self._expect(number)

    # ------------------------------------------------------------ the path of a gradient

    def _join(self, number: int) -> None:
        self._keep_gathered(number)
        while number in self.ready:  # an earlier incarnation's turn, before everybody was there
            self.ready.remove(number)
        incarnation = self.store.join(number, self.clock())
        assert self.store.parameters is not None
        self.store.parameters.averages.write(self.shared.slots[number].statistics.views)
        self.met.add(number)
        self.left.discard(number)
        self.words.pop(number, None)
        self.unpushed[number] = 0
        self._send(number, Welcome(incarnation))
        self._board_moved()
        self._expect(number)
        self._wake_resting()

    def _push(self, number: int, message: Push) -> None:
        slot, part = self.shared.slots[number], message.part
        statistics: dict[str, Tensor] = {}
        if slot.statistics.views and not part.skipped:
            # Its own: it may wait for others, and the worker goes on.
            statistics = slot.statistics.clone().views
        contribution = Contribution(
            part,
            slot.outgoing[message.place] if message.place >= 0 else None,
            None,
            frozenset(message.absent),
            statistics,
            without(slot.updater.views, message.lacking),
            message.place,
        )
        self.unpushed[number] = 0
        verdict = self.store.push(contribution, self.clock())
        counts = self.shared.counts
        counts[Counts.APPLIED] = self.store.applied
        if verdict is Verdict.DROPPED or part.skipped:
            counts[Counts.GIVEN_UP] = self.store.given_up
        if verdict is Verdict.REFUSED:
            self._send(number, Again())
            self._expect(number)
            return
        self.in_vain[number] = 0
        if message.pull:
            self.unpushed[number] = len(message.ahead)
            self._want(number, message.ahead)
        else:
            self._send(number, Took(self._top_up(number)))
            self._expect(number)
            self._board_moved()

    def _pull(self, number: int, message: Pull) -> None:
        self.unpushed[number] += len(message.computed)
        if message.waits:
            self._want(number, message.computed)
        else:
            self.computed[number] = message.computed
            self.ready.append(number)

    def _ask(self, number: int, message: Ask) -> None:
        self._send(number, Leased(self._top_up(number, at_least=1)))
        self._expect(number)

    def _rest(self, number: int, message: Rest) -> None:
        self.store.rest(number, self.clock(), message.wait, message.communication)
        self._board_moved()
        self._wake_resting()

    def _want(self, number: int, computed: list[Lease]) -> None:
        self.computed[number] = computed
        self.held_since[number] = self.clock()
        self.ready.extend(self.store.hold(number))

    def _drain(self) -> None:
        if self.clock.since is None:
            if len(self.met) < len(self.shared.slots):
                return  # the first step begins when everybody is there
            self.clock.go()
        now = self.clock()
        while self.ready:
            number = self.ready.popleft()
            if number in self.wires and not self.store.lost(number):
                self._send(number, self._go(number, now))
                self._expect(number)

    def _go(self, number: int, now: float) -> Go:
        """A worker's turn: what it pulls lies in its slot, and this goes with it."""
        snapshot = self.store.pull(number, now, self.computed.pop(number, []))
        # Where there are two places, it computes in the other one meanwhile.
        place = self.pulls[number] % len(self.shared.slots[number].incoming)
        self.pulls[number] += 1
        self.give(number, place)
        waited = now - self.held_since.pop(number, now)
        leases = self._top_up(number, snapshot.steps)
        parameters = self.store.parameters
        assert parameters is not None
        go = Go(snapshot.version, snapshot.steps, snapshot.epoch, leases, waited, place, False)
        if parameters.updater_bytes > 0:  # of all processes that hold the store
            go.updater, go.lacking = (
                True,
                parameters.unlearnt(self.shared.slots[number].updater.views),
            )
        return go

    def _give(self, number: int, place: int) -> None:
        parameters = self.store.parameters
        assert parameters is not None
        slot = self.shared.slots[number]
        slot.put(place, parameters.held, parameters.of(number), parameters.updater_state)

    def _top_up(self, number: int, steps: int = 0, at_least: int = 0) -> list[Lease]:
        """Leases for `steps` steps and some ahead, less what the worker still has."""
        has = len(self.store.leases.held.get(number, ())) - self.unpushed[number]
        missing = max(at_least, steps + self.ahead - has)
        found: list[Lease] = []
        while len(found) < missing and (lease := self.store.lease(number)) is not None:
            found.append(lease)
        return found

    def _board_moved(self) -> None:
        self.ready.extend(self.store.released())

    # ------------------------------------------------------------ the silent and the dead

    def _expect(self, number: int) -> None:
        """It is the worker's turn; after `patience` without a word it counts as lost."""
        self.deadline[number] = time.monotonic() + self.patience

    def patience_left(self, now: float) -> float | None:
        """Seconds until somebody's time has run out; whoever has spoken will be heard before."""
        waits = (*self.deadline.items(), *self.frozen.items())
        ends = [at for number, at in waits if at > now or not self.spoken(number)]
        return max(0.0, min(ends) - now) if ends else None

    def give_up_the_silent(self, now: float) -> None:
        """Go on without those whose time has run out, and tell who has not woken since."""
        for number in self._overdue(self.deadline, now):
            del self.deadline[number]
            self.frozen[number] = now + FROZEN * self.patience
            why = self.shared.posts[number].told()
            self._count_in_vain(number, why)
            self._lose(number, why)
        for number in self._overdue(self.frozen, now):
            del self.frozen[number]
            self.silent(number)
        if self.ready:
            self._drain()

    def _overdue(self, ends: dict[int, float], now: float) -> list[int]:
        """Whose end has come, and who has said nothing that is still to be heard."""
        return [n for n, at in ends.items() if at <= now and not self.spoken(n)]

    def spoken(self, number: int) -> bool:
        """Whether something lies in the worker's wire: perhaps the server has been stopped."""
        wire = self.wires.get(number)
        if wire is None:
            return False
        with suppress(ConnectionError):
            try:
                wire.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
        return True

    def _count_in_vain(self, number: int, why: str) -> None:
        """One that is given up before every contribution would go on like that for ever."""
        if self.store.cells.item(Row.STATE, number) != State.ACTIVE:
            return
        self.in_vain[number] += 1
        if self.in_vain[number] >= IN_VAIN:
            raise RunError(
                f"worker {number} was silent for longer than patience ({self.patience:g} s) "
                f"{IN_VAIN} times in a row before it could contribute: if its steps take that "
                f"long, pass a larger patience; if not, look for what holds it up{_inside(why)}"
            )

    def _lose(self, number: int, why: str = "") -> None:
        self.met.add(number)  # nobody waits for one that died before it joined
        if self.store.present(number):
            self._keep_gathered(number)
            if number in self.left:
                self.store.leave(number, self.clock())
            else:
                self.store.lose(number, self.clock(), why)
            self._board_moved()
            self._wake_resting()

    def _keep_gathered(self, number: int) -> None:
        """What waits in an unfinished round is copied: a next incarnation will use the slot."""
        for one in self.store.gathered:
            if one.part.worker == number:
                self.store.keep(one)

    def _wake_resting(self) -> None:
        for number in self.store.wake():
            self._send(number, Wake())
            self._expect(number)

    def _send(self, number: int, message: Message) -> None:
        wire = self.wires.get(number)
        if wire is not None:
            self.answers.put(number, wire, encode(message))


def _inside(why: str) -> str:
    return f" ({why})" if why else ""
