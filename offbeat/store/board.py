"""Everyone's progress in one small array, and the pure rules that read it: who waits for whom."""

import numpy as np
from numpy.typing import NDArray

from offbeat.discipline.discipline import Discipline

Cells = NDArray[np.int64]
Rows = list[memoryview]
NOBODY = -1
FEW = 16  # workers of whom Python finds out sooner one by one than NumPy does all at once
UNBOUND = int(np.iinfo(np.int64).max)


class Row:
    """What the array holds of each worker; one row is contiguous, so a minimum is one fast pass.

    Plain numbers, not an Enum: they are looked up many times for every event.
    """

    STATE = 0  # see State
    CLOCK = 1  # steps finished
    BINDING = 2  # the clock while others must wait for this worker, UNBOUND while they need not
    VERSION = 3  # the store's version at its last pull
    INCARNATION = 4  # how many times it has joined
    SEQUENCE = 5  # number of its last admitted contribution
    PENDING = 6  # 1 while its contribution waits in an unfinished round
    WAITING = 7  # 1 while it wants to go on and may not
    BLOCKER = 8  # whom it waits for, or NOBODY
    STEP_US = 9  # microseconds one of its steps takes, smoothed
    LINK = 10  # what its link to the store does now, see LinkState; 0 where there is none
    ROUND_TRIP_US = 11  # microseconds there and back, 0 while that is not known
    UP = 12  # bytes a second of large transfers to the store
    DOWN = 13  # and from it
    COUNT = 14  # how many rows there are


class State:
    """What a worker is, as the store sees it."""

    ABSENT = 0
    ACTIVE = 1  # has a lease, or is on its way to one
    RESTING = 2  # nothing to do now; wakes if a lease comes back
    LOST = 3  # silent for longer than patience
    LEFT = 4  # its script has left its loop


class LinkState:
    """What the link of a worker on another host does, as the store sees it."""

    IDLE = 0
    SENDING = 1  # a contribution is coming
    RECEIVING = 2  # parameters are going
    BROKEN = 3  # it has broken, and may be made again


def new_board(workers: int) -> Cells:
    """An array for `workers`; any int64 array of this shape serves, one in shared memory too."""
    cells = np.zeros((Row.COUNT, workers), dtype=np.int64)
    cells[Row.BINDING] = UNBOUND
    cells[Row.SEQUENCE] = -1
    cells[Row.BLOCKER] = NOBODY
    return cells


def rows(cells: Cells) -> Rows:
    """The rows one by one: a number is read and written there in a third of NumPy's time."""
    return [memoryview(row) for row in cells]


# ---------------------------------------------------------------- rules: read only


def slowest(cells: Cells) -> int:
    """The smallest clock among the workers that bind others; UNBOUND if there is none."""
    clocks = cells[Row.BINDING]
    return min(clocks.tolist()) if len(clocks) <= FEW else int(clocks.min())


def furthest_behind(cells: Cells) -> int:
    """Which worker has that clock; the first of several, and any one if nobody binds others."""
    clocks = cells[Row.BINDING]
    if len(clocks) > FEW:
        return int(clocks.argmin())
    known: list[int] = clocks.tolist()
    return known.index(min(known))


def active(cells: Cells) -> int:
    """How many workers are at work."""
    return int(np.count_nonzero(cells[Row.STATE] == State.ACTIVE))


def complete(cells: Cells, discipline: Discipline, gathered: int) -> bool:
    """Do `gathered` contributions make one update now? A group that lost members asks for fewer."""
    if not discipline.gather.barrier:
        return gathered >= discipline.gather.k
    backup = discipline.gather.backup
    if backup and gathered >= cells.shape[1] - backup:
        return True
    return gathered > 0 and slowest(cells) == UNBOUND


def may_go(cells: Cells, worker: int, discipline: Discipline, low: int | None = None) -> bool:
    """May `worker` begin another step?

    Under a barrier: when its contribution has been dealt with. Under slack: when its clock is at
    most `wait` ahead of the slowest worker that binds others (`low`, if that is already known).
    """
    if discipline.gather.barrier:
        return not cells.item(Row.PENDING, worker)
    if discipline.wait is None:
        return True
    low = slowest(cells) if low is None else low
    return bool(cells.item(Row.CLOCK, worker) - low <= discipline.wait)


def blockers(cells: Cells, worker: int, discipline: Discipline) -> list[int]:
    """Whom `worker` waits for, the furthest behind first."""
    if may_go(cells, worker, discipline):
        return []
    if discipline.gather.barrier:
        behind = cells[Row.BINDING] != UNBOUND
    else:
        assert discipline.wait is not None
        behind = cells[Row.BINDING] < cells[Row.CLOCK, worker] - discipline.wait
    found = np.flatnonzero(behind)
    return [int(other) for other in found[np.argsort(cells[Row.CLOCK, found], kind="stable")]]


def released(cells: Cells, discipline: Discipline) -> list[int]:
    """The waiting workers that may go on now, in the order of their numbers."""
    barrier = discipline.gather.barrier
    if cells.shape[1] <= FEW:
        waits = enumerate(cells[Row.WAITING].tolist())
        if barrier:
            pending = cells[Row.PENDING].tolist()
            return [worker for worker, one in waits if one and not pending[worker]]
        low = slowest(cells)
        return [worker for worker, one in waits if one and may_go(cells, worker, discipline, low)]
    waiting = cells[Row.WAITING] == 1
    if barrier:
        waiting &= cells[Row.PENDING] == 0
    elif discipline.wait is not None:
        low = slowest(cells)
        if low != UNBOUND:
            waiting &= cells[Row.CLOCK] <= low + discipline.wait
    return [int(worker) for worker in np.flatnonzero(waiting)]


def longest_step(cells: Cells) -> int:
    """Microseconds of a step of the slowest worker at work; 0 as long as one is not known."""
    times = cells[Row.STEP_US, cells[Row.STATE] == State.ACTIVE]
    return int(times.max()) if times.size and times.all() else 0


def steps_by_speed(cells: Cells, worker: int, every: int) -> int:
    """Local steps for `worker` so that it spends about the time the fastest spends on `every`."""
    times = cells[Row.STEP_US]
    known = times[(times > 0) & (cells[Row.STATE] == State.ACTIVE)]
    if not times[worker] or not known.size:
        return every
    return max(1, int(every * int(known.min()) // int(times[worker])))


# ---------------------------------------------------------------- moves: the store alone makes them


def enter(cells: Cells, worker: int) -> int:
    """Join or rejoin: a new incarnation, level with the slowest so that it holds up nobody."""
    level = slowest(cells)
    known = cells[Row.CLOCK, worker] if level == UNBOUND else level
    incarnation = int(cells[Row.INCARNATION, worker]) + 1
    cells[:, worker] = new_board(1)[:, 0]
    cells[Row.INCARNATION, worker] = incarnation
    cells[Row.CLOCK, worker] = known
    set_state(cells, worker, State.ACTIVE)
    return incarnation


def set_state(cells: Cells, worker: int, state: int) -> None:
    """Only a worker at work binds the others."""
    at_work = state == State.ACTIVE
    cells[Row.STATE, worker] = state
    cells[Row.BINDING, worker] = cells[Row.CLOCK, worker] if at_work else UNBOUND
    if not at_work:
        cells[Row.WAITING, worker] = 0
        cells[Row.BLOCKER, worker] = NOBODY
    if state in (State.LOST, State.LEFT):
        cells[Row.PENDING, worker] = 0


def tick(rows: Rows, worker: int, steps: int, seconds: float) -> None:
    """`worker` finished `steps` steps that took `seconds` of computing."""
    clock = rows[Row.CLOCK][worker] + steps
    rows[Row.CLOCK][worker] = clock
    if rows[Row.BINDING][worker] != UNBOUND:
        rows[Row.BINDING][worker] = clock
    if steps:
        measured = round(seconds * 1e6 / steps)
        before = rows[Row.STEP_US][worker]
        rows[Row.STEP_US][worker] = (before * 3 + measured) // 4 if before else measured


def contributed(rows: Rows, worker: int) -> None:
    """`worker` has done its part of a round, so nobody waits for it until the round is over."""
    rows[Row.PENDING][worker] = 1
    rows[Row.BINDING][worker] = UNBOUND


def round_over(rows: Rows, worker: int) -> None:
    """The round `worker` contributed to has been applied."""
    rows[Row.PENDING][worker] = 0
    if rows[Row.STATE][worker] == State.ACTIVE:
        rows[Row.BINDING][worker] = rows[Row.CLOCK][worker]


def level(cells: Cells) -> None:
    """From here on everybody who binds others is as far as the slowest, so nobody is ahead."""
    bound = cells[Row.BINDING] != UNBOUND
    cells[Row.CLOCK, bound] = cells[Row.BINDING, bound] = slowest(cells)


def blame(rows: Rows, worker: int, other: int) -> None:
    """Note whom a waiting worker waits for: the one furthest behind, if it binds others."""
    rows[Row.BLOCKER][worker] = NOBODY if rows[Row.BINDING][other] == UNBOUND else other


def let_go(rows: Rows, worker: int, version: int) -> None:
    """`worker` goes on with the parameters of `version`."""
    rows[Row.WAITING][worker] = 0
    rows[Row.BLOCKER][worker] = NOBODY
    rows[Row.VERSION][worker] = version


def wake(cells: Cells, worker: int) -> None:
    """A resting worker gets to work again, level with the slowest so that it holds up nobody."""
    level = slowest(cells)
    if level != UNBOUND:
        cells[Row.CLOCK, worker] = max(level, int(cells[Row.CLOCK, worker]))
    set_state(cells, worker, State.ACTIVE)
