"""A store that is brought up to date from its log is where the store was that wrote it."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import ASP, BSP, Discipline, Ringmaster, SoftSync, Switch, Turn
from offbeat.data.lease import Lease, Leases
from offbeat.discipline.course import Course
from offbeat.log.log import Listener, Log
from offbeat.log.records import Entry, EpochDone, Part, Turned, Updated
from offbeat.store.board import Row, State
from offbeat.store.cost_only import CostOnlyParameters
from offbeat.store.recovery import fold, last_version
from offbeat.store.store import Store
from offbeat.worker.contribution import Contribution

SAMPLES, BATCH, EPOCHS = 10, 3, 2


class Records(Listener):
    def __init__(self) -> None:
        self.all: list[Entry] = []

    def see(self, record: Entry) -> None:
        self.all.append(record)


def store(discipline: Discipline | Course = ASP()) -> tuple[Store, Records]:  # noqa: B008
    records, log = Records(), Log()
    log.listeners.append(records)
    return Store(discipline, 2, Leases(SAMPLES, BATCH, EPOCHS), log, CostOnlyParameters()), records


def live(made: Store, turns: list[int]) -> None:
    """Workers in the order of `turns` take a lease each and push it."""
    sequence = {0: 0, 1: 0}
    for worker in (0, 1):
        made.join(worker, 0.0)
    for worker in turns:
        lease = made.lease(worker)
        if lease is None:
            return
        base = max(0, made.version - worker)  # worker 1 is always late
        part = Part(worker, 1, sequence[worker], base, [lease], lease.samples)
        sequence[worker] += 1
        made.push(Contribution(part), 1.0)


def unsettled(made: Store) -> set[tuple[int, int]]:
    """Every sample that has not been dealt with, as (epoch, position)."""
    every = {(epoch, place) for epoch in range(EPOCHS) for place in range(SAMPLES)}
    done = {(e, p) for e in range(len(made.leases.ledger.done)) for p in range(SAMPLES)}
    for epoch in made.leases.ledger.open:
        times = made.leases.ledger.times(epoch)
        done |= {(epoch, place) for place in range(SAMPLES) if times[place]}
    return every - done


def drained(made: Store) -> set[tuple[int, int]]:
    """All that is still handed out."""
    found: list[tuple[int, int]] = []
    while (lease := made.lease(0)) is not None:
        found += [(lease.epoch, place) for place in range(lease.start, lease.stop)]
    assert len(found) == len(set(found))
    return set(found)


@pytest.mark.parametrize(
    "discipline", [ASP(), SoftSync(2), BSP(), Ringmaster(1, redo=True)], ids=str
)
@given(
    turns=st.lists(st.integers(0, 1), max_size=9),
    cut=st.integers(0, 9),
    in_hand=st.integers(0, 2),
)
def test_what_the_log_says_is_where_it_stands(
    discipline: Discipline, turns: list[int], cut: int, in_hand: int
) -> None:
    """From the beginning or from a checkpoint on the way: nothing is lost and nothing is twice."""
    there, records = store(discipline)
    live(there, turns[:cut])
    saved: Any = json.loads(json.dumps(msgspec.to_builtins(there.state(), str_keys=True)))
    seen = len(records.all)
    for worker in turns[cut:]:
        lease = there.lease(worker)
        if lease is not None:
            number = 100 + there.version + len(there.gathered)
            base = max(0, there.version - worker)
            part = Part(worker, 1, number, base, [lease], lease.samples)
            there.push(Contribution(part), 2.0)
    for worker in range(in_hand):  # taken, and under way when the store dies
        there.lease(worker)
    here, _ = store(discipline)
    here.load_alone(saved)
    fold(here, records.all[seen:], 3.0)
    assert (here.version, here.epoch) == (there.version, there.epoch)
    assert here.leases.ledger.summary() == there.leases.ledger.summary()
    assert drained(here) == unsettled(there)
    assert State.ACTIVE not in here.cells[Row.STATE].tolist()


@pytest.mark.parametrize("lost", [False, True], ids=["kept", "lost"])
def test_a_turn_is_where_the_log_has_it(lost: bool) -> None:
    """Also if the last update is on record and the turn that followed is not."""
    course = Switch(ASP(), Turn(BSP(), "v2"), Turn(SoftSync(2), "95%"))
    there, records = store(course)
    live(there, [0, 1])
    assert isinstance(records.all[-1], Turned)
    here, told = store(course)
    fold(here, records.all[:-1] if lost else records.all, 2.0)
    assert (here.stage, here.discipline) == (there.stage, there.discipline) == (1, BSP())
    again = [record for record in told.all if isinstance(record, Turned)]
    assert [(turn.stage, turn.version) for turn in again] == ([(1, 2)] if lost else [])


def test_incarnations_go_on_counting() -> None:
    there, records = store()
    live(there, [0, 1])
    there.join(1, 1.0)
    here, _ = store()
    fold(here, records.all, 2.0)
    assert here.join(1, 3.0) == 3


def test_an_epoch_that_ended_in_the_last_moment_is_told_now() -> None:
    there, records = store()
    live(there, [0, 1, 0, 1])
    ended = [record for record in records.all if isinstance(record, EpochDone)]
    assert [record.epoch for record in ended] == [0]
    here, told = store()
    fold(here, [record for record in records.all if record not in ended], 2.0)
    assert [r.epoch for r in told.all if isinstance(r, EpochDone)] == [0]
    again, silent = store()
    fold(again, records.all, 2.0)
    assert not [r for r in silent.all if isinstance(r, EpochDone)]


def test_the_last_version_of_a_log() -> None:
    updates: list[Any] = [Updated(0.0, version, []) for version in (4, 5)]
    assert last_version(updates, 3) == 5
    assert last_version([], 3) == 3


def test_leases_that_were_never_seen_again_are_made_anew() -> None:
    leases = Leases(SAMPLES, BATCH, EPOCHS)
    leases.recover({Lease(0, 6, 9)})
    assert list(leases.returned) == [Lease(0, 0, 3), Lease(0, 3, 6)]
    assert (leases.epoch, leases.position) == (0, 9)
