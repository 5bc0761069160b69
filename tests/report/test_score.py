"""Reached and kept: a level counts when three tests hold it, and the end of a run is defined."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.report.score import MARKS, Climb
from offbeat.report.summary import STEPS, TESTS, History, Step
from offbeat.report.summary import Test as Found


def climbed(*values: float | None, higher: bool = True) -> Climb:
    climb = Climb(higher, [], [])
    for number, value in enumerate(values):
        climb.see(float(number), value)
    return climb


@pytest.mark.parametrize(
    ("values", "time"),
    [
        ((0.5, 0.9, 0.9, 0.9), 1),
        ((0.5, 0.95, 0.7, 0.8, 0.9, 0.9, 0.9), 4),  # a spike is not kept
        ((0.5, 0.98, 0.85, 0.9, 0.9), 1),  # a small step back is
        ((0.95, None, 0.95, 0.9, 0.9), 2),  # no number is at no level
        ((0.5, 0.8, 0.9), 2),  # the last test has only itself
        ((0.5, 0.95, 0.8), None),  # the last but one has two
        ((0.5, 0.97, 0.85), 1),
        ((0.9,), 0),
        ((None, math.nan), None),
        ((), None),
    ],
)
def test_time_to_a_level(values: tuple[float | None, ...], time: float | None) -> None:
    assert climbed(*values).time_to(0.9) == time
    downwards = [None if v is None else -v for v in values]
    assert climbed(*downwards, higher=False).time_to(-0.9) == time


@given(st.lists(st.floats(-1e6, 1e6), max_size=12), st.booleans())
def test_the_best_level_is_one_that_was_reached_and_nothing_beyond(
    values: list[float], higher: bool
) -> None:
    climb = climbed(*values, higher=higher)
    best = climb.best()
    if best is None:
        assert not values
        return
    assert climb.time_to(best) is not None
    beyond = math.nextafter(best, math.inf if higher else -math.inf)
    assert climb.time_to(beyond) is None


def test_a_constant_level_is_kept_whatever_rounding_makes_of_its_mean() -> None:
    for value in (0.1, 0.7, 0.93, 1 / 3):
        assert climbed(*[value] * 5).time_to(value) == 0


def test_a_climb_of_any_length_takes_bounded_memory() -> None:
    climb = climbed(*(n / 10_000 for n in range(10_000)))
    assert len(climb.marks) <= MARKS
    assert climb.best() == 0.9999
    reached = climb.time_to(0.5)
    assert reached is not None
    assert abs(reached - 5000) <= 2 * 10_000 / MARKS


def test_a_history_of_any_length_takes_bounded_memory() -> None:
    history = History()
    for n in range(50_000):
        history.stepped(Step(n / 10, n, n, 5.0 if n == 20_000 else 1.0))
        history.tested(Found(n / 10, n, n, 1.0, 0.99 if n in (7000, 7001, 7002) else 0.5))
    assert len(history.steps) <= STEPS
    assert len(history.tests) <= TESTS
    assert (history.steps[0].version, history.steps[-1].version) == (0, 49_999)
    assert max(step.loss for step in history.steps) == 5.0  # extremes stay
    assert history.time_to(0.9) == 700.0  # found before any test was thinned away
    assert len(repr(history)) < 80
