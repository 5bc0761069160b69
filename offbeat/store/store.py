"""The store: it admits a contribution, gathers, weighs, applies, and moves the board."""

from operator import attrgetter
from typing import Any, Protocol

from offbeat.data.lease import Lease, Leases
from offbeat.discipline.course import Course, Turn, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.log.log import Log
from offbeat.log.records import (
    Admitted,
    Dropped,
    EpochDone,
    Joined,
    Left,
    Lost,
    Part,
    Pulled,
    Refused,
    Rested,
    Turned,
    Updated,
)
from offbeat.store import board
from offbeat.store.board import Row, State
from offbeat.store.parameters import Parameters
from offbeat.worker.contribution import (
    ADMITTED,
    DROPPED,
    REFUSED,
    REPEATED,
    Admission,
    Contribution,
    Snapshot,
)

_PRESENT = (State.ACTIVE, State.RESTING)
_GONE = (State.LOST, State.LEFT)
_by_worker = attrgetter("part.worker", "part.sequence")


class Witness(Protocol):
    """Sees every update, so that what the store has learnt survives it."""

    def before(self) -> None:
        """An update is about to be made."""

    def write(self, version: int) -> None:
        """The store is at `version`, and about to record it."""


class Store:
    """The one authority; every call says what time it is, so the store needs no clock of its own.

    A cost-only run has `parameters` that do nothing, as contributions carry no numbers.
    """

    def __init__(
        self,
        course: Course | Discipline,
        workers: int,
        leases: Leases,
        log: Log,
        parameters: Parameters,
        hash_every: int = 1,
        cells: board.Cells | None = None,
        witness: Witness | None = None,
    ):
        """`witness` keeps what has been learnt in a place that outlives this process."""
        self.course = as_course(course)
        self._filled = self.course.for_workers(workers)
        self.stage = 0  # how many turns have been made
        self.cells = board.new_board(workers) if cells is None else cells
        self.rows = board.rows(self.cells)
        self.leases, self.log, self.parameters = leases, log, parameters
        self.hash_every, self.witness = hash_every, witness
        self.pull_bytes = parameters.pull_bytes
        self.version = 0
        self.epoch = 0  # epochs done
        self.settled = 0  # samples that have been dealt with, in all epochs
        self.gives_up = False  # whether samples have been dropped or skipped
        self.gathered: list[Contribution] = []
        self._obey()
        self._low, self._last = board.UNBOUND, 0  # the smallest binding clock, and whose it is
        self._sure = False  # whether these two still hold
        self._moved = False  # whether a waiting worker may have been released
        self._waiting: set[int] = set()  # all who wait, and perhaps some who do no longer

    # ------------------------------------------------------------ the course

    def _obey(self) -> None:
        """Hold to the discipline of this stage."""
        filled, stage = self._filled, self.stage
        self.discipline = filled.stages[stage]
        self._rate = filled.turns[stage - 1].rate or 0.0 if stage else 1.0
        self._next = filled.turns[stage] if stage < len(filled.turns) else None
        send, gather = self.discipline.send, self.discipline.gather
        self._barrier = gather.barrier
        self._single = gather.k == 1
        self._limit = gather.limit
        self._free = not self._barrier and self.discipline.wait is None
        self._steps, self._by_speed = send.local_steps, send.by_speed
        self._hashes = self.discipline.ordered  # else nobody knows what others write meanwhile

    def turn_if_due(self, now: float) -> None:
        """Change the discipline, if it is time; at this moment nothing is gathered.

        What is under way is judged by the new one when it comes, and whoever waits is released
        by it.
        """
        while (turn := self._next) is not None and self._due(turn):
            before = self.discipline.wait
            self.enter_stage(self.stage + 1)
            level = self.discipline.wait not in (None, before)
            if level:  # else the first would wait for all steps of the past
                board.level(self.cells)
            self._look_again()
            self._moved = True
            told = str(self.course.turns[self.stage - 1].discipline)
            self.log.write(Turned(now, self.version, self.stage, told, self._rate, turn.why, level))

    def enter_stage(self, stage: int) -> None:
        """So many turns have been made."""
        self.stage = stage
        self._obey()

    def _look_again(self) -> None:
        """Take who waits, and for whom, from the board."""
        self._waiting = set(self.cells[Row.WAITING].nonzero()[0].tolist())
        self._sure = False

    def _due(self, turn: Turn) -> bool:
        ledger = self.leases.ledger
        samples = ledger.samples * self.leases.epochs
        return turn.due(self.version, self.settled, samples)

    # ------------------------------------------------------------ workers come and go

    def join(self, worker: int, now: float) -> int:
        """Enter or enter again; an earlier incarnation is given up. Returns the incarnation."""
        self._sure = False
        if self.present(worker):
            self.lose(worker, now)
        incarnation = board.enter(self.cells, worker)
        self.parameters.enter(worker)
        averaged = bool(self.parameters.averages.entries)
        clock = int(self.cells[Row.CLOCK, worker])
        self.log.write(Joined(now, worker, incarnation, clock, averaged))
        return incarnation

    def lose(self, worker: int, now: float, why: str = "") -> None:
        """Give `worker` up: its leases go out again and nobody waits for it any more."""
        leases = self._part_with(worker, State.LOST)
        self.log.write(Lost(now, worker, int(self.cells[Row.INCARNATION, worker]), leases, why))
        self._settle(now)

    def leave(self, worker: int, now: float) -> None:
        """`worker` goes of its own accord; otherwise as if it had been lost."""
        leases = self._part_with(worker, State.LEFT)
        self.log.write(Left(now, worker, int(self.cells[Row.INCARNATION, worker]), leases))
        self._settle(now)

    def _part_with(self, worker: int, state: int) -> list[Lease]:
        leases = self.leases.reclaim(worker)
        board.set_state(self.cells, worker, state)
        self.parameters.forget(worker)
        return leases

    def rest(self, worker: int, now: float, wait: float = 0.0, communication: float = 0.0) -> None:
        """`worker` found nothing to do, after this much waiting and talking in vain."""
        board.set_state(self.cells, worker, State.RESTING)
        self.log.write(Rested(now, worker, wait, communication))
        self._settle(now)

    def wake(self) -> list[int]:
        """Resting workers for whom leases have come back, now at work again."""
        if not self.leases.returned:
            return []
        resting = (self.cells[Row.STATE] == State.RESTING).nonzero()[0]
        woken = [int(worker) for worker in resting[: len(self.leases.returned)]]
        for worker in woken:
            board.wake(self.cells, worker)
        self._sure = False
        return woken

    def _settle(self, now: float) -> None:
        """Somebody stopped working: a round may be complete without it, or nobody adds to it."""
        self._sure = False
        last = not board.active(self.cells)
        if self.gathered and (last or self._complete()):
            self._update(now)
        self._moved = True

    # ------------------------------------------------------------ samples

    def lease(self, worker: int) -> Lease | None:
        return self.leases.issue(worker)

    def lost(self, worker: int) -> bool:
        """Whether `worker` has been given up, or has left, and must join again."""
        return self.rows[Row.STATE][worker] in _GONE

    def leased(self, worker: int) -> int:
        """How many leases `worker` holds."""
        return len(self.leases.held.get(worker, ()))

    def working(self, worker: int) -> bool:
        """Whether `worker` is present and does not rest."""
        return self.rows[Row.STATE][worker] == State.ACTIVE

    def active(self) -> int:
        """How many workers are at work."""
        return board.active(self.cells)

    def samples_of(self, worker: int, steps: int) -> int:
        """Samples in the next `steps` leases that `worker` holds."""
        return sum(lease.samples for lease in self.leases.held.get(worker, [])[:steps])

    def next_version(self) -> int:
        """The version that the next update makes."""
        return self.version + 1

    def hashed(self, version: int) -> bool:
        """Whether the log has a hash of this version."""
        return self._hashes and version % self.hash_every == 0

    def present(self, worker: int) -> bool:
        """Whether `worker` has joined and has not been given up since."""
        return self.rows[Row.STATE][worker] in _PRESENT

    @property
    def finished(self) -> bool:
        return self.leases.finished

    @property
    def progress(self) -> int:
        """Batches that a plain loop would have done by now."""
        return self.leases.progress(self.settled)

    @property
    def applied(self) -> int:
        """Samples in applied contributions."""
        return self.leases.ledger.applied

    @property
    def given_up(self) -> int:
        """Samples that were dropped or skipped."""
        ledger = self.leases.ledger
        counts = [*ledger.done, *ledger.lost.values()]
        return sum(c.get("dropped", 0) + c.get("skipped", 0) for c in counts)

    # ------------------------------------------------------------ contributions

    def push(self, contribution: Contribution, now: float) -> Admission:
        """Admit a contribution once, and apply it when enough have been gathered."""
        part, rows = contribution.part, self.rows
        worker = part.worker
        known = part.incarnation == rows[Row.INCARNATION][worker]
        if not known or rows[Row.STATE][worker] not in _PRESENT:
            return self.refuse(worker, part.incarnation, part.sequence, now)
        sequences = rows[Row.SEQUENCE]
        if part.sequence <= sequences[worker]:
            return REPEATED
        sequences[worker] = part.sequence
        # Only a worker that was furthest behind can move the smallest clock by moving its own.
        if self._sure:
            self._sure = rows[Row.BINDING][worker] > self._low
        board.tick(rows, worker, len(part.leases), part.compute)
        self.leases.sizes.measured(worker, part.samples, part.compute)
        part.staleness = self.version - part.base
        part.weight = self.discipline.weigh.factor(part.staleness) * self._rate
        if self._limit is not None and part.staleness > self._limit:
            self._drop(part, now)
            return DROPPED
        self.leases.hand_in(worker, part.leases)
        self.gathered.append(contribution)
        if self._barrier:
            board.contributed(rows, worker)
        if self._single or self._complete():
            self._update(now)
        else:
            self.log.write(Admitted(now, worker, part.incarnation, part.sequence, part.leases))
            self.parameters.wait(contribution)
            if not self._barrier:
                self.keep(contribution)  # its worker goes on and will use the buffer again
        return ADMITTED

    def _drop(self, part: Part, now: float) -> None:
        """Leave a contribution out; its samples go out again if the discipline says so."""
        redo = self.discipline.gather.redo
        self.log.write(Dropped(now, self.version, part, redo))
        if redo:
            self.leases.give_back(part.worker, part.leases)
        else:
            self.gives_up = True
            self.settled += part.samples
            self.close_epochs(self.leases.settle(part.worker, part.leases, "dropped"), now)
        self._moved = True

    def admitted(self, worker: int, incarnation: int, sequence: int) -> bool:
        """Whether this very contribution has been taken before."""
        known = incarnation == self.rows[Row.INCARNATION][worker]
        return known and sequence <= self.rows[Row.SEQUENCE][worker]

    def own_gathered(self, worker: int) -> None:
        """Copy what `worker` has sent that waits for others: its buffers are used again."""
        for one in self.gathered:
            if one.part.worker == worker:
                self.keep(one)

    def keep(self, contribution: Contribution) -> None:
        """Own what waits for others."""
        self.parameters.keep(contribution)

    @property
    def keeps_waiting(self) -> bool:
        """Whether something waits for others that lies in no buffer of its worker any more."""
        return any(one.payload is not None and one.place < 0 for one in self.gathered)

    def refuse(self, worker: int, incarnation: int, sequence: int, now: float) -> Admission:
        """Turn away a contribution of an incarnation that was given up."""
        self.log.write(Refused(now, worker, incarnation, sequence))
        return REFUSED

    def _complete(self) -> bool:
        return self._single or board.complete(self.cells, self.discipline, len(self.gathered))

    def _update(self, now: float) -> None:
        group, self.gathered = self.gathered, []
        if len(group) > 1:  # sorted, so that the sum does not depend on who was faster
            group.sort(key=_by_worker)
        if self.witness is not None:
            # Of the version before nothing else may be left in a moment.
            if any(isinstance(record, Updated) for record in self.log.waiting):
                self.log.flush()
            self.witness.before()
        rate = self.parameters.update(group)
        self.version += 1
        for one in group:
            self.settled += one.part.samples
        if self.witness is not None:
            self.witness.write(self.version)
        record = Updated(now, self.version, [c.part for c in group], rate)
        if self._hashes and self.hashed(self.version):
            record.hash = self.parameters.digest()
        self.parameters.advance(self.version, self.epoch, self.progress)
        self.log.write(record)
        settle = self.leases.ledger.settle
        for part in record.parts:
            if self._barrier:
                board.round_over(self.rows, part.worker)
            self.gives_up |= part.skipped
            closed = settle(part.leases, "skipped" if part.skipped else "applied")
            if closed:
                self.close_epochs(closed, now)
        self._moved |= self._barrier  # under slack only clocks release anybody
        self.leases.sizes.revise()
        if self._next is not None:
            self.turn_if_due(now)

    def close_epochs(self, epochs: list[int], now: float) -> None:
        """These epochs are done, and the schedules may move on."""
        for epoch in epochs:
            self.epoch = epoch + 1
            self.log.write(EpochDone(now, epoch, self.version))
            self.parameters.advance(self.version, self.epoch, self.progress)

    # ------------------------------------------------------------ going on

    def hold(self, worker: int) -> list[int]:
        """`worker` wants to go on; returns all who may go now, itself among them or not."""
        if self._free and not self._waiting:
            return [worker]
        self.rows[Row.WAITING][worker] = 1
        self._waiting.add(worker)
        free = self.released(worker)
        if worker not in free:
            last = board.furthest_behind(self.cells) if self._barrier else self._last
            board.blame(self.rows, worker, last)
        return free

    def released(self, asking: int | None = None) -> list[int]:
        """Waiting workers that may go on since the board last moved, and `asking` if it may."""
        if self._free and not self._waiting:
            return []
        if not self._barrier and not self._sure:
            self._last = board.furthest_behind(self.cells)
            low = self.rows[Row.BINDING][self._last]
            self._moved |= low != self._low
            self._low, self._sure = low, True
        if self._moved and not (len(self._waiting) == 1 and asking in self._waiting):
            free = board.released(self.cells, self.discipline)
        elif asking is not None and board.may_go(self.cells, asking, self.discipline, self._low):
            free = [asking]
        else:
            free = []
        self._moved = False
        if free:  # from here on they are on their way, so that nobody is released twice
            for one in free:
                self.rows[Row.WAITING][one] = 0
            self._waiting.difference_update(free)
        return free

    def pull(self, worker: int, now: float, computed: list[Lease] | None = None) -> Snapshot:
        """The parameters of this version; `computed` are steps done since the last push."""
        board.let_go(self.rows, worker, self.version)
        steps = self._steps
        if self._by_speed:
            steps = board.steps_by_speed(self.cells, worker, steps)
        parameters = self.parameters
        parameters.remember(worker, self.version)
        size = parameters.pulls.bytes_of(worker, self.pull_bytes) + parameters.updater_bytes
        self.log.write(Pulled(now, worker, self.version, computed or [], steps, size))
        updater = parameters.updater_state
        own = parameters.of(worker)
        return Snapshot(self.version, steps, self.epoch, own, updater, self.progress)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "epoch": self.epoch,
            "stage": self.stage,
            "settled": self.settled,
            "board": self.cells[: Row.LINK].tolist(),  # links are made anew
            "low": self._low,
            "moved": self._moved,
            "leases": self.leases.state(),
            "gathered": [[one.part.worker, one.part.leases] for one in self.gathered],
        }

    def begin_again(self) -> None:
        """Nobody has ever been here."""
        self.cells[:] = board.new_board(self.cells.shape[1])

    def vacate(self, now: float) -> None:
        """After a restart nobody is there: what was in flight goes out again."""
        for worker in range(self.cells.shape[1]):
            if self.present(worker):
                self.lose(worker, now)

    def load(self, state: dict[str, Any]) -> None:
        self.version, self.epoch = state["version"], state["epoch"]
        self.enter_stage(state.get("stage", 0))  # runs of before had one discipline throughout
        self.cells[: Row.LINK] = state["board"][: Row.LINK]
        self._low, self._moved = state["low"], state["moved"]
        self._look_again()
        self.leases.load(state["leases"])
        self.settled = state.get("settled", self.applied + self.given_up)

    def load_alone(self, state: dict[str, Any]) -> None:
        """Load without the contributions that waited for others: their leases go out again."""
        self.load(state)
        for _, leases in state["gathered"]:  # not by way of their workers: some may be lost already
            self.leases.returned.extend(Lease(*lease) for lease in leases)
