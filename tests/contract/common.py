"""What the contract tests share: tiny problems, a plain PyTorch loop, clusters and listeners."""

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.config.run_config import Hosts, OnRay, RunConfig
from offbeat.data.reader import Reader
from offbeat.discipline.course import as_course
from offbeat.engine.sim import compute_times as pace
from offbeat.log.log import read
from offbeat.log.records import Updated
from tests.contract.real import translated

SGD = partial(torch.optim.SGD, lr=0.05)
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
CODECS = [None, "topk:0.3", "int8", "1bit", "bf16", "fp16"]


def asked(
    model: nn.Module,
    data: Any,
    loss: Any,
    discipline: Any,
    optimizer: Any,
    workers: int,
    batch_size: int,
    epochs: int,
    seed: int = 0,
    **options: Any,
) -> RunConfig:
    """A run of which only the job is wanted."""
    return RunConfig(
        model=model, data=data, loss=loss, discipline=discipline, optimizer=optimizer,
        workers=workers, batch_size=batch_size, epochs=epochs, seed=seed, **options,
    )  # fmt: skip


class Turns:
    """How many examples of a test have been tried on real processes."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.count, self.failed = 0, False

    def up(self, most: int) -> bool:
        """Whether enough have been tried; the first, which is always the simplest, is left out."""
        self.count += 1
        return not (self.failed or 1 < self.count <= 1 + most)


turns = Turns()


def examples(count: int, local: int = 1) -> Callable[[Any], Any]:
    """So many examples, and no search for a smaller one: each is one run or several.

    Real processes are slow to start, so that they get few of them.
    """
    decide = settings(max_examples=count, phases=(Phase.explicit, Phase.generate))

    def decorate(test: Any) -> Any:
        inner = test.hypothesis.inner_test

        @wraps(inner)
        def few(*args: Any, **named: Any) -> None:
            if named.get("engine", named.get("local_only")) == "local" and turns.up(local):
                return
            try:
                inner(*args, **named)
            except BaseException:
                turns.failed = True  # and is tried again for the report
                raise

        test.hypothesis.inner_test = few
        return decide(test)

    return decorate


def covering(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every combination for the simulator, and each value of each axis once for real processes."""
    values = [list(axis) for axis in axes]
    longest = max(len(axis) for axis in values)
    diagonal = [tuple(axis[i % len(axis)] for axis in values) for i in range(longest)]
    return [("sim", *row) for row in product(*values)] + [("local", *row) for row in diagonal]


def both(names: Iterable[str], real: Iterable[str]) -> list[tuple[str, str]]:
    """Rows for the simulator, and fewer for real processes: the same code reads their logs."""
    return [("sim", name) for name in names] + [("local", name) for name in real]


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for run folders, in memory if there is such a place: disks are slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


# ---------------------------------------------------------------- problems


class Problem(NamedTuple):
    """What `ob.train` takes first."""

    model: nn.Module
    data: TensorDataset
    loss: Callable[..., torch.Tensor] = F.mse_loss


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


class Links:
    """How real processes talk to their server: `pytest --over tcp` has them do it by TCP.

    `--over ray` has Ray start them, which takes some seconds for each run.
    """

    over = "memory"

    def engine(self) -> Any:
        """What `ob.train` is to run where a test asks for real processes."""
        small = {"CPU": 0.1}
        return {"memory": "local", "tcp": Hosts(), "ray": OnRay(worker_resources=small)}[self.over]


links = Links()
NOT_OVER_TCP = {"layout"}


def problem(make: Callable[[], nn.Module] = mlp, samples: int = 24, seed: int = 0) -> Problem:
    """A regression of 3 numbers to 2, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make().double()
        inputs = torch.randn(samples, 3, dtype=torch.float64)
        target = torch.randn(samples, 2, dtype=torch.float64)
    return Problem(model, TensorDataset(inputs, target))


def run(engine: str, what: Problem, discipline: ob.Discipline | str, **options: Any) -> ob.Run:
    """Train a copy with small numbers; an optimiser is given unless the discipline brings one."""
    options = {"batch_size": 4, "epochs": 2} | options
    if engine in ("local", "hosts"):
        options = translated(options)
    if "optimizer" not in options:
        options["optimizer"] = optimizer_for(discipline)
    fresh = what._replace(model=copy.deepcopy(what.model))
    where: Any = Hosts() if engine == "hosts" else engine
    if engine == "local" and not options.keys() & NOT_OVER_TCP:
        where = links.engine()
    return ob.train(*fresh, discipline=discipline, engine=where, **options)


def replay_as(folder: Path, what: Problem, **changes: Any) -> ob.Replay:
    """Replay a run as if its settings had been others: real time orders no two runs alike, but a
    log holds one order, which any discipline can be made to follow.
    """
    with scratch() as place:
        copied = place / "copy"
        shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("checkpoints"))
        config = json.loads((copied / "run.json").read_text())
        assert config.keys() >= changes.keys()
        # As a folder of an earlier version, which has no checksums.
        del config["run"]
        (copied / "manifest.json").unlink()
        (copied / "run.json").write_text(json.dumps(config | changes))
        return ob.replay(copied, *what)


def check_run(folder: Path, what: Problem, epochs: int = 2, **code: Any) -> list[Any]:
    """From its log alone: no sample lost or repeated, and a replay with the same bits throughout.

    Returns the records.
    """
    records = list(read(folder / "log.jsonl"))
    for epoch in recount(records, len(what.data), epochs):
        assert epoch["repeated"] == epoch["missing"] == 0
        assert epoch["applied"] + epoch["dropped"] == len(what.data)
    updates = sum(isinstance(record, Updated) for record in records)
    assert ob.replay(folder, *what, **code).check().compared == updates
    return records


def packs_pulls(discipline: ob.Discipline) -> bool:
    """Whether workers of this discipline pull what may be packed."""
    aside = discipline.pairs or discipline.send.in_place or discipline.weigh.elementwise
    return not aside


def optimizer_for(discipline: ob.Discipline | str, factory: Any = MOMENTUM) -> Any:
    return None if as_course(discipline).first.brings_rule else factory


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def assert_same_bits(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert torch.equal(mine[name], theirs[name]), name


def assert_close(one: nn.Module, other: nn.Module, tolerance: float = 1e-12) -> None:
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(
            mine[name], theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


# ---------------------------------------------------------------- plain PyTorch


def plain(
    what: Problem,
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    batch_size: int = 4,
    epochs: int = 2,
    seed: int = 0,
    groups: Callable[[nn.Module], Any] | None = None,
    schedule: Callable[..., Any] | None = None,
    clip: float | None = None,
    accumulate: int = 1,
) -> nn.Module:
    """The loop that a PyTorch user would write, over the same order of samples."""
    model = copy.deepcopy(what.model).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = optimizer(groups(model) if groups else trained)
    scheduler = schedule(rule) if schedule else None
    inputs, target = what.data.tensors
    for epoch in range(epochs):
        order = Reader(what.data, seed).order(epoch)
        for rows in order.split(batch_size * accumulate):
            rule.zero_grad()
            for part in rows.split(-(-len(rows) // accumulate)):
                loss = what.loss(model(inputs[part]), target[part])
                if accumulate > 1:
                    loss = loss * (len(part) / len(rows))
                loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            rule.step()
        if scheduler is not None:
            scheduler.step()
    return model


# ---------------------------------------------------------------- disciplines


def named(workers: int) -> dict[str, ob.Discipline]:
    """Every named row that keeps a log, with numbers that suit a run of a few dozen steps."""
    rows = {
        "bsp": ob.BSP(),
        "bsp-backup": ob.BSP(backup=min(1, workers - 1)),
        "soft": ob.SoftSync(min(2, workers)),
        "ssp": ob.SSP(slack=1),
        "asp": ob.ASP(),
        "asp-inverse": ob.ASP(ob.Inverse()),
        "asp-poly": ob.ASP(ob.Polynomial(0.5)),
        "asp-dc": ob.ASP(ob.DelayCompensation(0.5)),
        "asp-dc-adaptive": ob.ASP(ob.AdaptiveDelayCompensation()),
        "asp-gap": ob.ASP(ob.GapAware()),
        "ringmaster": ob.Ringmaster(2),
        "rennala": ob.Rennala(min(2, workers), redo=True),
        "downpour": ob.Downpour(push=2, fetch=2),
        "downpour-rare-fetch": ob.Downpour(push=2, fetch=3),
        "downpour-rare-push": ob.Downpour(push=3, fetch=2),
        "asup": ob.ASUP(slack=2, lr=0.002),
        "average": ob.Average(2),
        "local": ob.LocalSGD(2),
        "bmuf": ob.BMUF(2),
        "bmuf-nesterov": ob.BMUF(2, nesterov=True),
        "easgd": ob.EASGD(2),
        "diloco": ob.DiLoCo(2, momentum=0.5),
        "async-local": ob.AsyncLocalSGD(3),
        "fedbuff": ob.FedBuff(min(2, workers), every=2),
        "gossip": ob.Gossip(),
    }
    return rows


NAMES = list(named(2))


# ---------------------------------------------------------------- clusters

_SECONDS = st.sampled_from([0.01, 0.013, 0.02, 0.035])


@st.composite
def paces(draw: st.DrawFn) -> pace.Distribution:
    """How long a step takes: always the same, or scattered."""
    seconds = draw(_SECONDS)
    kind = draw(st.sampled_from(["constant", "exponential", "lognormal"]))
    if kind == "constant":
        return pace.Constant(seconds)
    return pace.Exponential(seconds) if kind == "exponential" else pace.LogNormal(seconds, 0.5)


@st.composite
def _faults(draw: st.DrawFn, joins: float) -> dict[str, Any]:
    """Pauses shorter and longer than any patience here, and deaths with or without a return."""
    failures, pauses, clock = [], [], joins
    for _ in range(draw(st.integers(0, 2))):
        clock += draw(st.sampled_from([0.0, 0.011, 0.03, 0.07]))
        back = draw(st.sampled_from([None, 0.005, 0.04, 0.2]))
        failures.append(ob.Failure(clock, back))
        if back is None:
            break
        clock += back + 0.001
    clock = joins
    for _ in range(draw(st.integers(0, 2))):
        clock += draw(st.sampled_from([0.002, 0.02, 0.05]))
        lasting = draw(st.sampled_from([0.004, 0.03, 0.15]))
        pauses.append(ob.Pause(clock, lasting))
        clock += lasting + 0.001
    return {"failures": tuple(failures), "pauses": tuple(pauses)}


@st.composite
def clusters(
    draw: st.DrawFn,
    faults: bool = False,
    late: bool | None = None,
    least: int = 1,
    most: int = 5,
) -> ob.Cluster:
    """A few workers of any speed and link; with faults, worker 0 is the one that never dies."""
    machines = []
    for number in range(draw(st.integers(least, most))):
        waits = faults if late is None else late
        joins = draw(st.sampled_from([0.0, 0.0, 0.025, 0.08])) if waits and number else 0.0
        trouble = draw(_faults(joins)) if faults else {}
        if number == 0:
            trouble.pop("failures", None)
        machines.append(
            ob.Machine(
                draw(paces()),
                bandwidth=draw(st.sampled_from([float("inf"), 1e5, 1e4])),
                latency=draw(st.sampled_from([0.0, 0.001, 0.02])),
                joins_at=joins,
                **trouble,
            )
        )
    apply = draw(st.sampled_from([0.0, 0.001, 0.01]))
    return ob.Cluster(tuple(machines), apply=apply, patience=draw(st.sampled_from([0.02, 0.1])))


seeds = st.integers(0, 1000)


# ---------------------------------------------------------------- listeners


class Records(ob.Listener):
    """Keeps every record of a run, and its store for a look at the board."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.store: Any = None

    def begin(self, store: Any, samples: int) -> None:
        self.store = store

    def see(self, record: Any) -> None:
        self.all.append(record)

    def of(self, *kinds: type) -> Iterator[Any]:
        return (record for record in self.all if isinstance(record, kinds))


class Stop(Exception):
    """What a user's listener may raise."""


class StopAfter(ob.Listener):
    """Stops the run while a record is being written."""

    def __init__(self, records: int):
        self.left = records

    def see(self, record: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


def recount(records: Sequence[Any], samples: int, epochs: int) -> list[dict[str, int]]:
    """The ledger as the log alone gives it, counted sample by sample."""
    applied = [[0] * samples for _ in range(epochs)]
    dropped = [[0] * samples for _ in range(epochs)]
    for record in records:
        kind = type(record).__name__
        late = kind == "Dropped" and not record.redo
        parts = record.parts if kind == "Updated" else [record.part] if late else []
        for part in parts:
            for lease in part.leases:
                rows = applied if kind == "Updated" else dropped
                for position in range(lease.start, lease.stop):
                    rows[lease.epoch][position] += 1
    return [
        {
            "applied": sum(a == 1 for a in once),
            "repeated": sum(a > 1 or a + d > 1 for a, d in zip(once, late, strict=True)),
            "missing": sum(a + d == 0 for a, d in zip(once, late, strict=True)),
            "dropped": sum(late),
        }
        for once, late in zip(applied, dropped, strict=True)
    ]
