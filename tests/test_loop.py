"""When a script has seen enough, and that it goes on from there."""

import math

import pytest

import offbeat as ob


def test_enough_is_so_many_scores_that_are_not_better() -> None:
    stopping = ob.EarlyStopping(3)
    found = [stopping.step(loss) for loss in (1.0, 0.9, 0.9, 0.95, 0.8, 0.81, math.nan, 0.8)]
    assert found == [False] * 7 + [True]
    assert (stopping.best, stopping.since) == (0.8, 3)
    stopping = ob.EarlyStopping(1, higher_is_better=True, margin=0.1)
    assert [stopping.step(score) for score in (0.5, 0.65, 0.74)] == [False, False, True]


def test_it_goes_on_from_where_it_was() -> None:
    one, other = ob.EarlyStopping(2), ob.EarlyStopping(2)
    assert not one.step(0.5)
    assert not one.step(0.6)
    other.load_state_dict(one.state_dict())
    assert other.step(0.7)


def test_what_it_takes() -> None:
    with pytest.raises(ob.ConfigError, match="patience must be a whole number"):
        ob.EarlyStopping(0)
    with pytest.raises(ob.ConfigError, match="margin must be a number of at least 0"):
        ob.EarlyStopping(1, margin=-1.0)
