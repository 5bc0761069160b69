"""Disciplines that become one another when a constant is set to nothing."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.config.setup import make_job
from offbeat.log.log import Log
from offbeat.log.records import Updated
from offbeat.worker.worker import Timing
from tests.contract.common import (
    CODECS,
    Records,
    asked,
    assert_close,
    clusters,
    examples,
    problem,
    replay_as,
    run,
    scratch,
    seeds,
)
from tests.contract.real import level, translated


def _hashes(engine: str, discipline: ob.Discipline, **options) -> list[str]:
    """The parameters' bits after every update."""
    seen = Records()
    run(engine, problem(samples=26), discipline, listeners=[seen], **options)
    return [record.hash for record in seen.of(Updated)]


def _shared(engine: str, one: ob.Discipline, other: ob.Discipline, **options) -> tuple[int, int]:
    """How many versions two disciplines have in common, and how many there are.

    Two simulated runs have the same order, so both are made; real ones have not, so that the
    second discipline follows the order of the first one's log.
    """
    if engine == "sim":
        mine, theirs = (_hashes(engine, discipline, **options) for discipline in (one, other))
        assert len(mine) == len(theirs)
        pairs = enumerate(zip(mine, theirs, strict=True))
        return next((i for i, (a, b) in pairs if a != b), len(mine)), len(mine)
    what, real = problem(samples=26), translated(options)
    if "listeners" not in real:  # nobody dies, so that everybody can wait for everybody
        what = level(engine, what, real["workers"])
    with scratch() as folder:
        got = run(engine, what, one, out=folder / "run", **options)
        found = replay_as(folder / "run", what, discipline=str(other))
        assert ob.replay(folder / "run", *what).identical
    return found.versions, got.summary().updates


def _assert_same(engine: str, one: ob.Discipline, *others: ob.Discipline, **options) -> None:
    for other in others:
        common, whole = _shared(engine, one, other, **options)
        assert common == whole > 0, other


@examples(15)
@given(clusters(faults=True), seeds, st.integers(1, 4))
def test_bmuf_without_momentum_is_averaging(engine, cluster, seed, block):
    same = ob.BMUF(block, momentum=0.0), ob.BMUF(block, momentum=0.0, nesterov=True)
    _assert_same(engine, ob.LocalSGD(block, "reset"), *same, cluster=cluster, seed=seed)


@examples(15)
@given(clusters(faults=True), seeds, st.integers(1, 4))
def test_diloco_with_a_plain_outer_step_is_averaging(engine, cluster, seed, h):
    same = ob.DiLoCo(h, lr=1.0, momentum=0.0)
    _assert_same(engine, ob.LocalSGD(h), same, cluster=cluster, seed=seed)


@examples(15)
@given(clusters(faults=True), seeds)
def test_delay_compensation_of_no_strength_is_asp(engine, cluster, seed):
    weights = ob.DelayCompensation(0.0), ob.AdaptiveDelayCompensation(0.0), ob.Polynomial(0.0)
    same = [ob.ASP(weigh) for weigh in weights]
    _assert_same(engine, ob.ASP(), *same, cluster=cluster, seed=seed)


@examples(15)
@given(clusters(least=2), seeds)
def test_the_first_update_is_never_compensated(engine, cluster, seed):
    """Nothing has moved since the first pull, so there is no delay and no gap to make up for."""
    for weigh in (ob.GapAware(), ob.DelayCompensation(0.5), ob.AdaptiveDelayCompensation()):
        common, _ = _shared(engine, ob.ASP(), ob.ASP(weigh), cluster=cluster, seed=seed)
        assert common >= 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ob.BMUF(2, momentum=0.5), ob.LocalSGD(2, "reset")),
        (ob.DiLoCo(2), ob.LocalSGD(2)),
        (ob.ASP(ob.DelayCompensation(0.5)), ob.ASP()),
        (ob.ASP(ob.AdaptiveDelayCompensation()), ob.ASP()),
        (ob.ASP(ob.GapAware()), ob.ASP()),
        (ob.LocalSGD(2), ob.LocalSGD(2, "reset")),
        (ob.LocalSGD(2), ob.Average(2)),
    ],
)
def test_otherwise_they_differ(engine, one, other):
    """So that the equalities above say something."""
    common, whole = _shared(engine, one, other, cluster="10ms,13ms,20ms")
    assert common < whole


@examples(15)
@given(clusters(), seeds)
def test_soft_synchronisation_of_one_is_staleness_weighted_asp(engine, cluster, seed):
    options = {"cluster": cluster, "seed": seed}
    _assert_same(engine, ob.ASP(ob.Inverse()), ob.SoftSync(1), **options)
    _assert_same(engine, ob.ASP(), ob.SoftSync(1, ob.Constant()), ob.SSP(10_000), **options)


@examples(15)
@given(clusters(), seeds)
def test_backup_of_none_is_lock_step(engine, cluster, seed):
    _assert_same(engine, ob.BSP(), ob.BSP(backup=0), cluster=cluster, seed=seed)


def test_fedbuff_of_all_fresh_workers_is_averaging(engine):
    """Workers that push together are never stale, and their buffer is the whole cohort.

    Real workers push together where they must, so that it is averaging which sets the order.
    """
    one, other = ob.LocalSGD(2), ob.FedBuff(3, every=2)
    if engine == "local":
        assert _shared(engine, one, other, workers=3)[0] >= 1
        return
    hashes = [_hashes(engine, discipline, workers=3, epochs=1) for discipline in (one, other)]
    assert hashes[0][0] == hashes[1][0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (ob.BMUF(2), ob.BMUF(2, momentum=1 - 1 / 3)),
        (ob.BMUF(2, nesterov=True), ob.BMUF(2, momentum=1 - 1 / 3, nesterov=True)),
        (ob.AsyncLocalSGD(2), ob.AsyncLocalSGD(2, delay=3)),
        (ob.EASGD(2), ob.EASGD(2, alpha=0.9 / 3)),
    ],
)
def test_what_is_left_out_is_filled_in_by_the_number_of_workers(engine, one, other):
    _assert_same(engine, one, other, cluster="10ms,13ms,20ms")


# ---------------------------------------------------------------- EASGD


@pytest.mark.parametrize("codec", CODECS)
@examples(8)
@given(seed=seeds, order=st.lists(st.integers(0, 2), min_size=3, max_size=12))
def test_an_elastic_exchange_conserves_worker_plus_centre(codec, seed, order):
    """x + centre changes by the worker's own gradient step and by nothing else.

    Workers exchange in any order, some with a centre that others have moved since they read it.
    """
    rate, what = 0.05, problem(seed=seed)
    plain_sgd = partial(torch.optim.SGD, lr=rate)
    wanted = asked(*what, ob.EASGD(1, alpha=0.3), plain_sgd, 3, 2, 4, seed, codec=codec)
    job = make_job(wanted)
    store = job.make_store(Log())
    workers = [job.make_worker(store, w, store.join(w, 0.0)) for w in range(3)]
    for number, worker in enumerate(workers):
        worker.accept(store.pull(number, 0.0))
        _compute(store, worker)
    sequence = [0, 0, 0]
    for number in order:
        worker = workers[number]
        if sequence[number] % 2 == 0:  # now and then it makes do with the centre it has
            worker.accept(store.pull(number, 0.0))
        replica = worker.sender.replica
        before = _sum(replica, store)
        steps = {name: rate * p.grad for name, p in replica.parameters.items()}
        sent = worker.contribution(sequence[number], Timing(), seed)
        sequence[number] += 1
        store.push(sent, 0.0)
        after = _sum(replica, store)
        for name, step in steps.items():
            torch.testing.assert_close(after[name], before[name] - step, rtol=0, atol=1e-12)
        _compute(store, worker)


def _compute(store, worker) -> None:
    worker.take(store.lease(worker.number))
    worker.catch_up()


def _sum(replica, store) -> dict[str, torch.Tensor]:
    centre = {n: v for flat in store.parameters.flats for n, v in flat.views.items()}
    return {name: p.detach() + centre[name] for name, p in replica.parameters.items()}


def test_elastic_workers_without_elasticity_leave_the_centre_alone(engine):
    what = problem()
    got = run(engine, what, ob.EASGD(2, alpha=0.0), workers=3)
    assert_close(got.model, what.model, 0.0)
    moved = run(engine, what, ob.EASGD(2, alpha=0.3), workers=3)
    with pytest.raises(AssertionError):
        assert_close(moved.model, what.model)
