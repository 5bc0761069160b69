"""The board's rules are pure functions of an array, wherever that array lies."""

from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.store import board
from offbeat.store.board import NOBODY, UNBOUND, Cells, Row, State

Make = Callable[[int], Cells]


@pytest.fixture(params=["plain", "many", "bytes", "shared"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Boards in ordinary memory, as if of many workers, over a plain buffer, in shared memory."""
    if request.param == "many":
        monkeypatch.setattr(board, "FEW", 0)
    segments: list[shared_memory.SharedMemory] = []

    def build(workers: int) -> Cells:
        fresh = board.new_board(workers)
        if request.param in ("plain", "many"):
            return fresh
        buffer: Any = bytearray(fresh.nbytes)
        if request.param == "shared":
            segments.append(shared_memory.SharedMemory(create=True, size=fresh.nbytes))
            buffer = segments[-1].buf
        cells: Cells = np.frombuffer(buffer, dtype=np.int64, count=fresh.size)
        cells = cells.reshape(fresh.shape)
        cells[:] = fresh
        return cells

    yield build
    for segment in segments:
        # The arrays over it are gone or belong to the test; only the name must not stay behind.
        segment.unlink()
        try:
            segment.close()
        except BufferError:
            segment._buf = None  # type: ignore[attr-defined]
            segment._mmap = None  # type: ignore[attr-defined]


def started(make: Make, clocks: list[int]) -> Cells:
    cells = make(len(clocks))
    for worker in range(len(clocks)):
        board.enter(cells, worker)
    for worker, clock in enumerate(clocks):
        board.tick(board.rows(cells), worker, clock, 0.0)
    return cells


def waiting(cells: Cells, *workers: int) -> None:
    cells[Row.WAITING, list(workers)] = 1


def test_a_new_board_binds_nobody(make: Make) -> None:
    cells = make(3)
    assert cells.dtype == np.int64
    assert board.slowest(cells) == UNBOUND
    assert board.active(cells) == 0
    assert (cells[Row.SEQUENCE] == -1).all()
    assert (cells[Row.BLOCKER] == NOBODY).all()
    assert (cells[Row.STATE] == State.ABSENT).all()


def test_slack_says_who_waits_for_whom(make: Make) -> None:
    cells = started(make, [5, 2, 4, 3])
    ssp = ob.SSP(2)
    assert board.slowest(cells) == 2
    assert [board.may_go(cells, w, ssp) for w in range(4)] == [False, True, True, True]
    assert board.blockers(cells, 0, ssp) == [1]
    assert board.blockers(cells, 2, ssp) == []
    assert board.blockers(cells, 0, ob.SSP(0)) == [1, 3, 2]
    assert board.blockers(cells, 2, ob.SSP(0)) == [1, 3]


def test_slack_is_exactly_the_distance_allowed(make: Make) -> None:
    cells = started(make, [3, 0])
    assert board.may_go(cells, 0, ob.SSP(3))
    assert not board.may_go(cells, 0, ob.SSP(2))
    assert board.may_go(cells, 0, ob.ASP())
    assert board.blockers(cells, 0, ob.ASP()) == []


def test_the_slowest_releases_those_in_reach(make: Make) -> None:
    cells = started(make, [3, 0, 2])
    waiting(cells, 0, 2)
    ssp = ob.SSP(1)
    assert board.released(cells, ssp) == []
    board.tick(board.rows(cells), 1, 1, 0.0)
    assert board.released(cells, ssp) == [2]
    board.tick(board.rows(cells), 1, 1, 0.0)
    assert board.released(cells, ssp) == [0, 2]
    board.let_go(board.rows(cells), 2, 7)
    assert board.released(cells, ssp) == [0]
    assert cells[Row.VERSION, 2] == 7


def test_whoever_waits_blames_the_slowest(make: Make) -> None:
    cells = started(make, [4, 3, 1])
    waiting(cells, 0)
    board.blame(board.rows(cells), 0, board.furthest_behind(cells))
    assert cells[Row.BLOCKER, 0] == 2
    board.let_go(board.rows(cells), 0, 0)
    assert cells[Row.BLOCKER, 0] == NOBODY


def test_a_barrier_waits_for_all_that_are_at_work(make: Make) -> None:
    cells = started(make, [1, 0, 0])
    board.contributed(board.rows(cells), 0)
    bsp = ob.BSP()
    assert not board.may_go(cells, 0, bsp)
    assert board.may_go(cells, 1, bsp)
    assert board.blockers(cells, 0, bsp) == [1, 2]
    assert not board.complete(cells, bsp, 1)
    board.contributed(board.rows(cells), 1)
    board.contributed(board.rows(cells), 2)
    assert board.complete(cells, bsp, 3)
    waiting(cells, 0, 1)
    assert board.released(cells, bsp) == []
    cells[Row.PENDING] = 0
    assert board.released(cells, bsp) == [0, 1]


def test_nothing_gathered_is_never_complete(make: Make) -> None:
    assert not board.complete(make(2), ob.BSP(), 0)
    assert not board.complete(make(2), ob.SoftSync(1), 0)


def test_backup_workers_make_a_smaller_round(make: Make) -> None:
    cells = started(make, [1, 1, 0, 0])
    cells[Row.PENDING, [0, 1]] = 1
    assert board.complete(cells, ob.BSP(backup=2), 2)
    assert not board.complete(cells, ob.BSP(backup=1), 2)


def test_a_count_is_a_count_whoever_sends(make: Make) -> None:
    cells = started(make, [9, 0, 0])
    assert not board.complete(cells, ob.SoftSync(2), 1)
    assert board.complete(cells, ob.SoftSync(2), 2)


@pytest.mark.parametrize("state", [State.LOST, State.RESTING])
def test_the_lost_and_the_resting_bind_nobody(make: Make, state: Any) -> None:
    cells = started(make, [6, 1, 4])
    ssp = ob.SSP(2)
    assert not board.may_go(cells, 0, ssp)
    board.set_state(cells, 1, state)
    assert board.slowest(cells) == 4
    assert board.may_go(cells, 0, ssp)
    assert board.blockers(cells, 0, ob.SSP(0)) == [2]
    assert board.active(cells) == 2
    board.contributed(board.rows(cells), 0)
    board.contributed(board.rows(cells), 2)
    assert board.complete(cells, ob.BSP(), 2)


def test_a_clock_that_binds_nobody_stays_unbound(make: Make) -> None:
    cells = started(make, [1, 1])
    board.set_state(cells, 1, State.RESTING)
    board.tick(board.rows(cells), 1, 3, 0.0)
    assert cells[Row.CLOCK, 1] == 4
    assert board.slowest(cells) == 1


def test_the_last_one_at_work_waits_for_nobody(make: Make) -> None:
    cells = started(make, [9, 0])
    board.set_state(cells, 1, State.LOST)
    assert board.may_go(cells, 0, ob.SSP(0))
    board.set_state(cells, 0, State.RESTING)
    waiting(cells, 0)
    assert board.released(cells, ob.SSP(0)) == [0]


def test_whoever_stops_working_neither_waits_nor_pends(make: Make) -> None:
    cells = started(make, [2, 0])
    waiting(cells, 0)
    cells[Row.BLOCKER, 0], cells[Row.PENDING, 0] = 1, 1
    board.set_state(cells, 0, State.RESTING)
    assert (cells[Row.WAITING, 0], cells[Row.BLOCKER, 0]) == (0, NOBODY)
    assert cells[Row.PENDING, 0] == 1  # what it sent still counts
    board.set_state(cells, 0, State.LOST)
    assert cells[Row.PENDING, 0] == 0


def test_a_late_joiner_starts_level_with_the_slowest(make: Make) -> None:
    cells = make(3)
    board.enter(cells, 0)
    board.enter(cells, 1)
    board.tick(board.rows(cells), 0, 7, 0.0)
    board.tick(board.rows(cells), 1, 5, 0.0)
    assert board.enter(cells, 2) == 1
    assert cells[Row.CLOCK, 2] == 5
    assert board.may_go(cells, 0, ob.SSP(2))


def test_coming_back_is_a_new_incarnation_with_nothing_left_of_the_old(make: Make) -> None:
    cells = started(make, [3, 6])
    cells[Row.SEQUENCE, 0], cells[Row.PENDING, 0] = 2, 1
    waiting(cells, 0)
    board.set_state(cells, 0, State.LOST)
    assert board.enter(cells, 0) == 2
    assert cells[Row.INCARNATION, 0] == 2
    assert cells[Row.CLOCK, 0] == 6
    assert cells[Row.SEQUENCE, 0] == -1
    assert (cells[Row.WAITING, 0], cells[Row.PENDING, 0]) == (0, 0)


def test_coming_back_alone_keeps_the_clock(make: Make) -> None:
    cells = started(make, [3])
    board.set_state(cells, 0, State.LOST)
    board.enter(cells, 0)
    assert cells[Row.CLOCK, 0] == 3


def test_waking_holds_up_nobody(make: Make) -> None:
    cells = started(make, [2, 8])
    board.set_state(cells, 0, State.RESTING)
    board.wake(cells, 0)
    assert cells[Row.CLOCK, 0] == 8
    assert board.may_go(cells, 1, ob.SSP(0))


def test_the_longest_step_is_that_of_the_slowest_at_work(make: Make) -> None:
    cells = started(make, [0, 0, 0])
    cells[Row.STEP_US] = [100, 300, 200]
    assert board.longest_step(cells) == 300
    board.set_state(cells, 1, State.LOST)
    assert board.longest_step(cells) == 200
    cells[Row.STEP_US, 0] = 0  # not known yet
    assert board.longest_step(cells) == 0
    board.set_state(cells, 0, State.RESTING)
    board.set_state(cells, 2, State.RESTING)
    assert board.longest_step(cells) == 0


def test_steps_by_speed_take_about_equal_time(make: Make) -> None:
    cells = started(make, [0, 0, 0])
    assert board.steps_by_speed(cells, 0, 50) == 50  # nothing measured yet
    board.tick(board.rows(cells), 0, 10, 0.2)
    board.tick(board.rows(cells), 1, 10, 0.8)
    assert board.steps_by_speed(cells, 0, 50) == 50
    assert board.steps_by_speed(cells, 1, 50) == 12
    assert board.steps_by_speed(cells, 2, 50) == 50
    board.tick(board.rows(cells), 2, 1, 1000.0)
    assert board.steps_by_speed(cells, 2, 50) == 1


def test_only_workers_at_work_set_the_speed(make: Make) -> None:
    cells = started(make, [0, 0])
    board.tick(board.rows(cells), 0, 1, 0.01)
    board.tick(board.rows(cells), 1, 1, 0.04)
    assert board.steps_by_speed(cells, 1, 8) == 2
    board.set_state(cells, 0, State.LOST)
    assert board.steps_by_speed(cells, 1, 8) == 8


def test_the_measured_step_is_smoothed(make: Make) -> None:
    cells = started(make, [0])
    board.tick(board.rows(cells), 0, 2, 0.002)
    assert cells[Row.STEP_US, 0] == 1000
    board.tick(board.rows(cells), 0, 1, 0.002)
    assert cells[Row.STEP_US, 0] == 1250
    board.tick(board.rows(cells), 0, 0, 5.0)
    assert cells[Row.STEP_US, 0] == 1250


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 2, 3])), min_size=1, max_size=6),
    st.integers(0, 4),
)
def test_waiting_and_releasing_agree(workers: list[tuple[int, int]], slack: int) -> None:
    """A waiting worker is released exactly if it may go, and exactly if it has no blockers."""
    cells = board.new_board(len(workers))
    for number in range(len(workers)):
        board.enter(cells, number)
    for number, (clock, state) in enumerate(workers):
        board.tick(board.rows(cells), number, clock, 0.0)
        board.set_state(cells, number, state)  # type: ignore[arg-type, unused-ignore]
    at_work = [n for n, (_, state) in enumerate(workers) if state == State.ACTIVE]
    cells[Row.WAITING, at_work] = 1
    before = cells.copy()
    ssp = ob.SSP(slack)
    may = [n for n in at_work if board.may_go(cells, n, ssp)]
    assert board.released(cells, ssp) == may
    for discipline in (ssp, ob.BSP(), ob.ASP()):
        few = board.released(cells, discipline)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(board, "FEW", 0)
            assert board.released(cells, discipline) == few
    assert [n for n in at_work if not board.blockers(cells, n, ssp)] == may
    if at_work:
        low = min(at_work, key=lambda n: workers[n][0])
        assert low in may
    assert (cells == before).all()
