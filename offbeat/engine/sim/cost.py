"""A run without gradients: what a discipline costs in time and bytes, for up to 10,000 workers."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from offbeat.config.checks import at_least
from offbeat.config.job import CostJob, CostOnly
from offbeat.data.shares import Shares, as_shares
from offbeat.discipline.course import Course, as_course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.network_simulation import simulation
from offbeat.log.log import Listener, Log
from offbeat.report.summary import Summary, Tally


@contextmanager
def _no_collection() -> Iterator[None]:
    """Nothing here makes cycles, and looking for them among many workers takes its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def estimate(
    cluster: Cluster | str,
    discipline: Discipline | Course | str,
    *,
    steps: int = 100,
    batch_size: int = 32,
    model_bytes: int = 0,
    shares: Shares | str | Sequence[float] | None = None,
    seed: int = 0,
    listeners: Sequence[Listener] = (),
) -> Summary:
    """Simulate `steps` steps per worker of a model of `model_bytes` that is never computed."""
    for name, value, least in (
        ("steps", steps, 1),
        ("batch_size", batch_size, 1),
        ("model_bytes", model_bytes, 0),
        ("seed", seed, 0),
    ):
        at_least(name, value, least)
    course = as_course(discipline)
    course.first.check_order()
    if isinstance(cluster, str):
        cluster = Cluster.read(cluster)
    workers = len(cluster)
    content = CostOnly(model_bytes, workers * steps * batch_size)
    wanted = as_shares(shares)
    for one in course.stages:
        wanted.check(one, workers)
    job = CostJob(content, course, workers, batch_size, 1, seed, shares=wanted)
    log, tally = Log(), Tally(workers, history=False)
    log.listeners += [tally, *listeners]
    store = job.make_store(log)
    sim = simulation(job, cluster, store)
    sim.start()
    with log.followed(store, content.samples), _no_collection():
        while sim.step():
            pass
    ledger = store.leases.ledger.summary()
    held = {"store": 0, "worker": 0}
    summary = tally.summary(str(job.course), "cost only", ledger, held, "")
    summary.shares = wanted.told
    return summary
