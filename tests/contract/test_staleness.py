"""How late contributions are: counted at the store, and known in advance for some disciplines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import offbeat as ob
from offbeat.log.records import Admitted, Dropped, Lost, Pulled, Rested, Updated
from tests.contract.common import MOMENTUM, Records, clusters, examples, named, problem, run, seeds
from tests.contract.real import AtStep, Gate, OpenWhen, level


@examples(25)
@given(clusters(faults=True), seeds, st.sampled_from(["asp", "ssp", "soft", "fedbuff", "bsp"]))
def test_staleness_is_the_version_at_push_less_the_version_at_pull(engine, cluster, seed, name):
    """Recomputed from pulls and the order of records alone."""
    seen = Records()
    discipline = named(len(cluster))[name]
    run(engine, problem(), discipline, cluster=cluster, seed=seed, listeners=[seen])
    pulled, waiting, version, parts = {}, {}, 0, 0
    for record in seen.all:
        if isinstance(record, Admitted):
            waiting[record.worker, record.sequence] = pulled[record.worker]
        elif isinstance(record, Pulled):
            assert record.version == version
            pulled[record.worker] = record.version
        elif isinstance(record, Updated):
            for part in record.parts:
                parts += 1
                # A gathered part came in at this same version: only updates move it.
                assert part.base <= version
                assert part.staleness == version - part.base
                # Its worker may have pulled again since it handed this in.
                before = waiting.pop((part.worker, part.sequence), pulled[part.worker])
                assert part.base == before
            version += 1
            assert record.version == version
    assert parts


@examples(25)
@given(clusters(), seeds)
def test_mean_staleness_of_asp_is_the_other_workers_at_work(engine, cluster, seed):
    """Every update makes each contribution under way one version staler, and nothing else does.

    So all staleness adds up, exactly, to the sum over updates of the other workers under way; those
    are workers − 1 until the samples run out, which is why the mean is workers − 1.
    """
    n, seen = len(cluster), Records()
    what = level(engine, problem(samples=40), n)
    run(engine, what, ob.ASP(), cluster=cluster, seed=seed, listeners=[seen])
    age: dict[int, int] = {}  # of what each worker under way has pulled
    staleness = others = updates = never_pushed = 0
    leases = 0
    for record in seen.all:
        if isinstance(record, Pulled):
            age[record.worker] = 0
        elif isinstance(record, Rested):
            never_pushed += age.pop(record.worker)
        elif isinstance(record, Updated):
            (part,) = record.parts
            assert part.staleness == age.pop(part.worker)
            staleness += part.staleness
            updates += 1
            leases += len(part.leases)
            others += len(age)
            if leases <= 2 * 10 - n:  # there are samples left for everybody
                assert len(age) == n - 1
            age = {worker: versions + 1 for worker, versions in age.items()}
    never_pushed += sum(age.values())
    assert staleness + never_pushed == others
    assert abs(staleness - (n - 1) * updates) <= n * n  # the start, and the end of the samples


@examples(20)
@given(
    clusters(faults=True),
    seeds,
    st.sampled_from(["bsp", "average", "local", "bmuf", "diloco"]),
)
def test_behind_a_barrier_nothing_is_stale(engine, cluster, seed, name):
    seen = Records()
    discipline = named(len(cluster))[name]
    got = run(engine, problem(), discipline, cluster=cluster, seed=seed, listeners=[seen])
    assert all(part.staleness == 0 for record in seen.of(Updated) for part in record.parts)
    assert got.summary().staleness_max == 0


@examples(20)
@given(clusters(least=2), seeds, st.data())
def test_backup_gathers_from_all_but_b(engine, cluster, seed, data):
    n = len(cluster)
    backup = data.draw(st.integers(1, n - 1))
    seen = Records()
    what = problem(samples=60)
    got = run(engine, what, ob.BSP(backup=backup), cluster=cluster, seed=seed, listeners=[seen])
    full = True
    for record in seen.all:
        full = full and not isinstance(record, Rested | Lost)
        if isinstance(record, Updated):
            assert all(part.staleness == 0 for part in record.parts)
            assert len({part.worker for part in record.parts}) == len(record.parts)
            assert len(record.parts) == n - backup if full else len(record.parts) <= n - backup
    drops = list(seen.of(Dropped))
    assert all(record.part.staleness > 0 for record in drops)
    assert got.summary().dropped == len(drops)
    lost = sum(record.part.samples for record in drops)
    assert lost == sum(epoch["dropped"] for epoch in got.summary().ledger)


def test_backup_drops_the_slow(engine):
    """A real slow worker is one that waits until the others have made an update."""
    what, gate = problem(samples=60), Gate()
    if engine == "local":
        what = what._replace(loss=AtStep(what.loss, {(2, 1): gate.wait}))
    listeners = [OpenWhen(gate, lambda record: isinstance(record, Updated))]
    got = run(engine, what, "bsp:backup=1", cluster="10ms,10ms,35ms", listeners=listeners)
    assert got.summary().dropped > 0
    if engine == "sim":  # a real one may be late every time
        assert got.summary().per_worker[2].samples > 0


@pytest.mark.parametrize("speed", ["20ms", "exponential:20ms", "lognormal:20ms,0.5"])
@pytest.mark.parametrize(
    ("discipline", "mean"), [("asp", 29.0), ("soft:2", 14.5), ("soft:3", 29 / 3)]
)
def test_mean_staleness_of_thirty_workers(speed, discipline, mean):
    """(workers − 1) / s for any speeds, up to the run-in and the end."""
    figures = ob.estimate(ob.Cluster.equal(30, speed), discipline, steps=200, seed=3)
    assert figures.staleness_mean == pytest.approx(mean, rel=0.02)


def test_thirty_equal_workers_in_lock_step():
    assert ob.estimate(ob.Cluster.equal(30), "bsp", steps=20).staleness_counts == {0: 600}


@examples(15)
@given(clusters(least=2), seeds)
def test_staleness_weights_follow_staleness(engine, cluster, seed):
    """What the log says of weight and rate is what the formulas give."""
    seen = Records()
    run(
        engine, problem(), ob.SoftSync(min(2, len(cluster))), cluster=cluster, seed=seed,
        optimizer=MOMENTUM, listeners=[seen],
    )  # fmt: skip
    for record in seen.of(Updated):
        for part in record.parts:
            assert part.weight == (1 / part.staleness if part.staleness else 1.0)
        whole = sum(part.samples for part in record.parts)
        weighed = sum(part.samples * part.weight for part in record.parts)
        assert record.rate == pytest.approx(weighed / whole, rel=1e-14)
