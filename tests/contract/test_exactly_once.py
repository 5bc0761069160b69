"""Every sample is applied exactly once per epoch, whatever dies, stops or comes late."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.engine.sim.compute_times import Constant
from offbeat.log.records import Admitted, Dropped, EpochDone, Joined, Lost, Refused, Updated
from tests.contract.common import (
    CODECS,
    NAMES,
    Records,
    clusters,
    examples,
    named,
    problem,
    recount,
    run,
    seeds,
)

SAMPLES = 30  # with batches of 4 the last one of an epoch is short


@pytest.mark.parametrize("name", NAMES)
@examples(9)
@given(cluster=clusters(faults=True), seed=seeds, codec=st.sampled_from(CODECS))
def test_every_sample_once_per_epoch(engine, name, cluster, seed, codec):
    seen = Records()
    discipline = named(len(cluster))[name]
    got = run(
        engine, problem(samples=SAMPLES), discipline, cluster=cluster, seed=seed, codec=codec,
        listeners=[seen],
    )  # fmt: skip
    for ledger in (got.summary().ledger, recount(seen.all, SAMPLES, epochs=2)):
        assert len(ledger) == 2
        for epoch in ledger:
            assert epoch["applied"] + epoch["dropped"] == SAMPLES
            assert epoch["repeated"] == epoch["missing"] == 0
            if not discipline.drops:
                assert epoch["dropped"] == 0
            assert epoch.get("skipped", 0) == 0
    assert got.summary().samples == sum(epoch["applied"] for epoch in got.summary().ledger)
    _check_books(seen)


def _check_books(seen: Records) -> None:
    """A contribution is dealt with once, by a worker that is in, and epochs close in order."""
    incarnation: dict[int, int] = {}
    dealt: set[tuple[int, int, int]] = set()
    admitted: set[tuple[int, int, int]] = set()
    for record in seen.all:
        if isinstance(record, Joined):
            assert record.incarnation == incarnation.get(record.worker, 0) + 1
            incarnation[record.worker] = record.incarnation
        elif isinstance(record, Admitted):
            assert record.incarnation == incarnation[record.worker]
            admitted.add((record.worker, record.incarnation, record.sequence))
        elif isinstance(record, Updated | Dropped):
            for part in record.parts if isinstance(record, Updated) else [record.part]:
                key = (part.worker, part.incarnation, part.sequence)
                assert key not in dealt
                # One that was gathered before its worker was lost still counts.
                assert key in admitted or part.incarnation == incarnation[part.worker]
                dealt.add(key)
        elif isinstance(record, Refused):
            assert (record.worker, record.incarnation, record.sequence) not in dealt
    assert admitted <= dealt
    times = [record.time for record in seen.all]
    assert times == sorted(times)
    assert [record.epoch for record in seen.of(EpochDone)] == [0, 1]


def test_the_schedules_do_what_they_are_meant_to(sim_only):
    """Lost workers, refused contributions and late joins do happen in such clusters.

    Counted to the last one in virtual time; real faults have a test of their own.
    """
    machines = (
        ob.Machine(Constant(0.01)),
        ob.Machine(Constant(0.01), failures=(ob.Failure(0.025, 0.05),)),
        ob.Machine(Constant(0.01), pauses=(ob.Pause(0.015, 0.06),)),
        ob.Machine(Constant(0.01), joins_at=0.03),
    )
    cluster = ob.Cluster(machines, patience=0.02)
    seen = Records()
    got = run(sim_only, problem(samples=80), "asp", cluster=cluster, listeners=[seen])
    figures = got.summary()
    assert figures.lost == 2
    assert figures.refused == 1
    assert [worker.joins for worker in figures.per_worker] == [1, 2, 2, 1]
    assert any(record.leases for record in seen.of(Lost))
    assert all(worker.samples for worker in figures.per_worker)


@pytest.mark.parametrize("name", ["bsp", "ssp", "local", "diloco", "asup", "average", "bmuf"])
@examples(8)
@given(at=st.sampled_from([0.0, 0.005, 0.012, 0.03]), seed=seeds, pause=st.booleans())
def test_a_silent_worker_holds_up_nobody_longer_than_patience(sim_only, name, at, seed, pause):
    """One worker of three falls silent for ever; the others are late by patience and no more.

    Seconds are exact in virtual time alone.
    """
    engine = sim_only
    patience, ever = 0.05, 1000.0
    trouble = {"pauses": (ob.Pause(at, ever),)} if pause else {"failures": (ob.Failure(at),)}
    steady = ob.Machine(Constant(0.01))
    cluster = ob.Cluster((steady, steady, ob.Machine(Constant(0.01), **trouble)), patience=patience)
    discipline = named(3)[name]
    got = run(engine, problem(samples=SAMPLES), discipline, cluster=cluster, seed=seed)
    steps = 2 * -(-SAMPLES // 4)
    # Two workers left, and what the third held is done again.
    assert got.summary().seconds <= patience + 0.01 * (steps / 2 + 4)


def test_a_worker_that_dies_in_its_pause_and_returns_holds_up_nobody_either(sim_only):
    """The pause ends with the incarnation that was paused, or at the latest with patience."""
    engine = sim_only  # seconds are exact in virtual time alone
    steady = ob.Machine(Constant(0.01))
    faulty = ob.Machine(
        Constant(0.01), pauses=(ob.Pause(0.02, 1000.0),), failures=(ob.Failure(0.03, 0.01),)
    )
    cluster = ob.Cluster((steady, steady, faulty), patience=0.05)
    got = run(engine, problem(samples=SAMPLES), "bsp", cluster=cluster)
    assert got.summary().seconds < 1.0


def test_when_all_are_gone_for_good_the_run_says_so(sim_only):
    """Real workers come back, unless they die again and again."""
    machine = ob.Machine(Constant(0.01), failures=(ob.Failure(0.03),))
    with pytest.raises(ob.RunError, match="no worker is left"):
        run(sim_only, problem(), "asp", cluster=ob.Cluster((machine, machine)))


@pytest.mark.parametrize("name", NAMES)
def test_all_may_die_if_one_returns(engine, name):
    dies = ob.Machine(Constant(0.01), failures=(ob.Failure(0.03),))
    back = ob.Machine(Constant(0.01), failures=(ob.Failure(0.025, 0.5),))
    seen = Records()
    got = run(
        engine, problem(samples=SAMPLES), named(3)[name], listeners=[seen],
        cluster=ob.Cluster((dies, back, dies), patience=0.1),
    )  # fmt: skip
    for ledger in (got.summary().ledger, recount(seen.all, SAMPLES, epochs=2)):
        assert all(e["applied"] + e["dropped"] == SAMPLES for e in ledger)
        assert all(e["repeated"] == e["missing"] == 0 for e in ledger)
