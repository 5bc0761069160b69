"""Stale-synchronous parallel: nobody begins a step more than `slack` clocks ahead of the slowest.

The convention: a worker's clock is the number of steps whose contributions the store has taken
in. A step begins at a pull. At that moment the worker's clock is at most `slack` more than the
smallest clock among the workers that the store counts as at work; the lost and the resting hold
up nobody. A worker that enters, or wakes, is put level with the slowest.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.log.records import Joined, Lost, Pulled, Rested, Updated
from offbeat.store.board import Row, State
from tests.contract.common import Records, clusters, examples, problem, run, seeds
from tests.contract.real import AtStep, Gate, OpenWhen


class Clocks(Records):
    """Follows clocks from the records alone, and notes how far ahead each step begins.

    The board is compared where records are seen as they are written. In real time that is not so;
    and a worker wakes from rest some time before it pulls, of which the log says nothing, so that
    clocks are followed until then.
    """

    def __init__(self, engine: str) -> None:
        super().__init__()
        self.virtual, self.blind = engine == "sim", False
        self.clock: dict[int, int] = {}
        self.working: set[int] = set()
        self.ahead: list[int] = []
        self.ahead_on_board: list[int] = []

    def see(self, record: Any) -> None:
        super().see(record)
        if self.blind:
            return
        if isinstance(record, Joined):
            self.clock[record.worker] = record.clock
            self.working.add(record.worker)
        elif isinstance(record, Updated):
            for part in record.parts:
                self.clock[part.worker] += len(part.leases)
        elif isinstance(record, Lost | Rested):
            self.working.discard(record.worker)
        elif isinstance(record, Pulled):
            self._begins(record.worker)

    def _begins(self, worker: int) -> None:
        others = [self.clock[w] for w in self.working if w != worker]
        if worker not in self.working and not self.virtual:
            self.blind = True
            return
        if worker not in self.working and others:  # it woke from rest
            self.clock[worker] = max(self.clock[worker], min(others))
        self.working.add(worker)
        mine = self.clock[worker]
        self.ahead.append(mine - min([mine, *others]))
        if not self.virtual:
            return
        cells = self.store.cells
        at_work = cells[Row.CLOCK][cells[Row.STATE] == State.ACTIVE]
        self.ahead_on_board.append(int(cells[Row.CLOCK, worker] - at_work.min()))


@examples(20)
@given(clusters(), st.integers(0, 4), seeds)
def test_nobody_begins_a_step_further_ahead_than_slack(engine, cluster, slack, seed):
    clocks = Clocks(engine)
    run(engine, problem(), ob.SSP(slack), cluster=cluster, seed=seed, listeners=[clocks])
    assert clocks.ahead
    assert max(clocks.ahead + clocks.ahead_on_board) <= slack


@examples(25)
@given(clusters(faults=True, least=2), st.integers(0, 3), seeds)
def test_slack_holds_whatever_dies_stops_or_comes_late(engine, cluster, slack, seed):
    clocks = Clocks(engine)
    discipline = ob.ASUP(slack=slack, lr=0.002) if seed % 2 else ob.SSP(slack)
    run(engine, problem(samples=40), discipline, cluster=cluster, seed=seed, listeners=[clocks])
    assert max(clocks.ahead + clocks.ahead_on_board) <= slack


def test_slack_is_used_up_by_a_fast_worker(engine):
    """The bound is tight: with one slow worker the fast one runs exactly `slack` ahead."""
    for slack in (0, 1, 3):
        assert _furthest(engine, ob.SSP(slack), slack + 1) == slack


def test_without_slack_the_fast_worker_runs_away(engine):
    assert _furthest(engine, ob.ASP(), 5) > 3


def _furthest(engine: str, discipline: ob.Discipline, steps: int) -> int:
    """How far ahead a worker comes of one that is slow: a real one waits for its `steps`."""
    clocks, what, gate = Clocks(engine), problem(samples=48), Gate()
    if engine == "local":
        what = what._replace(loss=AtStep(what.loss, {(1, 1): gate.wait}))

    def enough(record: Any) -> bool:
        return isinstance(record, Updated) and record.version == steps

    listeners = [clocks, OpenWhen(gate, enough)]
    run(engine, what, discipline, cluster="10ms,200ms", listeners=listeners)
    return max(clocks.ahead)


@examples(15)
@given(clusters(faults=True, least=2), seeds)
def test_clocks_in_the_log_are_the_clocks_on_the_board(sim_only, cluster, seed):
    """Where time stands still while a record is seen, the board can be compared with it."""
    clocks = Clocks(sim_only)
    run(sim_only, problem(), ob.SSP(2), cluster=cluster, seed=seed, listeners=[clocks])
    assert clocks.ahead == clocks.ahead_on_board
