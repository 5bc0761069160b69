"""The front door for functions: a model, data and a loss in, a finished run out."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.utils.data import Dataset

from offbeat.choices import at_least
from offbeat.cluster import Cluster
from offbeat.discipline import Discipline
from offbeat.engine.crew import Crew
from offbeat.engine.local import run_local
from offbeat.engine.local_plan import Local, check
from offbeat.engine.sim import Simulation
from offbeat.engine.sim_state import drive, restore
from offbeat.engine.steward import Rhythm
from offbeat.engine.verify import verify
from offbeat.errors import ConfigError
from offbeat.given import check_kinds, check_names
from offbeat.job import Job, Numbers
from offbeat.kept import Kept, begin_with
from offbeat.layout.value import replicas_of
from offbeat.log import Listener
from offbeat.pace import emulated
from offbeat.replica.evaluate import Evaluator
from offbeat.replica.objective import Loss
from offbeat.report.score import Judged
from offbeat.report.summary import Tally
from offbeat.run import Run
from offbeat.session import Session, fixed_arithmetic
from offbeat.setup import Essentials, Options, describe, make_job, numerics_of, try_step
from offbeat.store.checkpoint import RunFolder
from offbeat.task import Metric, OptimizerFactory, check_metric
from offbeat.watch import Watch


class TrainOptions(Options, total=False):
    """What `train` takes beyond the essentials; `Options` are shared with `replay`."""

    evaluate_every: int  # samples between two tests; one epoch by default
    checkpoint_every: int | None  # versions between two checkpoints; None saves after each epoch
    emulate: Sequence[float | str] | str | None  # least time of each worker's step: "20ms,80ms"
    overlap: bool  # compute on while the last gradient is under way; local engine only
    patience: float  # seconds that a process may be silent; then it is lost; local engine only
    prefetch: bool | None  # read ahead in a thread: the dataset never draws; local engine only
    threads: int | None  # of each worker; None shares the cores; local engine only
    via: str  # "store", or "allreduce": workers add up among themselves; local engine only
    start: str | Path | None  # a run folder whose last parameters and rule state to begin with
    listeners: Sequence[Listener]  # see every record as it is written
    metric: Metric | None  # a score of one's own, taken at every test
    verify: bool  # first compare one step of the layout with one process, gradient by gradient
    watch: bool  # show the run on a page of this machine; its address is printed
    origin: dict[str, Any]  # what the run folder says of where model and data came from


def train(
    model: nn.Module,
    data: Dataset[Any],
    loss: Loss,
    *,
    discipline: Discipline | str = "bsp",
    optimizer: OptimizerFactory | None = None,
    workers: int | None = None,
    batch_size: int = 32,
    epochs: int = 1,
    engine: str | None = None,
    cluster: Cluster | str | None = None,
    test: Dataset[Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train `model` on `data` with several workers under `discipline`; see `Options` for the rest.

    The model itself is trained, as a loop in PyTorch would do it, and is the run's `model`; if the
    run fails or is stopped it is left as it was.
    `optimizer` is a factory such as `partial(torch.optim.SGD, lr=0.1)`. The engine is "local",
    processes on this machine, or "sim", which a `cluster` implies. With `out` the run keeps its
    log and checkpoints in that folder; `resume` goes on with a run that was stopped.
    """
    check_names(options, (*TrainOptions.__annotations__, *inspect.signature(train).parameters))
    check_kinds({**options, "out": out, "resume": resume})
    engine = engine or ("local" if cluster is None else "sim")
    if engine not in ("local", "sim"):
        raise ConfigError(f"unknown engine {engine!r}: there are 'local' and 'sim'")
    if engine == "local" and cluster is not None:
        raise ConfigError(
            "a cluster is simulated: pass engine='sim' with it, or emulate=['20ms', '80ms'] "
            "to slow down real workers"
        )
    workers = replicas_of(options.get("layout"), workers, cluster is not None)
    local = _local(options, engine, workers)
    simulated = _cluster(cluster, workers)
    every = options.pop("evaluate_every", None)
    checkpoint_every = options.pop("checkpoint_every", None)
    listeners = options.pop("listeners", ())
    if options.pop("watch", False):
        listeners = (*listeners, Watch(str(discipline), virtual=engine == "sim"))
    origin, verified = options.pop("origin", {}), options.pop("verify", False)
    start, metric = options.pop("start", None), options.pop("metric", None)
    check_metric(metric, test)
    wanted = Essentials(
        model, data, loss, discipline, optimizer, len(simulated), batch_size, epochs, seed,
        numerics_of(out, resume),
    )  # fmt: skip
    if resume and out is None:
        raise ConfigError("resume=True needs out=, the folder of the run to go on with")
    with fixed_arithmetic(), ExitStack() as after:
        job = make_job(wanted, options)
        evaluator = None
        if test is not None:
            evaluator = Evaluator(test, loss, options.get("collate"), metric=metric)
        config = describe(job, optimizer) | _describe_engine(job, local, simulated)
        config |= {"origin": origin, "metric": metric and metric.described()}
        earlier = RunFolder(start) if start is not None else None
        tally = Tally(job.workers, metric=Judged(**metric.described()) if metric else None)
        if local is not None:
            check(job, local)
        else:
            job.check_simulated()
        try_step(job)
        if verified:
            _verify(job, local)
        kept = after.enter_context(Kept.open(out, resume, config, job))
        kept.recount(tally)
        for listener in listeners:
            listener.describe(config, tally.samples)
        if local is not None:
            rhythm = Rhythm((every or job.samples) if test is not None else None, checkpoint_every)
            crew = Crew(job, local, kept.folder, evaluator, rhythm)
            if earlier is not None and kept.saved is None:
                kept.begin_with(crew.store, earlier)  # now, to find what does not fit
                kind = job.discipline.for_workers(job.workers)
                crew.begin = partial(begin_with, earlier=earlier, discipline=kind)
            return run_local(crew, kept, tally, listeners)
        log = kept.log()
        after.callback(log.close)
        store = job.make_store(log)
        begun = None
        if earlier is not None and kept.saved is None:
            begun = kept.begin_with(store, earlier)
        session = Session(
            job, store, kept.folder, evaluator, every or job.samples, checkpoint_every
        )
        log.listeners += [tally, *listeners]
        with log.followed(store, job.samples * job.epochs):
            if begun is not None:
                log.write(begun)
            return _simulate(job, simulated, session, kept, tally)


def _local(options: TrainOptions, engine: str, workers: int | None) -> Local | None:
    """How the local engine is to run, or None for a simulation."""
    given: dict[str, Any] = {
        name: options.pop(name)
        for name in ("emulate", "overlap", "patience", "prefetch", "threads", "via")
        if name in options
    }
    if engine == "sim":
        wanted = [name for name, value in given.items() if value]
        if wanted:
            raise ConfigError(
                f"{wanted[0]} is for engine='local': in a simulation the cluster says how fast "
                "workers are and how long to wait for them"
            )
        return None
    if given.get("emulate") is not None:
        given["emulate"] = emulated(given["emulate"], 4 if workers is None else workers)
    return Local(**given)


def _verify(job: Job, local: Local | None) -> None:
    if local is None or not isinstance(job.content, Numbers) or job.content.cut is None:
        raise ConfigError(
            "verify=True compares the processes of a layout with one process: pass layout='pp=2' "
            "with engine='local', or leave verify out"
        )
    verify(job, local.threads_for(job))


def _describe_engine(job: Job, local: Local | None, cluster: Cluster) -> dict[str, Any]:
    if local is None:
        return {"engine": "sim", "cluster": cluster.to_toml()}
    return local.described(job)


def _cluster(cluster: Cluster | str | None, workers: int | None) -> Cluster:
    if workers is not None:
        at_least("workers", workers, 1)
    if cluster is None:
        return Cluster.equal(4 if workers is None else workers)
    if isinstance(cluster, str):
        cluster = Cluster.read(cluster)
    if not isinstance(cluster, Cluster):
        raise ConfigError(
            f"a cluster is an ob.Cluster or text such as '20ms,80ms', not {cluster!r}"
        )
    if workers is not None and workers != len(cluster):
        raise ConfigError(
            f"workers={workers}, but the cluster describes {len(cluster)}: leave workers out"
        )
    return cluster


def _simulate(job: Job, cluster: Cluster, session: Session, kept: Kept, tally: Tally) -> Run:
    assert isinstance(job.content, Numbers)
    store = session.store
    sim = Simulation(job, cluster, store)
    with job.content.shared.lent():
        if kept.saved is None:
            sim.start()
        else:
            tensors, meta = kept.saved
            with kept.restoring():
                restore(sim, tensors, meta)
                session.restore(meta)
        drive(sim, session)
        session.last_test(sim.now)
        held = max((worker.nbytes for worker in sim.workers.values()), default=0)
        return kept.finish(job, store, tally, "sim", held)
