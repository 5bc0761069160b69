"""The five families: defaults, limits and staleness factors."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.config.checks import at_least, one_of, within
from offbeat.discipline.parts import (
    WEIGHS,
    Accumulated,
    AdaptiveDelayCompensation,
    All,
    Change,
    Constant,
    Count,
    DelayCompensation,
    Elastic,
    GapAware,
    Inverse,
    Polynomial,
    Rule,
)
from offbeat.errors import ConfigError


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_whole_numbers_only(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        at_least("size", value, 1)
    assert str(caught.value) == f"size must be a whole number of at least 1, not {value!r}"


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_numbers_within_a_range(value: float) -> None:
    with pytest.raises(ConfigError, match="rate must lie between 0 and 1, not"):
        within("rate", value, 0.0, 1.0)


def test_one_of_hints_at_the_nearest_word() -> None:
    with pytest.raises(ConfigError, match=r"one of keep, reset, not 'kep' \(did you mean 'keep'"):
        one_of("state", "kep", ("keep", "reset"))


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda: Accumulated(push=0), "push must be"), (lambda: Accumulated(fetch=0), "fetch must be"),
     (lambda: Change(0), "every must be"), (lambda: Change(state="lose"), "state must be one of"),
     (lambda: Elastic(0), "every must be"), (lambda: Elastic(alpha=1.5), "alpha must lie between"),
     (lambda: All(backup=-1), "backup must be"), (lambda: Count(0), "k must be"),
     (lambda: Polynomial(-1.0), "a must lie between"),
     (lambda: DelayCompensation(-0.1), "strength must lie between"),
     (lambda: AdaptiveDelayCompensation(decay=1.5), "decay must lie between"),
     (lambda: GapAware(-0.5), "decay must lie between"),
     (lambda: Rule("sgdd"), r"rule must be one of sgd, .* \(did you mean 'sgd'"),
     (lambda: Rule("sgd", lr=-1.0), "lr must lie between"),
     (lambda: Rule("sgd", momentum=1.5), "momentum must lie between"),
     (lambda: Rule("delayed-nesterov", delay=0), "delay must be"),
     (lambda: Rule("rms-momentum", rho=1.5), "rho must lie between")],
)  # fmt: skip
def test_every_setting_has_limits(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize("word", sorted(WEIGHS.kinds))
def test_a_fresh_contribution_counts_in_full(word: str) -> None:
    assert WEIGHS.read(word).factor(0) == 1.0


def test_factors_of_stale_contributions() -> None:
    assert [Inverse().factor(s) for s in (1, 2, 4)] == [1.0, 0.5, 0.25]
    assert Polynomial(0.5).factor(3) == 0.5
    assert Polynomial(2.0).factor(1) == 0.25
    for same in (Constant(), DelayCompensation(), AdaptiveDelayCompensation(), GapAware()):
        assert same.factor(7) == 1.0


@given(st.integers(0, 1000), st.floats(0, 4))
def test_staler_never_counts_more(staleness: int, a: float) -> None:
    for weigh in (Inverse(), Polynomial(a)):
        assert 0 < weigh.factor(staleness + 1) <= weigh.factor(staleness) <= 1
