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
from offbeat.board import Row, State
from offbeat.log import Joined, Lost, Pulled, Rested, Updated
from tests.contract.common import Records, clusters, examples, problem, run, seeds


class Clocks(Records):
    """Follows clocks from the records alone, and notes how far ahead each step begins."""

    def __init__(self) -> None:
        super().__init__()
        self.clock: dict[int, int] = {}
        self.working: set[int] = set()
        self.ahead: list[int] = []
        self.ahead_on_board: list[int] = []

    def see(self, record: Any) -> None:
        super().see(record)
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
        if worker not in self.working and others:  # it woke from rest
            self.clock[worker] = max(self.clock[worker], min(others))
        self.working.add(worker)
        mine = self.clock[worker]
        self.ahead.append(mine - min([mine, *others]))
        cells = self.store.cells
        at_work = cells[Row.CLOCK][cells[Row.STATE] == State.ACTIVE]
        self.ahead_on_board.append(int(cells[Row.CLOCK, worker] - at_work.min()))


@examples(20)
@given(clusters(), st.integers(0, 4), seeds)
def test_nobody_begins_a_step_further_ahead_than_slack(engine, cluster, slack, seed):
    clocks = Clocks()
    run(engine, problem(), ob.SSP(slack), cluster=cluster, seed=seed, listeners=[clocks])
    assert clocks.ahead
    assert max(clocks.ahead) <= slack
    assert max(clocks.ahead_on_board) <= slack


@examples(25)
@given(clusters(faults=True, least=2), st.integers(0, 3), seeds)
def test_slack_holds_whatever_dies_stops_or_comes_late(engine, cluster, slack, seed):
    clocks = Clocks()
    discipline = ob.ASUP(slack=slack, lr=0.002) if seed % 2 else ob.SSP(slack)
    run(engine, problem(samples=40), discipline, cluster=cluster, seed=seed, listeners=[clocks])
    assert max(clocks.ahead) <= slack
    assert max(clocks.ahead_on_board) <= slack


def test_slack_is_used_up_by_a_fast_worker(engine):
    """The bound is tight: with one slow worker the fast one runs exactly `slack` ahead."""
    for slack in (0, 1, 3):
        clocks = Clocks()
        run(engine, problem(samples=48), ob.SSP(slack), cluster="10ms,200ms", listeners=[clocks])
        assert max(clocks.ahead) == slack


def test_without_slack_the_fast_worker_runs_away(engine):
    clocks = Clocks()
    run(engine, problem(samples=48), ob.ASP(), cluster="10ms,200ms", listeners=[clocks])
    assert max(clocks.ahead) > 3


@examples(15)
@given(clusters(faults=True, least=2), seeds)
def test_clocks_in_the_log_are_the_clocks_on_the_board(engine, cluster, seed):
    clocks = Clocks()
    run(engine, problem(), ob.SSP(2), cluster=cluster, seed=seed, listeners=[clocks])
    assert clocks.ahead == clocks.ahead_on_board
