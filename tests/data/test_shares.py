"""Sizes of leases: equal, given or by speed, and their text; together what a round always has."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.data.lease import Lease, Leases
from offbeat.data.shares import (
    LOOKS,
    EqualShares,
    GivenShares,
    Shares,
    SizesBySpeed,
    SpeedShares,
    apportion,
    as_shares,
)
from offbeat.errors import ConfigError

# ---------------------------------------------------------------- what a user writes


@pytest.mark.parametrize(
    ("written", "meant", "text"),
    [
        (None, EqualShares(), "equal"),
        ("equal", EqualShares(), "equal"),
        ("speed", SpeedShares(), "speed"),
        ("speed:2", SpeedShares(2.0), "speed:most=2.0"),
        ("speed:most=2.5,least=8", SpeedShares(2.5, 8), "speed:most=2.5,least=8"),
        ("1,2,4", GivenShares((1, 2, 4)), "1,2,4"),
        (" 1, 2.5 ,4", GivenShares((1, 2.5, 4)), "1,2.5,4"),
        ([1, 2, 4], GivenShares((1, 2, 4)), "1,2,4"),
        ((0.1, 1 / 3), GivenShares((0.1, 1 / 3)), f"0.1,{1 / 3!r}"),
        ("3", GivenShares((3,)), "3"),
        ("1,2,least=4", GivenShares((1, 2), 4), "1,2,least=4"),
        (SpeedShares(3.0), SpeedShares(3.0), "speed:most=3.0"),
    ],
)
def test_shares_are_written_in_several_ways_and_read_back(
    written: Any, meant: Shares, text: str
) -> None:
    assert as_shares(written) == meant
    assert str(meant) == text
    assert as_shares(text) == meant


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("sped", "shares cannot be 'sped' .did you mean 'speed'.*write equal, speed"),
        ("", "shares cannot be ''.*write equal"),
        ("equal:2", "shares cannot be 'equal:2'"),
        ("1,two", "shares cannot be '1,two'"),
        ("1,0", "a share must lie between"),
        ("1,-2", "a share must lie between"),
        ("1,nan", "a share must lie between"),
        ([1, "2"], "a share must lie between"),
        ([], "shares cannot be .*a number for each worker: 1,2,4"),
        ("1,2,most=3", "unknown 'most'.*takes least"),
        ("speed:most=0.5", "most must lie between 1"),
        ("speed:least=0", "least must be a whole number of at least 1"),
        ("speed:least=1.5", "must be a whole number"),
        ("speed:fast=1", "unknown 'fast'"),
    ],
)
def test_what_makes_no_shares_is_refused_with_what_does(written: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        as_shares(written)


@pytest.mark.parametrize(
    ("shares", "discipline", "says"),
    [
        ("1,2", "bsp", "shares=1,2 are of 2 workers, and there are 3: give one for each"),
        ("speed", "gossip", "nobody takes a mean that is weighed by samples.*leave shares out"),
        ("speed", "easgd:4", "nobody takes a mean that is weighed by samples"),
        ("1,2,4", "hogwild", "nobody takes a mean that is weighed by samples"),
        (
            "speed",
            "async-local:8",
            "slower workers make fewer steps: leave shares out",
        ),
    ],
)
def test_shares_that_make_no_sense_are_refused(shares: str, discipline: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        as_shares(shares).check(ob.parse(discipline), 3)


@pytest.mark.parametrize("discipline", ["gossip", "easgd:4", "hogwild", "asp"])
def test_equal_shares_are_never_refused(discipline: str) -> None:
    EqualShares().check(ob.parse(discipline), 3)


@pytest.mark.parametrize("shares", ["speed:least=9", "1,2,least=9"])
def test_the_least_is_no_more_than_the_mean(shares: str) -> None:
    with pytest.raises(ConfigError, match=r"least=9 is more than a batch of 8.*write least=8"):
        as_shares(shares).sizes(8, 2)


# ---------------------------------------------------------------- whole numbers


def test_whole_numbers_in_proportion() -> None:
    assert apportion(28, [1, 2, 4], 1, 28) == [4, 8, 16]
    assert apportion(96, [1, 2, 4], 1, 96) == [14, 27, 55]
    assert apportion(97, [1, 1, 1], 1, 97) == [33, 32, 32]
    assert apportion(96, [1, 2, 40], 1, 50) == [15, 31, 50]
    assert apportion(96, [1, 2, 400], 4, 96) == [4, 4, 88]
    assert apportion(3, [5, 1, 1], 1, 3) == [1, 1, 1]


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[float], int, int]:
    speeds = draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
    low = draw(st.integers(0, 4))
    high = draw(st.integers(low + 1, low + 40))
    total = draw(st.integers(low * len(speeds), high * len(speeds)).filter(bool))
    return total, speeds, low, high


@given(problems())
def test_no_other_whole_numbers_have_a_shorter_longest_time(
    problem: tuple[int, list[float], int, int],
) -> None:
    total, speeds, low, high = problem
    found = apportion(total, speeds, low, high)
    assert sum(found) == total
    assert all(low <= number <= high for number in found)
    longest = max(range(len(found)), key=lambda i: found[i] / speeds[i])
    if found[longest] == low:
        return
    # Whoever took one sample of the slowest would be no faster than it, or has all that it may.
    time = found[longest] / speeds[longest]
    others = [i for i in range(len(found)) if i != longest and found[i] < high]
    assert all((found[i] + 1) / speeds[i] >= time * (1 - 1e-9) for i in others)


def test_given_sizes_are_in_proportion_and_their_mean_is_a_batch() -> None:
    sizes = GivenShares((1, 2, 4)).sizes(28, 3)
    assert [sizes.of(worker) for worker in range(3)] == [12, 24, 48]
    sizes.forget(2)
    assert sizes.of(0) == 12
    assert GivenShares((1, 2, 4)).range(28, 3) == (1, 48)
    in_fours = GivenShares((1, 2, 4)).sizes(32, 3, unit=4)
    assert [in_fours.of(worker) for worker in range(3)] == [12, 28, 56]


# ---------------------------------------------------------------- by speed


def rounds(
    sizes: SizesBySpeed, seconds: Sequence[float], count: int, fixed: float = 0.0
) -> list[list[int]]:
    """Lock-step: everybody gets a lease, says how long it took, and an update is made."""
    found = []
    for _ in range(count):
        found.append([sizes.of(worker) for worker in range(len(seconds))])
        for worker, (size, each) in enumerate(zip(found[-1], seconds, strict=True)):
            sizes.measured(worker, size, fixed + size * each)
        sizes.revise()
    return found


def test_after_one_round_all_need_the_same_time() -> None:
    assert rounds(SpeedShares().sizes(28, 3), [4, 2, 1], 3) == [
        [28, 28, 28], [12, 24, 48], [12, 24, 48],
    ]  # fmt: skip


def test_workers_of_one_speed_keep_their_batch() -> None:
    """A few per cent are not worth another size."""
    assert rounds(SpeedShares().sizes(32, 3), [1.0, 1.02, 1.04], 9)[-1] == [32, 32, 32]


def test_sizes_stay_until_an_update_is_made() -> None:
    sizes = SpeedShares().sizes(28, 2)
    rounds(sizes, [1, 1], 1)
    for _ in range(LOOKS):
        sizes.measured(0, 28, 84)
        sizes.measured(1, 28, 28)
    assert [sizes.of(0), sizes.of(1)] == [28, 28]
    sizes.revise()
    assert [sizes.of(0), sizes.of(1)] == [14, 42]


def test_one_slow_step_changes_little() -> None:
    sizes = SpeedShares().sizes(30, 2)
    rounds(sizes, [1, 1], LOOKS)
    sizes.measured(0, 30, 3000)
    sizes.measured(1, 30, 30)
    sizes.revise()
    assert [sizes.of(0), sizes.of(1)] == [30, 30]


def test_a_worker_that_becomes_slow_is_followed() -> None:
    sizes = SpeedShares().sizes(30, 2)
    rounds(sizes, [1, 1], LOOKS)
    assert rounds(sizes, [3, 1], LOOKS)[-1] == [15, 45]


def test_a_fixed_part_of_the_time_is_learnt_too() -> None:
    """Time of a round: 10 + 4 n, 10 + 2 n, 10 + n."""
    last = rounds(SpeedShares().sizes(28, 3), [4, 2, 1], 40, fixed=10)[-1]
    times = [10 + size * each for size, each in zip(last, [4, 2, 1], strict=True)]
    assert sum(last) == 3 * 28
    assert max(times) < 1.08 * min(times)


def test_bounds_hold_and_the_rest_goes_to_the_others() -> None:
    sizes = SpeedShares(most=1.5, least=4).sizes(10, 3)
    assert rounds(sizes, [1, 1, 0.01], 2)[-1] == [8, 7, 15]
    assert rounds(SpeedShares(least=4).sizes(10, 3), [100, 1, 1], 2)[-1] == [4, 13, 13]
    assert SpeedShares(most=1.5, least=4).range(10, 3) == (4, 15)
    assert SpeedShares(most=8.0).range(10, 2) == (1, 20)


def test_sizes_are_whole_microbatches() -> None:
    last = rounds(SpeedShares(least=3).sizes(32, 3, unit=4), [40, 2, 1], 2)[-1]
    assert last == [4, 32, 60]


def test_whoever_is_lost_leaves_its_batch_out_and_whoever_comes_has_one() -> None:
    sizes = SpeedShares().sizes(28, 3)
    rounds(sizes, [4, 2, 1], 2)
    sizes.forget(2)
    assert [sizes.of(0), sizes.of(1)] == [19, 37]
    assert sizes.of(2) == 28  # one that comes has a batch, in the middle of a round too
    assert [sizes.of(0), sizes.of(1)] == [19, 37]
    sizes.forget(7)  # one that had no lease yet
    sizes.forget(0)  # 1 is as fast as 2, for all that is known
    assert [sizes.of(1), sizes.of(2)] == [28, 28]
    sizes.forget(1)
    sizes.forget(2)
    assert sizes.of(0) == 28


def test_time_that_tells_nothing_is_not_counted() -> None:
    sizes = SpeedShares().sizes(8, 2)
    sizes.measured(0, 8, 1.0)  # before it had a lease: of an earlier life
    for worker in (0, 1):
        sizes.of(worker)
    for seconds, samples in ((0.0, 8), (1.0, 0)):
        sizes.measured(0, samples, seconds)
    sizes.revise()
    assert sizes.news == 0
    assert not any(sizes.seconds.values())


def test_what_has_been_learnt_goes_on_from_a_checkpoint() -> None:
    one, other = SpeedShares().sizes(28, 3), SpeedShares().sizes(28, 3)
    rounds(one, [4.2, 2.1, 1.3], 3)
    one.measured(1, 5, 7.7)
    other.load(json.loads(json.dumps(one.state())))
    assert rounds(one, [1.1, 2.2, 3.7], 9) == rounds(other, [1.1, 2.2, 3.7], 9)


# ---------------------------------------------------------------- leases of these sizes


def uneven(samples: int, batch: int, shares: str, workers: int, epochs: int = 1) -> Leases:
    return Leases(samples, batch, epochs, sizes=as_shares(shares).sizes(batch, workers))


def test_each_worker_gets_leases_of_its_size() -> None:
    leases = uneven(40, 8, "1,3", 2)
    found = [leases.issue(worker) for worker in (0, 1, 0, 1, 1)]
    assert found == [Lease(0, a, b) for a, b in ((0, 4), (4, 16), (16, 20), (20, 32), (32, 40))]


def test_a_lease_of_a_lost_fast_worker_goes_out_in_parts() -> None:
    leases = uneven(40, 8, "1,3", 2)
    leases.issue(1)
    leases.reclaim(1)
    assert [leases.issue(0), leases.issue(0)] == [Lease(0, 0, 4), Lease(0, 4, 8)]
    assert leases.issue(1) == Lease(0, 8, 12)
    assert leases.issue(1) == Lease(0, 12, 24)


@pytest.mark.parametrize(
    ("samples", "stops"),
    [
        (18, [8, 16, 18]),  # 2 are left, as few as may be
        (17, [8, 15, 17]),  # one would be: the lease before gives one away
        (9, [7, 9]),
    ],
)
def test_no_lease_is_smaller_than_the_least(samples: int, stops: list[int]) -> None:
    leases = uneven(samples, 8, "1,least=2", 1)
    assert [leases.issue(0) for _ in stops] == [
        Lease(0, start, stop) for start, stop in zip([0, *stops], stops, strict=False)
    ]
    assert leases.issue(0) is None


def test_a_rest_that_cannot_be_divided_goes_out_whole() -> None:
    leases = uneven(11, 6, "1,least=6", 1)
    assert leases.issue(0) == Lease(0, 0, 11)
    assert as_shares("1,least=6").range(6, 1) == (6, 11)


@given(
    st.lists(
        st.tuples(st.sampled_from(["step", "step", "step", "lose", "checkpoint"]),
                  st.integers(0, 2), st.floats(0.01, 100)),
        max_size=60,
    ),
    st.sampled_from(["speed", "speed:least=3", "1,2,4", "5,1,1,least=2"]),
)  # fmt: skip
def test_any_speeds_and_losses_leave_the_ledger_exact(
    moves: list[tuple[str, int, float]], shares: str
) -> None:
    leases = uneven(50, 5, shares, 3, epochs=2)
    low, high = as_shares(shares).range(5, 3)
    for what, worker, seconds in moves:
        if what == "step" and (lease := leases.issue(worker)) is not None:
            assert low <= lease.samples <= high
            leases.settle(worker, [lease], "applied")
            leases.sizes.measured(worker, lease.samples, seconds)
            leases.sizes.revise()
        elif what == "lose":
            leases.issue(worker)
            leases.reclaim(worker)
        elif what == "checkpoint":
            state = json.loads(json.dumps(leases.state()))
            leases = uneven(50, 5, shares, 3, epochs=2)
            leases.load(state)
    while (lease := leases.issue(0)) is not None:
        assert low <= lease.samples <= high
        leases.settle(0, [lease], "applied")
    assert leases.finished
    once = {"applied": 50, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}
    assert leases.ledger.summary() == [once, once]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=30),
    st.integers(0, 30),
    st.sampled_from(["equal", "1,2,4,least=2"]),
)
def test_a_store_that_died_hands_out_again_what_its_log_does_not_have(
    moves: list[tuple[int, bool]], saved: int, shares: str
) -> None:
    """Each move is a lease, settled or not; at `saved` of them there was a checkpoint."""
    leases = uneven(23, 4, shares, 3, epochs=3)
    state, since = json.loads(json.dumps(leases.state())), []
    for number, (worker, settles) in enumerate(moves):
        lease = leases.issue(worker)
        if lease is not None and settles:
            leases.settle(worker, [lease], "applied")
            since.append(lease)
        if number == saved:
            state, since = json.loads(json.dumps(leases.state())), []
    after = uneven(23, 4, shares, 3, epochs=3)
    after.load(state)
    after.ledger.settle(since, "applied")
    after.recover({*since})
    least = as_shares(shares).range(4, 3)[0] if shares != "equal" else 1
    while (lease := after.issue(0)) is not None:
        assert lease.samples >= least
        after.settle(0, [lease], "applied")
    assert after.finished
    assert all(epoch["applied"] == 23 for epoch in after.ledger.summary())
