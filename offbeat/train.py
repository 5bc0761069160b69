"""The front door for functions: a model, data and a loss in, a finished run out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

from torch import nn
from torch.utils.data import Dataset

from offbeat.choices import at_least
from offbeat.cluster import Cluster
from offbeat.discipline import Discipline
from offbeat.engine.sim import Simulation
from offbeat.engine.sim_state import meta_of, restore, tensors_of
from offbeat.errors import CheckpointError, ConfigError
from offbeat.job import Job, Numbers
from offbeat.log import Listener, Log, read
from offbeat.replica.evaluate import Evaluator
from offbeat.replica.objective import Loss
from offbeat.report.summary import Tally
from offbeat.run import Run
from offbeat.session import Session, fixed_arithmetic
from offbeat.setup import Essentials, Options, describe, first_difference, make_job
from offbeat.store.checkpoint import RunFolder, model_tensors, save_tensors, write_json
from offbeat.store.core import Store
from offbeat.store.table import under
from offbeat.task import OptimizerFactory


class TrainOptions(Options, total=False):
    """What `train` takes beyond the essentials; `Options` are shared with `replay`."""

    evaluate_every: int  # samples between two tests; one epoch by default
    checkpoint_every: int | None  # versions between two checkpoints; None saves after each epoch
    start: str | Path | None  # a run folder whose last parameters and rule state to begin with
    listeners: Sequence[Listener]  # see every record as it is written
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
    engine: str = "sim",
    cluster: Cluster | str | None = None,
    test: Dataset[Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train `model` on `data` with several workers under `discipline`; see `Options` for the rest.

    `optimizer` is a factory such as `partial(torch.optim.SGD, lr=0.1)`. With `out` the run keeps
    its log and checkpoints in that folder; `resume` goes on with a run that was stopped.
    """
    if engine != "sim":
        raise ConfigError(f"unknown engine {engine!r}: there is 'sim'")
    cluster = _cluster(cluster, workers)
    every = options.pop("evaluate_every", None)
    checkpoint_every = options.pop("checkpoint_every", None)
    listeners = options.pop("listeners", ())
    origin = options.pop("origin", {})
    start = options.pop("start", None)
    wanted = Essentials(
        model, data, loss, discipline, optimizer, len(cluster), batch_size, epochs, seed
    )
    if resume and out is None:
        raise ConfigError("resume=True needs out=, the folder of the run to go on with")
    for name, value in (("evaluate_every", every), ("checkpoint_every", checkpoint_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    with fixed_arithmetic():
        job = make_job(wanted, options)
        evaluator = Evaluator(test, loss, options.get("collate")) if test is not None else None
        folder = RunFolder(out) if out is not None else None
        config = describe(job, optimizer) | {"engine": "sim", "cluster": cluster.to_toml()}
        saved = _open(folder, config, origin, job, resume)
        log = _log(folder, saved)
        store = job.make_store(log)
        if start is not None and saved is None:
            _begin_with(store, RunFolder(start), folder)
        tally = Tally(job.workers)
        session = Session(job, store, folder, evaluator, every or job.samples, checkpoint_every)
        log.listeners += [tally, *listeners]
        with log.followed(store, job.samples * job.epochs):
            return _simulate(job, cluster, store, session, tally, saved)


def _cluster(cluster: Cluster | str | None, workers: int | None) -> Cluster:
    if workers is not None:
        at_least("workers", workers, 1)
    if cluster is None:
        return Cluster.equal(4 if workers is None else workers)
    if isinstance(cluster, str):
        cluster = Cluster.read(cluster)
    if workers is not None and workers != len(cluster):
        raise ConfigError(
            f"workers={workers}, but the cluster describes {len(cluster)}: leave workers out"
        )
    return cluster


def _open(
    folder: RunFolder | None,
    config: dict[str, Any],
    origin: dict[str, Any],
    job: Job,
    resume: bool,
) -> Any:
    """Create the run folder, or find the checkpoint to go on from."""
    if folder is None:
        return None
    if not resume or not folder.config_file.exists():
        assert isinstance(job.content, Numbers)
        initial = model_tensors(job.content.model)
        folder.create(config | {"origin": origin}, initial, resume)
        return None
    difference = first_difference(folder.config(), config)
    if difference is not None:
        raise CheckpointError(
            f"{folder.path} is another run: {difference}; use the same settings to resume it"
        )
    return folder.load()


def _begin_with(store: Store, earlier: RunFolder, folder: RunFolder | None) -> None:
    """Take parameters and rule state from an earlier run; its epochs and clocks are not taken."""
    found = earlier.load()
    if found is None:
        raise CheckpointError(f"{earlier.path} has no checkpoint to begin with")
    assert store.parameters is not None
    tensors, meta = found
    store.parameters.begin_with(under("store/", tensors), meta["parameters"], str(earlier.path))
    if folder is not None:  # for replay, which may outlive the earlier run
        save_tensors(folder.start_file, store.parameters.state())


def _log(folder: RunFolder | None, saved: Any) -> Log:
    if folder is None:
        return Log()
    return Log(folder.log_file, keep=None if saved is None else saved[1]["session"]["log"])


def _simulate(
    job: Job, cluster: Cluster, store: Store, session: Session, tally: Tally, saved: Any
) -> Run:
    sim = Simulation(job, cluster, store)
    if saved is None:
        sim.start()
    else:
        tensors, meta = saved
        restore(sim, tensors, meta)
        session.restore(meta)
        _recount(session.folder, tally)
    with session.interruptible():
        while sim.step():
            session.between(sim.now, lambda: (tensors_of(sim), meta_of(sim)))
            if session.stopping:
                if session.folder is not None:
                    session.save(lambda: (tensors_of(sim), meta_of(sim)))
                raise KeyboardInterrupt
    session.last_test(sim.now)
    return _finish(job, sim, session, tally)


def _recount(folder: RunFolder | None, tally: Tally) -> None:
    """A resumed run's figures begin with what is already in its log."""
    assert folder is not None
    for record in read(folder.log_file):
        tally.see(record)


def _finish(job: Job, sim: Simulation, session: Session, tally: Tally) -> Run:
    store, folder = sim.store, session.folder
    assert store.parameters is not None
    memory = {
        "store": store.parameters.nbytes,
        "worker": max((worker.nbytes for worker in sim.workers.values()), default=0),
    }
    summary = tally.summary(
        str(job.discipline),
        "sim",
        store.leases.ledger.summary(),
        memory,
        store.parameters.digest(),
    )
    model = job.export(store)
    assert model is not None
    if folder is not None:
        save_tensors(folder.model_file, model_tensors(model))
        write_json(folder.summary_file, summary.to_dict())
    return Run(model, tally.history, summary, folder.path if folder else None)
