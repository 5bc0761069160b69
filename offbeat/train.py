"""The front door for functions: a model, data and a loss in, a finished run out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.config.job import Job
from offbeat.config.run_config import Hosts, Local, OnRay, Options, RunConfig, Simulated, configure
from offbeat.config.setup import make_job
from offbeat.config.task import Metrics, OptimizerFactory
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.bring_up import bring_up
from offbeat.engine.hosts.store import run_on_loopback
from offbeat.engine.local.launcher import run_local
from offbeat.engine.ray.launcher import run_on_ray
from offbeat.engine.result import Run
from offbeat.engine.session import fixed_arithmetic
from offbeat.engine.sim.cluster import Cluster
from offbeat.engine.sim.state import simulate
from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.model.objective import Loss
from offbeat.watch import Watch


class TrainOptions(Options, total=False):
    """What `train` takes beyond the essentials; `Options` are shared with `replay`."""

    evaluate_every: int | None  # samples between two tests; one epoch by default
    test_device: str | None  # where tests are computed: "cuda:0", or the CPU by default
    checkpoint_every: int | None  # versions between two checkpoints; None saves after each epoch
    backup: Literal["auto", False]  # False: no second copy of a large store; local engine only
    emulate: Sequence[float | str] | str | None  # least time of each worker's step: "20ms,80ms"
    overlap: bool  # compute on while the last gradient is under way; local engine only
    patience: float  # seconds that a process may be silent; then it is lost; local engine only
    prefetch: bool | None  # read ahead in a thread: the dataset never draws; local engine only
    threads: int | None  # of each worker; None shares the cores; local engine only
    via: str  # "store", or "allreduce": workers add up among themselves; local engine only
    start: str | Path | None  # a run folder whose last parameters and rule state to begin with
    listeners: Sequence[Listener]  # see every record as it is written
    metric: Metrics  # scores of one's own, taken at every test: a function, an object, several
    verify: bool  # first compare one step of the layout with one process, gradient by gradient
    watch: bool  # show the run on a page of this machine; its address is printed
    begin: int | None  # workers with which the first step begins; None: all; Ray only
    address: str | None  # of a Ray cluster; None: the one here, or one that is started for the run
    worker_resources: Mapping[str, float] | None  # of each worker: {"CPU": 1, "GPU": 1}; Ray only
    placement: str  # "spread" workers over hosts, or "pack" them on few; Ray only
    wait: float  # seconds to wait for room for the workers that are to begin; Ray only
    tls: bool | None  # encrypt links; None: those that leave the machine; Ray only
    origin: Mapping[str, Any]  # what the run folder says of where model and data came from


def train(
    model: nn.Module,
    data: Dataset[Any] | DataLoader[Any] | Callable[[], Dataset[Any] | DataLoader[Any]],
    loss: Loss,
    *,
    discipline: Discipline | Course | str = "bsp",
    optimizer: OptimizerFactory | None = None,
    workers: int | None = None,
    batch_size: int | None = None,
    epochs: int = 1,
    engine: str | None = None,
    cluster: Cluster | str | None = None,
    test: Dataset[Any] | DataLoader[Any] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    **options: Unpack[TrainOptions],
) -> Run:
    """Train `model` on `data` with several workers under `discipline`; see `Options` for the rest.

    The model itself is trained, as a loop in PyTorch would do it, and is the run's `model`; if the
    run fails or is stopped it is left as it was. A `DataLoader` is taken as it is: it says
    batch_size (else 32), shuffle, collate and drop_last, and its sampler says the order. A function
    that makes `data` is called on every host that needs it.
    `optimizer` is a factory such as `partial(torch.optim.SGD, lr=0.1)`. The engine is "local",
    processes on this machine, "ray", or "sim", which a `cluster` implies. With `out` the run keeps
    its log and checkpoints in that folder; `resume` goes on with a run that was stopped.
    """
    given = dict(locals())
    if loss is None:
        raise ConfigError("loss must be a function such as F.cross_entropy, not None")
    read = None
    if callable(data) and not hasattr(data, "__getitem__"):
        read, given["data"] = data, data()
    config = configure(given | given.pop("options"))
    if config.watch:
        watch = Watch(str(discipline), virtual=isinstance(config.engine, Simulated))
        config = replace(config, listeners=(*config.listeners, watch))
    with fixed_arithmetic():
        job = make_job(config)
        if isinstance(config.engine, OnRay):
            return run_on_ray(config, job, read)
        return _run(config, job)


def _run(config: RunConfig, job: Job) -> Run:
    with bring_up(config, job) as run:
        if isinstance(config.engine, Hosts):
            return run_on_loopback(run)
        if isinstance(config.engine, Local):
            return run_local(run.roles(), run.kept, run.tally, config.listeners)
        with run.job.content.shared.lent():
            return simulate(run)
