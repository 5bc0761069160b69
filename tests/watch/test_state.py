"""How a run stands, as the log tells it: who waits for whom, curves, counts, events."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.data.lease import Lease
from offbeat.engine.sim.compute_times import distribution
from offbeat.log.records import (
    Dropped,
    EpochDone,
    Evaluated,
    Linked,
    Lost,
    Measured,
    Record,
    Refused,
    Rested,
    Turned,
)
from offbeat.store.board import LinkState, Row, State, blockers, new_board
from offbeat.watch.picture import BARS, POINTS, Curve, LivePicture, bars, flow
from offbeat.watch.state import EVENTS, ROWS, RunState, blocking
from tests.contract.common import problem, run
from tests.watch.common import join, part, pull, push, update


def seen(*records: Any, workers: int = 3) -> RunState:
    state = RunState(workers, "a run")
    for record in records:
        state.see(record)
    return state


def shown(state: RunState, now: float | None = None, over: str = "") -> LivePicture:
    return state.picture(state.time if now is None else now, state.trained, 0, 100, over)


def words(picture: LivePicture) -> list[str]:
    return [f"{row.state} {row.about}".strip() for row in picture.rows]


HERE = [join(0), join(1), join(2)]
BEGUN = [*HERE, pull(0, 0.0), pull(1, 0.0), pull(2, 0.0)]

# ---------------------------------------------------------------- who waits for whom


def test_workers_are_missing_then_starting_then_computing():
    assert words(shown(seen())) == ["not there yet"] * 3
    state = seen(join(0), join(1), pull(1, 0.0))
    assert words(shown(state)) == ["starting", "computing", "not there yet"]
    assert shown(state).states == {"starting": 1, "computing": 1, "not there yet": 1}


def test_a_turn_is_told_and_levels_clocks_where_slack_begins():
    ahead = [update(1.0 + n, n + 1, part(0, n)) for n in range(3)]
    free = seen(*BEGUN, *ahead, Turned(4.0, 3, 1, "soft:2", 0.5, "version 3 is reached"))
    (event,) = shown(free).events
    assert (event.kind, event.text) == (
        "turn", "from here on soft:2, rate × 0.5: version 3 is reached",
    )  # fmt: skip
    assert [row.clock for row in shown(free).rows] == [3, 0, 0]
    bound = seen(*BEGUN, *ahead, Turned(4.0, 3, 1, "ssp:1", 1.0, "version 3 is reached", True))
    assert [row.clock for row in shown(bound).rows] == [0, 0, 0]
    assert shown(bound).events[0].text == "from here on ssp:1: version 3 is reached"


def test_in_a_round_one_waits_for_all_that_have_not_contributed():
    state = seen(*BEGUN, push(0, 1.0))
    assert words(shown(state, 1.5)) == [
        "waiting for worker 1 (clock 0, 1 behind) and 1 more", "computing", "computing",
    ]  # fmt: skip
    state.see(push(1, 2.0))
    told = "waiting for worker 2 (clock 0, 1 behind)"
    assert words(shown(state, 2.5)) == [told, told, "computing"]


def test_under_slack_one_waits_for_the_furthest_behind():
    steps = [(i, update(1.0 + i, i + 1, part(0, i)), pull(0, 1.0 + i)) for i in range(3)]
    state = seen(*BEGUN, update(0.5, 1, part(1)), pull(1, 0.5))
    for _, done, on in steps:
        state.see(done)
        state.see(on)
    state.see(update(4.0, 5, part(0, 3)))
    assert words(shown(state, 4.5))[0] == "waiting for worker 2 (clock 0, 4 behind)"


def test_in_a_round_one_waits_for_the_missing_whatever_their_clocks():
    ahead = [join(0), join(1), join(2, clock=5), pull(0, 0.0), pull(1, 0.0), pull(2, 0.0)]
    state = seen(*ahead, push(0, 1.0), push(1, 1.5))
    assert words(shown(state, 2.0))[:2] == ["waiting for worker 2 (clock 5)"] * 2


def test_when_the_round_is_over_nobody_waits_whatever_the_clocks():
    behind = [join(0, clock=3), join(1, clock=3), join(2), *BEGUN[3:]]
    state = seen(*behind, push(1, 1.0), update(2.0, 1, part(0), part(1), part(2)))
    assert words(shown(state, 2.5))[1] == "computing"


def test_nobody_waits_for_one_that_is_level():
    state = seen(*BEGUN, update(1.0, 1, part(0)), pull(0, 1.0), update(2.0, 2, part(1)))
    state.see(pull(1, 2.0))
    state.see(update(3.0, 3, part(2)))
    assert words(shown(state, 4.0)) == ["computing"] * 3


def test_between_a_contribution_and_a_pull_at_once_nobody_waits():
    state = seen(*BEGUN, update(1.0, 1, part(0)))
    assert words(shown(state)) == ["computing"] * 3


def test_one_that_goes_on_without_a_pull_does_not_wait():
    state = seen(*BEGUN, update(1.0, 1, part(0)), update(2.0, 2, part(0, 1)))
    assert words(shown(state, 2.5))[0] == "computing"


def test_a_lost_worker_says_who_waited_for_it_and_how_long():
    state = seen(*BEGUN, push(0, 1.0), push(2, 1.5), Lost(3.0, 1, 1, [Lease(0, 4, 12)]))
    picture = shown(state)
    assert words(picture)[1] == "lost (workers 0 and 2 waited 2 s for it)"
    assert [event.text for event in picture.events] == [
        "worker 1 was lost; workers 0 and 2 waited 2 s for it; 8 samples go out again"
    ]
    assert picture.counts["lost"] == 1
    assert picture.counts["reissued"] == 8


def test_nobody_waits_for_one_that_has_contributed_or_is_ahead():
    state = seen(*BEGUN, push(0, 1.0), push(1, 1.5), Lost(3.0, 1, 1, []))
    assert "nobody waited" in shown(state).events[-1].text
    state = seen(*BEGUN, update(1.0, 1, part(1)), pull(1, 1.0), update(2.0, 2, part(0)))
    state.see(Lost(3.0, 1, 1, []))  # level with the one that waits, which waits for worker 2
    assert "nobody waited" in shown(state).events[-1].text


def test_one_that_died_while_it_waited_is_waited_for_in_the_next_round():
    state = seen(*BEGUN, push(0, 1.0), push(1, 1.5), update(2.0, 1, part(0), part(1), part(2)))
    for record in (pull(0, 2.0), pull(2, 2.0), push(0, 3.0, 1), push(2, 3.5, 1)):
        state.see(record)
    told = "waiting for worker 1 (clock 1, 1 behind)"
    assert words(shown(state, 4.0)) == [told, "computing", told]
    state.see(Lost(5.0, 1, 1, []))
    assert words(shown(state))[1] == "lost (workers 0 and 2 waited 2 s for it)"


def test_one_that_comes_back_is_a_new_incarnation_with_its_old_count():
    lost = Lost(2.0, 1, 1, [])
    state = seen(*BEGUN, update(1.0, 1, part(1)), lost, Refused(2.5, 1, 1, 1), join(1, 3.0, 2, 7))
    picture = shown(state)
    assert words(picture)[1] == "starting"
    assert (picture.rows[1].clock, picture.rows[1].contributions) == (7, 1)
    assert [event.kind for event in picture.events] == ["lost", "refused", "joined"]
    assert picture.events[-1].text == "worker 1 joined again, as incarnation 2"
    # What the old one had sent before does not move the new one's clock.
    state.see(update(3.5, 2, part(1, 1)))
    assert shown(state).rows[1].clock == 7


def test_soft_rounds_count_each_contribution_once_and_nobody_waits():
    state = seen(*BEGUN, push(0, 1.0, 0), pull(0, 1.0), push(0, 2.0, 1), pull(0, 2.0))
    state.see(update(3.0, 1, part(0, 0), part(0, 1), part(1)))
    picture = shown(state)
    assert [row.clock for row in picture.rows] == [2, 1, 0]
    assert words(picture)[0] == "computing"


def test_at_the_end_all_are_done_but_the_lost():
    state = seen(*BEGUN, Lost(1.0, 1, 1, []), Rested(2.0, 0))
    assert words(shown(state)) == ["resting", "lost", "computing"]
    assert words(shown(state, over="finished")) == ["done", "lost", "done"]
    assert words(shown(state, over="stopped")) == ["stopped", "lost", "stopped"]


class Beside(ob.Listener):
    """Compares what the log says of waiting with the board, whenever time moves on."""

    def __init__(self) -> None:
        self.state: RunState | None = None
        self.waits = 0

    def begin(self, store: Any, samples: int) -> None:
        self.store, self.state = store, RunState(store.cells.shape[1])

    def see(self, record: Record) -> None:
        assert self.state is not None
        if record.time > self.state.time:
            self.compare(record)
        self.state.see(record)  # type: ignore[arg-type]

    def compare(self, record: Any) -> None:
        assert self.state is not None
        # The board has already moved for whom the record is about.
        about = [record, *getattr(record, "parts", ()), getattr(record, "part", None)]
        named = {getattr(one, "worker", None) for one in about}
        at_work = self.state.at_work()
        for participant in self.state.states:
            if participant.number in named:
                continue
            waits = bool(self.store.cells[Row.WAITING, participant.number])
            assert participant.waits(record.time) == waits
            assert participant.clock == self.store.cells[Row.CLOCK, participant.number]
            lost = self.store.cells[Row.STATE, participant.number] == State.LOST
            assert (participant.state == "lost") == lost
            if waits:
                self.waits += 1
                first = blocking(participant, at_work)[0].number
                known = blockers(self.store.cells, participant.number, self.store.discipline)
                assert first in {*known, *named}


@pytest.mark.parametrize("sync", ["bsp", "ssp:1", "ssp:3", "local:2", "bsp:backup=1"])
def test_the_log_says_of_waiting_what_the_board_knows(sync: str) -> None:
    beside, what = Beside(), problem(samples=48)
    machines = [ob.Machine(distribution(time)) for time in ("10ms", "25ms", "70ms")]
    # The slowest, which never waits: a dead one is let go without a word in the log.
    machines[2] = ob.Machine(distribution("70ms"), failures=(ob.Failure(0.2, returns_after=0.3),))
    cluster = ob.Cluster(machines, patience=0.1)
    run("sim", what, sync, cluster=cluster, epochs=3, listeners=[beside])
    assert beside.waits


# ---------------------------------------------------------------- figures


def test_counts_and_figures_come_from_the_records():
    state = seen(
        *BEGUN,
        update(1.0, 1, part(0, loss=2.0, staleness=1), part(1, loss=None), part(2, skipped=True)),
        Dropped(1.5, 1, part(0, 1, samples=3)),
        Dropped(1.5, 1, part(0, 2, samples=5), redo=True),
        EpochDone(2.0, 0, 1),
        Evaluated(2.0, 1, 8, 0.7, 0.5),
        Evaluated(2.5, 1, 8, None),
    )
    picture = shown(state)
    wanted = {"applied": 8, "dropped": 3, "skipped": 4, "reissued": 5, "refused": 0, "lost": 0}
    assert picture.counts == wanted
    assert (picture.loss, picture.test_loss, picture.accuracy) == (2.0, None, None)
    assert picture.curves["loss"] == [(1.0, 2.0)]
    assert picture.curves["test_loss"] == [(2.0, 0.7)]
    assert picture.curves["accuracy"] == [(2.0, 0.5)]
    assert picture.staleness == pytest.approx(1 / 3)
    assert picture.bars == [(0, 0, 2), (1, 1, 1)]
    assert (picture.version, picture.epochs, picture.done) == (1, 1, 0.08)


def test_a_worker_on_another_host_says_from_where_it_comes():
    state = seen(Linked(0.5, 1, "lab2", 0.0213, 4), join(1))
    assert shown(state).events[0].text == ("worker 1 calls from lab2, round trip 21 ms")


def board(*links: int) -> Any:
    cells = new_board(len(links))
    cells[Row.LINK] = links
    cells[Row.ROUND_TRIP_US], cells[Row.UP], cells[Row.DOWN] = 21_300, 250_000, 0
    return cells


AFAR = [Linked(0.0, n, "lab2", 0.02, 4) for n in range(3)]


def test_one_that_waits_for_its_link_does_not_wait_for_a_worker():
    state = seen(*AFAR, *BEGUN, push(0, 1.0))
    cells = board(LinkState.IDLE, LinkState.SENDING, LinkState.RECEIVING)
    picture = state.picture(1.5, 0, 0, 100, "", cells)
    assert words(picture) == [
        "waiting for worker 1 (clock 0, 1 behind, in its link) and 1 more",
        "in its link (sending)", "in its link (receiving)",
    ]  # fmt: skip
    assert picture.states == {"waiting": 1, "in its link": 2}
    assert [row.link for row in picture.rows] == ["21 ms, ↑ 250 kB/s"] * 3
    assert picture.linked
    broken = state.picture(1.5, 0, 0, 100, "", board(0, LinkState.BROKEN, 0))
    assert words(broken)[1] == "in its link (out of reach)"
    over = state.picture(1.5, 0, 0, 100, "finished", cells)
    assert words(over) == ["done"] * 3


def test_one_whose_exchange_is_hidden_computes_all_the_same():
    state = RunState(3, overlaps=True)
    for record in (*AFAR, *BEGUN):
        state.see(record)
    picture = state.picture(1.5, 0, 0, 100, "", board(LinkState.SENDING, 0, 0))
    assert words(picture) == ["computing (sending)", "computing", "computing"]


def test_where_nobody_is_on_another_host_there_are_no_links():
    state = seen(*BEGUN)
    picture = state.picture(1.5, 0, 0, 100, "", board(LinkState.SENDING, 0, 0))
    assert not picture.linked
    assert words(picture) == ["computing"] * 3
    assert {row.link for row in picture.rows} == {""}


def test_what_a_link_measures_is_no_event_and_passes_no_time():
    state = seen(*AFAR, *BEGUN)
    told = state.told
    state.see(Measured(0.0, 1, 0.02, 100, 200))
    assert state.told == told


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ((0, 0, 0), ""),
        ((250, 0, 0), "0.25 ms"),
        ((21_300, 999, 1_250_000), "21 ms, ↑ 999 B/s, ↓ 1.25 MB/s"),
        ((0, 0, 2 * 10**9), "↓ 2 GB/s"),
    ],
)
def test_a_link_in_figures(figures: tuple[int, int, int], told: str) -> None:
    assert flow(*figures) == told


def test_a_late_test_does_not_turn_time_back():
    state = seen(*BEGUN, update(2.0, 1, part(0)), Evaluated(1.0, 1, 4, 0.7, 0.5))
    assert shown(state).time == 2.0


def test_one_that_is_woken_is_level_with_the_slowest():
    state = seen(*BEGUN, Rested(0.5, 0), update(1.0, 1, part(1)), pull(1, 1.0))
    state.see(update(2.0, 2, part(2)))
    state.see(pull(2, 2.0))
    state.see(pull(0, 3.0))
    assert [row.clock for row in shown(state).rows] == [1, 1, 1]


def test_the_speed_is_that_of_the_last_looks():
    state = seen(*BEGUN)
    for step in range(1, 41):
        state.see(update(float(step), step, part(0, step, samples=4 if step < 20 else 40)))
        picture = shown(state)
    assert picture.rate == pytest.approx(40.0)
    assert picture.curves["rate"][0] == (2.0, 4.0)


def test_a_run_that_is_over_at_once_has_a_speed_all_the_same():
    assert shown(seen(*BEGUN, update(0.5, 1, part(0))), over="finished").rate == 8.0


def test_a_store_that_goes_back_takes_its_curves_with_it():
    state = seen(*BEGUN, *(update(t, t, part(0, t)) for t in range(1, 6)))
    state.see(update(3.5, 3, part(0, 9, loss=5.0)))
    assert [time for time, _ in shown(state).curves["loss"]] == [1.0, 2.0, 3.0, 3.5]
    assert shown(state).version == 3


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=2000))
def test_a_curve_stays_short_and_keeps_its_mean(values: list[float]) -> None:
    curve = Curve(limit=16)
    for time, value in enumerate(values):
        curve.add(float(time), value)
    assert len(curve.points) < 16
    times = [time for time, _ in curve.points]
    assert times == sorted(times)
    whole = len(curve.points) * curve.step
    assert whole + curve.count == len(values)
    if curve.points:
        mean = sum(value for _, value in curve.points) / len(curve.points)
        assert mean == pytest.approx(sum(values[:whole]) / whole, rel=1e-3, abs=0.02)


@given(st.lists(st.integers(0, 10_000), max_size=200))
def test_bars_hold_every_value_once(values: list[int]) -> None:
    found = bars(values)
    assert len(found) <= BARS
    assert sum(count for _, _, count in found) == len(values)
    for low, high, count in found:
        assert count == sum(low <= value <= high for value in values)


def test_however_long_the_run_the_picture_is_bounded():
    state = RunState(workers=5 * ROWS)
    for worker in range(5 * ROWS):
        state.see(join(worker))
        state.see(pull(worker, 0.0))
    for step in range(1, 3000):
        state.see(update(float(step), step, part(0, step)))
        state.see(pull(0, float(step)))
        state.see(Evaluated(float(step), step, 8, 0.7, 0.5))
        if step % 20 == 0:
            state.see(Lost(float(step), 400, 1, []))
            state.see(join(400, float(step), step))
    state.see(Lost(3000.0, 400, 1, []))
    picture = shown(state)
    assert all(len(points) <= POINTS for points in picture.curves.values())
    assert picture.curves["accuracy"][-1][0] == 2999.0
    assert len(picture.events) == EVENTS
    assert len(picture.rows) == ROWS
    assert 400 in [row.number for row in picture.rows]
    assert picture.workers == 5 * ROWS
