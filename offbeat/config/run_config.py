"""One run as its user asks for it: every option in one place, made from keywords and checked."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypedDict

from torch import nn
from torch.utils.data import DataLoader, Dataset

from offbeat.codec import Codec
from offbeat.config.checks import at_least, one_of
from offbeat.config.job import Job
from offbeat.config.keywords import check_kinds, check_names
from offbeat.config.task import Metrics, OptimizerFactory, check_metric
from offbeat.config.units import emulated
from offbeat.data.loader import unpacked
from offbeat.data.order import Reading
from offbeat.data.reader import Collate, Reader
from offbeat.data.shares import Shares
from offbeat.data.stream import open_reader
from offbeat.discipline.course import Course
from offbeat.discipline.discipline import Discipline
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import ConfigError
from offbeat.log.log import Listener
from offbeat.model.objective import Loss
from offbeat.model.table import Placement, total_bytes
from offbeat.rules.constraint import Constraint
from offbeat.rules.schedule import Schedule
from offbeat.rules.updater import Clip
from offbeat.split.layout import Layout, replicas_of

LONGEST = 1_000_000  # seconds of patience; the system cannot wait for much longer at once
SMALL = 1 << 20  # bytes of a model whose tensors are not worth sharing among threads
VIA = ("store", "allreduce")  # how contributions meet
PLACEMENT = ("spread", "pack")  # of workers on the hosts of a cluster
USUAL = 4  # workers, unless a user says how many


# ---------------------------------------------------------------- where a run takes place


@dataclass(frozen=True)
class Local:
    """Processes on this machine.

    `patience` is the seconds after which a silent worker counts as lost; `threads` is for each
    worker, by default its share of the cores; `emulate` are the least seconds of each worker's
    step; `overlap` lets workers compute on while their last contribution is under way.
    """

    patience: float = 30.0
    threads: int | None = None
    emulate: tuple[float, ...] | None = None
    overlap: bool = False
    prefetch: bool | None = None  # read ahead in a thread; True: the dataset never draws
    via: str = "store"  # how contributions meet: in a store, or "allreduce", among the workers
    backup: Literal["auto", False] = "auto"  # a second copy of a store that images cannot keep

    name: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        check_kinds(vars(self))
        patience: Any = self.patience
        number = isinstance(patience, int | float) and not isinstance(patience, bool)
        if not number or not 0 < patience <= LONGEST:
            raise ConfigError(
                f"patience must be seconds, above 0 and at most {LONGEST:,}, not {patience!r}: "
                "write patience=30"
            )
        one_of("via", self.via, VIA)
        backup: Any = self.backup
        if backup is not False and backup != "auto":
            raise ConfigError(
                f"backup must be 'auto' or False, not {backup!r}: with 'auto' a store that is "
                "killed loses nothing, with False it may go back to its last checkpoint"
            )

    def described(self, job: Job) -> dict[str, Any]:
        """What a run folder says of this engine: all that replay and resuming depend on."""
        return {
            "engine": self.name,
            "threads": self.threads_for(job),
            "overlap": self.overlap,
            "via": self.via,
            "emulate": None if self.emulate is None else list(self.emulate),
        }

    def threads_for(self, job: Job) -> int:
        """Its share of the cores for each worker; a small model is faster with one thread."""
        if self.threads is not None:
            return self.threads
        if total_bytes(job.content.model.parameters()) < SMALL:
            return 1
        return max(1, len(os.sched_getaffinity(0)) // processes_of(job))


@dataclass(frozen=True)
class Hosts(Local):
    """Workers on other machines, which reach a store on this one over the network.

    The first step begins when `begin` workers are there; None is all of them.
    """

    begin: int | None = None

    name: ClassVar[str] = "hosts"

    def threads_for(self, job: Job) -> int:
        """The same for all, so that a replay adds up as they do."""
        small = total_bytes(job.content.model.parameters()) < SMALL
        each = processes_of(job) // job.workers
        cores = 1 if small else max(1, len(os.sched_getaffinity(0)) // each)
        return self.threads or cores


@dataclass(frozen=True)
class OnRay(Hosts):
    """Workers that Ray places on its cluster, and that reach a store on this host of it.

    `address` is the cluster's; None is one that this machine belongs to, or one that is started
    here for this run. `worker_resources` are what Ray is to give each worker. They `spread` over
    the hosts, or `pack` on few. A cluster without room for those that are to begin is refused, or
    waited for as many seconds as `wait` says.
    """

    address: str | None = None
    worker_resources: Mapping[str, float] | None = None  # None: {"CPU": 1}
    placement: str = "spread"
    wait: float = 0.0
    tls: bool | None = None  # None: where a link leaves the machine

    name: ClassVar[str] = "ray"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("placement", self.placement, PLACEMENT)
        for name, amount in self.resources.items():
            number = isinstance(amount, int | float) and not isinstance(amount, bool)
            if not isinstance(name, str) or not number or not 0 <= amount < LONGEST:
                raise ConfigError(
                    "worker_resources says how much of what each worker needs, as in "
                    f"{{'CPU': 1, 'GPU': 1}}, not {name!r}: {amount!r}"
                )

    @property
    def resources(self) -> Mapping[str, float]:
        """What Ray keeps for each worker."""
        return {"CPU": 1} | dict(self.worker_resources or {})

    def threads_for(self, job: Job) -> int:
        """As many as each worker has processors, whatever the store's host has."""
        small = total_bytes(job.content.model.parameters()) < SMALL
        return self.threads or (1 if small else max(1, int(self.resources["CPU"])))


def processes_of(job: Job) -> int:
    """The processes of all workers; a split replica has several."""
    cut = job.content.cut
    return job.workers * (1 if cut is None else cut.layout.pp * cut.layout.tp)


@dataclass(frozen=True)
class Simulated:
    """Virtual time, on a cluster that is only described."""

    cluster: Cluster

    def described(self, job: Job) -> dict[str, Any]:
        return {"engine": "sim", "cluster": self.cluster.to_toml()}


@dataclass(frozen=True)
class Alone:
    """The process of a script, which is the only worker; `threads` are those that it has."""

    threads: int

    def described(self, job: Job) -> dict[str, Any]:
        return {"engine": "alone", "threads": self.threads}


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What is trained, how its workers keep step, where, and what is kept of it.

    Values are as a user writes them. Single ones are checked here; what depends on the model and
    the data is checked when a job is made of them, and what an engine cannot do when it is
    brought up.
    """

    # What is trained, and on what.
    model: nn.Module
    data: Dataset[Any]
    loss: Loss | None = None  # None where a script computes it
    optimizer: OptimizerFactory | None = None
    schedule: Schedule | None = None
    clip: Clip | None = None
    constrain: Constraint | str | Sequence[Constraint | str] | None = None
    groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None = None
    batch_size: int = 32
    accumulate: int = 1
    epochs: int = 1
    collate: Collate | None = None
    shuffle: bool = True
    drop_last: bool = False
    seed: int = 0
    test: Dataset[Any] | DataLoader[Any] | None = None
    metric: Metrics = None

    # How its workers keep step.
    discipline: Discipline | Course | str = "bsp"
    workers: int = USUAL
    shares: Shares | str | Sequence[float] | None = None
    layout: Layout | str | None = None
    device: str | Sequence[str] | None = None  # of all workers, or of each; None is the CPU
    codec: Codec | str | None = None
    pull_codec: Codec | str | None = None
    shards: int | Placement = 1
    policies: Mapping[str, str] = field(default_factory=dict)
    nonfinite: Literal["stop", "skip"] = "stop"

    # Where.
    engine: Local | Simulated | Alone = field(default_factory=Local)
    verify: bool = False
    token: str | Path | None = None  # where ranks on several hosts find that of the run

    # What is kept of it, and who sees it.
    out: str | Path | None = None
    resume: bool = False
    start: str | Path | None = None
    checkpoint_every: int | None = None
    evaluate_every: int | None = None
    test_device: str | None = None  # where tests are computed
    hash_every: int | None = None
    listeners: Sequence[Listener] = ()
    watch: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)
    numerics: int | None = None  # how numbers are made: None is as ever, or as in the folder
    reading: Reading = field(default_factory=Reading)  # as a DataLoader says it

    def __post_init__(self) -> None:
        check_kinds(vars(self))
        if not isinstance(self.model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(self.model).__name__}")
        for name in ("workers", "batch_size", "epochs", "accumulate"):
            at_least(name, getattr(self, name), 1)
        at_least("seed", self.seed, 0)
        check_metric(self.metric, self.test)
        if self.resume and self.out is None:
            raise ConfigError(
                "resume=True needs out=, a folder: name the one of the run to go on with"
            )

    def reader(self) -> Reader:
        """What makes batches of leases."""
        return open_reader(self.data, self.seed, self.shuffle, self.collate, self.reading)


# ---------------------------------------------------------------- from keywords

LOCAL = tuple(option.name for option in fields(Local))
RAY = tuple(option.name for option in fields(OnRay) if option.name not in LOCAL)
# All that a user may say; how numbers are made is said by a run folder alone, and how samples are
# read by a DataLoader.
_UNSAID = ("numerics", "reading")
NAMES = (*(f.name for f in fields(RunConfig) if f.name not in _UNSAID), "cluster", *LOCAL, *RAY)


def anywhere(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a run apart from where it takes place: patience with nobody, and the like."""
    return {name: value for name, value in given.items() if name not in LOCAL}


class Options(TypedDict, total=False):
    """What `train` and `replay` take beyond the essentials."""

    codec: Codec | str | None  # how small contributions are made: "topk:0.01", "int8", ...
    pull_codec: Codec | str | None  # and how small the change is made that a worker pulls
    schedule: Schedule | None  # learning rate over epochs or versions
    clip: Clip | None  # gradient clipping
    constrain: Constraint | str | Sequence[Constraint | str] | None  # after each update
    groups: Callable[[nn.Module], Sequence[dict[str, Any]]] | None  # parameter groups
    device: str | Sequence[str] | None  # "cuda:0", one per worker: "cuda:0,cuda:1", or "auto"
    policies: Mapping[str, str]  # buffer name patterns to shared, averaged or local
    shards: int | Placement  # of the store
    accumulate: int  # parts in which a batch is computed
    collate: Collate | None
    shuffle: bool
    drop_last: bool  # leave out the samples at the end of an epoch that make no whole batch
    shares: Shares | str | Sequence[float] | None  # of a round's samples: "speed", or "1,2,4"
    nonfinite: Literal["stop", "skip"]
    hash_every: int | None  # versions between two hashes in the log; None: more for large models
    layout: Layout | str | None  # how each replica is split over processes: "pp=2"


def configure(given: Mapping[str, Any]) -> RunConfig:
    """The run that keywords ask for, by the names that `ob.train` has for them."""
    check_names(given, NAMES)
    rest = unpacked(given)
    workers, cluster = rest.pop("workers", None), rest.pop("cluster", None)
    workers = replicas_of(rest.get("layout"), workers, cluster is not None)
    if workers is not None:
        at_least("workers", workers, 1)
    engine = rest.pop("engine", None) or ("local" if cluster is None else "sim")
    ray = {name: rest.pop(name) for name in RAY if rest.get(name) is not None}
    for name in ray:
        if engine != "ray":
            raise ConfigError(f"{name} is for engine='ray': add that, or leave {name} out")
    local = {name: rest.pop(name, None) for name in LOCAL}
    local = {name: value for name, value in local.items() if value is not None}
    if engine == "sim":
        engine = _simulated(cluster, workers, local)
        workers = len(engine.cluster)
    elif not isinstance(engine, Alone):
        engine = _real(engine, cluster, USUAL if workers is None else workers, local | ray)
    return RunConfig(**rest, workers=USUAL if workers is None else workers, engine=engine)


def _real(engine: Any, cluster: Any, workers: int, given: dict[str, Any]) -> Local:
    if isinstance(engine, Hosts):
        return replace(engine, **given)
    if engine not in ("local", "ray"):
        raise ConfigError(f"unknown engine {engine!r}: there are 'local', 'ray' and 'sim'")
    if cluster is not None:
        raise ConfigError(
            "a cluster is simulated: pass engine='sim' with it, or emulate=['20ms', '80ms'] "
            "to slow down real workers"
        )
    if "emulate" in given:
        given["emulate"] = emulated(given["emulate"], workers)
    if engine == "ray":
        check_begin(given.get("begin"), workers)
        return OnRay(**given)
    return Local(**given)


def check_begin(begin: Any, workers: int) -> None:
    """A run may begin with fewer workers than it takes, and not with more."""
    if begin is not None and at_least("begin", begin, 1) > workers:
        raise ConfigError(
            f"begin={begin} workers, and there may be {workers} at most: raise workers="
        )


def _simulated(cluster: Any, workers: int | None, local: dict[str, Any]) -> Simulated:
    for name, value in local.items():
        if value:
            raise ConfigError(
                f"{name} is for engine='local': in a simulation the cluster says how fast "
                "workers are and how long to wait for them"
            )
    if cluster is None:
        return Simulated(Cluster.equal(USUAL if workers is None else workers))
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
    return Simulated(cluster)
