"""Every sample is handed out once an epoch, and the ledger says what became of it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.data.lease import Lease, Leases, Ledger
from offbeat.errors import ConfigError


def all_of(leases: Leases, worker: int = 0) -> list[Lease]:
    found = []
    while (lease := leases.issue(worker)) is not None:
        found.append(lease)
    return found


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(msgspec.to_builtins(state, str_keys=True)))


def test_leases_are_ranges_in_order_and_the_last_is_shorter() -> None:
    leases = Leases(10, 4, 2)
    assert all_of(leases) == [
        Lease(0, 0, 4), Lease(0, 4, 8), Lease(0, 8, 10),
        Lease(1, 0, 4), Lease(1, 4, 8), Lease(1, 8, 10),
    ]  # fmt: skip
    assert leases.exhausted
    assert not leases.finished


def test_a_lease_is_finished_when_settled_not_when_issued() -> None:
    leases = Leases(4, 2, 1)
    first, second = all_of(leases)
    assert leases.settle(0, [first], "applied") == []
    assert not leases.finished
    assert leases.settle(0, [second], "applied") == [0]
    assert leases.finished
    assert leases.ledger.summary() == [
        {"applied": 4, "repeated": 0, "missing": 0, "dropped": 0, "skipped": 0}
    ]


def test_what_a_lost_worker_held_goes_out_again_first() -> None:
    leases = Leases(8, 2, 1)
    mine, other = leases.issue(1), leases.issue(2)
    later = leases.issue(1)
    assert leases.reclaim(1) == [mine, later]
    assert leases.reclaim(1) == []
    assert [leases.issue(2), leases.issue(2), leases.issue(2)] == [mine, later, Lease(0, 6, 8)]
    assert leases.exhausted
    assert leases.held[2] == [other, mine, later, Lease(0, 6, 8)]


def test_leases_come_back_after_everything_was_handed_out() -> None:
    leases = Leases(4, 2, 1)
    leases.issue(0)
    kept = leases.issue(1)
    assert leases.issue(0) is None
    leases.reclaim(1)
    assert not leases.exhausted
    assert leases.issue(0) == kept


def test_what_was_handed_in_is_not_reclaimed() -> None:
    leases = Leases(8, 2, 1)
    sent, held = leases.issue(0), leases.issue(0)
    assert sent is not None
    leases.hand_in(0, [sent])
    assert leases.reclaim(0) == [held]


def test_dropped_and_skipped_samples_are_counted_and_not_missing() -> None:
    leases = Leases(6, 2, 1)
    a, b, c = all_of(leases)
    leases.settle(0, [a], "applied")
    leases.settle(0, [b], "dropped")
    assert leases.ledger.summary() == [
        {"applied": 2, "repeated": 0, "missing": 2, "dropped": 2, "skipped": 0}
    ]
    assert leases.settle(0, [c], "skipped") == [0]
    assert leases.ledger.summary() == [
        {"applied": 2, "repeated": 0, "missing": 0, "dropped": 2, "skipped": 2}
    ]
    assert leases.ledger.applied == 2


def test_the_ledger_sees_a_sample_applied_twice() -> None:
    ledger = Ledger(4)
    ledger.settle([Lease(0, 0, 2)], "applied")
    ledger.settle([Lease(0, 0, 2)], "applied")
    assert ledger.summary() == [
        {"applied": 0, "repeated": 2, "missing": 2, "dropped": 0, "skipped": 0}
    ]


@pytest.mark.parametrize(
    ("ranges", "counts"),
    [
        ([(4, 6), (0, 4)], (6, 0, 0)),  # in any order
        ([(0, 4), (2, 4)], (2, 2, 2)),  # as many samples as there are, some of them twice
        ([(0, 3), (3, 3), (3, 5)], (5, 0, 1)),
        ([(1, 4), (4, 6)], (5, 0, 1)),
        ([(0, 6), (0, 6)], (0, 6, 0)),
    ],
)
def test_the_ledger_counts_ranges_as_it_would_count_samples(
    ranges: list[tuple[int, int]], counts: tuple[int, int, int]
) -> None:
    ledger = Ledger(6)
    ledger.open, ledger.lost = {0: {}}, {0: {"dropped": 0, "skipped": 0}}
    for one in ranges:
        ledger.open[0][one] = ledger.open[0].get(one, 0) + 1
    found = ledger.summary()[0]
    assert (found["applied"], found["repeated"], found["missing"]) == counts


def test_epochs_close_in_order() -> None:
    ledger = Ledger(2)
    assert ledger.settle([Lease(1, 0, 2)], "applied") == []
    assert ledger.settle([Lease(2, 0, 1)], "applied") == []
    assert ledger.settle([Lease(0, 0, 2)], "applied") == [0, 1]
    assert len(ledger.done) == 2
    assert ledger.settle([Lease(2, 1, 2)], "applied") == [2]


def test_one_contribution_may_hold_leases_of_two_epochs() -> None:
    ledger = Ledger(2)
    assert ledger.settle([Lease(0, 0, 2), Lease(1, 0, 2)], "applied") == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((0, 1, 1), "the dataset is empty"), ((4, 0, 1), "at least 1, not 0 and 1"),
     ((4, 1, 0), "at least 1, not 1 and 0"),
     ((4, 5, 1), "a batch of 5 is larger than the dataset of 4 samples: use batch_size=4 or less")],
)  # fmt: skip
def test_sizes_that_make_no_sense(arguments: tuple[int, int, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Leases(*arguments)


# A scenario: each step gives a worker a lease, settles one, or loses a worker.
moves = st.lists(
    st.tuples(st.sampled_from(["issue", "applied", "dropped", "skipped", "lose"]),
              st.integers(0, 2)),
    max_size=60,
)  # fmt: skip


def play(leases: Leases, scenario: list[tuple[str, int]]) -> None:
    for what, worker in scenario:
        held = leases.held.get(worker, [])
        if what == "issue":
            leases.issue(worker)
        elif what == "lose":
            leases.reclaim(worker)
        elif held:
            leases.settle(worker, [held[0]], what)


def finish(leases: Leases) -> None:
    for worker in range(3):
        leases.reclaim(worker)
    while (lease := leases.issue(0)) is not None:
        leases.settle(0, [lease], "applied")


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), moves)
def test_every_sample_counts_exactly_once_whatever_happens(
    samples: int, batch: int, epochs: int, scenario: list[tuple[str, int]]
) -> None:
    leases = Leases(samples, min(batch, samples), epochs)
    play(leases, scenario)
    finish(leases)
    assert leases.finished
    counts = leases.ledger.summary()
    assert len(counts) == epochs
    for epoch in counts:
        assert epoch["repeated"] == epoch["missing"] == 0
        assert epoch["applied"] + epoch["dropped"] + epoch["skipped"] == samples
    assert leases.ledger.applied == sum(epoch["applied"] for epoch in counts)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 3), moves, moves)
def test_the_state_goes_through_json_and_back(
    samples: int,
    batch: int,
    epochs: int,
    scenario: list[tuple[str, int]],
    rest: list[tuple[str, int]],
) -> None:
    one = Leases(samples, min(batch, samples), epochs)
    play(one, scenario)
    other = Leases(samples, min(batch, samples), epochs)
    other.load(through_json(one.state()))
    assert other.state() == one.state()
    play(one, rest)
    play(other, rest)
    assert other.state() == one.state()
    assert other.ledger.summary() == one.ledger.summary()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20))
def test_run_lengths_of_any_ledger_read_back(times: list[int]) -> None:
    ledger = Ledger(len(times) * 100)
    for position, count in enumerate(times):
        for _ in range(count):
            ledger.settle([Lease(3, position, position + 1)], "applied")
    saved = through_json(ledger.state())
    back = Ledger(ledger.samples)
    back.load(saved)
    assert back.summary() == ledger.summary()
    if any(times):
        assert back.times(3).tolist() == ledger.times(3).tolist()
        assert len(saved["open"]["3"]) <= len(times) + 1  # short, however many samples there are


def test_a_loaded_ledger_shares_nothing_with_the_saved_one() -> None:
    ledger = Ledger(4)
    ledger.settle([Lease(0, 0, 2)], "dropped")
    copy = Ledger(4)
    copy.load(ledger.state() | {"open": {}, "lost": {}, "settled": {}})
    copy.done.append({})
    assert ledger.done == []
