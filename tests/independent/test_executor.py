"""Random runs against the executor: what is left between the two is rounding in float64."""

import copy
import json
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector
from torch.optim import lr_scheduler

import offbeat as ob
from offbeat.engine.sim import compute_times
from tests.contract.common import Problem, problem, scratch
from tests.independent.executor import (
    BlockMomentum,
    DelayedNesterov,
    Executor,
    RMSMomentum,
    Way,
    Yours,
)

# A worker that comes late moves its schedule on before its first step, and means to.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:the schedule has 5 steps"),
]

CLOSE = 1e-12  # relative to the largest parameter; rounding leaves some 1e-16
RUNS = 500  # in the suite; the soak has many more


def sgd(**settings: Any) -> Any:
    return partial(torch.optim.SGD, **({"lr": 1.0} | settings))


WEIGHS = [
    ("constant",), ("inverse",), ("poly", 0.7), ("dc", 0.5), ("dc-adaptive", 0.3, 0.8),
    ("gap", 0.9),
]  # fmt: skip


def ways(draw: random.Random, n: int) -> dict[str, tuple[ob.Discipline, Way]]:
    """Every discipline that keeps a log, and what the executor has to know of it."""
    weigh = draw.choice(WEIGHS)
    kinds: dict[str, Callable[..., Any]] = {
        "constant": ob.Constant, "inverse": ob.Inverse, "poly": ob.Polynomial,
        "dc": ob.DelayCompensation, "dc-adaptive": ob.AdaptiveDelayCompensation,
        "gap": ob.GapAware,
    }  # fmt: skip
    weighed = kinds[weigh[0]](*weigh[1:])
    late = Way(weigh=weigh)
    h, momentum, lr = draw.choice([1, 2, 3]), draw.choice([0.0, 0.5, 0.9]), draw.choice([0.5, 1.0])
    push, fetch = draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    k, state = draw.randint(1, n), draw.choice(["keep", "average", "reset"])
    alpha = draw.choice([0.1, 0.9 / n])
    adagrad = partial(torch.optim.Adagrad, lr=0.05)
    outer = sgd(lr=lr, momentum=momentum, nesterov=momentum > 0)
    sums = Way("sum", weigh, sgd(lr=0.02))
    return {
        "bsp": (ob.BSP(), Way()),
        "backup": (ob.BSP(backup=min(1, n - 1)), Way()),
        "soft": (ob.SoftSync(k, weighed), late),
        "ssp": (ob.SSP(draw.choice([0, 1, 3]), weighed), late),
        "asp": (ob.ASP(weighed), late),
        "downpour": (ob.Downpour(push, fetch, lr=0.05), Way("sum", store=adagrad)),
        "sums": (
            ob.Discipline(
                ob.Accumulated(push, fetch), ob.Count(k), weigh=weighed, apply=ob.Rule("sgd", 0.02)
            ),
            sums,
        ),
        "asup": (
            ob.ASUP(slack=2, lr=0.002),
            Way(
                weigh=("inverse",),
                store=partial(RMSMomentum, lr=0.002, rho=0.9, momentum=0.9),
            ),
        ),
        "average": (ob.Average(h, state), Way("change", store=sgd(), state=state)),
        "local": (ob.LocalSGD(h, "keep"), Way("change", store=sgd())),
        "bmuf": (
            ob.BMUF(h, lr=lr, nesterov=momentum > 0.5),
            Way(
                "change",
                store=partial(BlockMomentum, lr=lr, momentum=1 - 1 / n, nesterov=momentum > 0.5),
                state="reset",
            ),
        ),
        "easgd": (ob.EASGD(h, alpha), Way("elastic", store=sgd(), alpha=alpha)),
        "diloco": (ob.DiLoCo(h, lr, momentum), Way("change", store=outer)),
        "async-local": (
            ob.AsyncLocalSGD(3, lr, momentum),
            Way("change", store=partial(DelayedNesterov, lr=lr, momentum=momentum, delay=n)),
        ),
        "fedbuff": (
            ob.FedBuff(k, h, lr),
            Way("change", ("poly", 0.5), sgd(lr=lr)),
        ),
        "gossip": (ob.Gossip(), Way("pair")),
    }


RULES = {
    "sgd": sgd(lr=0.05),
    "momentum": sgd(lr=0.02, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": sgd(lr=0.02, momentum=0.8, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01, weight_decay=0.02),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
}
SCHEDULES = [
    None,
    (partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "epoch"),
    (partial(lr_scheduler.ExponentialLR, gamma=0.97), "version"),
    (partial(lr_scheduler.CosineAnnealingLR, T_max=9), "version"),
    (partial(lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=5, cycle_momentum=False), "version"),
]
CLIPS = [None, ob.Clip(norm=0.4), ob.Clip(value=0.1), ob.Clip(norm=0.5, value=0.2)]


def cluster(draw: random.Random, n: int) -> ob.Cluster:
    """Workers of any speed, some of which come late, pause, or fail and come back."""
    machines = []
    for number in range(n):
        seconds = draw.choice([0.01, 0.013, 0.02, 0.035])
        pace = draw.choice([compute_times.Constant(seconds), compute_times.Exponential(seconds)])
        fails = number > 0 and draw.random() < 0.2
        machines.append(
            ob.Machine(
                pace,
                latency=draw.choice([0.0, 0.001, 0.02]),
                joins_at=draw.choice([0.0, 0.0, 0.03]) if number else 0.0,
                failures=(ob.Failure(0.05, draw.choice([None, 0.02])),) if fails else (),
            )
        )
    return ob.Cluster(tuple(machines), apply=draw.choice([0.0, 0.002]), patience=0.05)


def net(draw: random.Random, deep: bool = False) -> nn.Module:
    sizes = [3, *([5, 3] if deep else draw.choice([[], [4], [5, 3]])), 2]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b, bias=draw.random() < 0.8), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def gap(found: nn.Module, expected: torch.Tensor) -> float:
    """How far apart two results are, measured by the largest parameter."""
    mine = parameters_to_vector(found.parameters()).detach()
    return float((mine - expected).abs().max() / expected.abs().max())


class Drawn:
    """Settings drawn from a seed."""

    def __init__(self, seed: int, names: list[str] | None = None, deep: bool = False):
        draw = random.Random(seed)
        self.workers = draw.randint(1, 5)
        rows = ways(draw, self.workers)
        self.name = draw.choice(names or list(rows))
        self.discipline, self.way = rows[self.name]
        self.rule = draw.choice(list(RULES))
        if self.way.state == "average" and self.rule not in ("sgd", "momentum", "nesterov"):
            self.rule = "momentum"  # a mean of counts of steps is kept in float32 by PyTorch
        schedule, clip = draw.choice(SCHEDULES), draw.choice(CLIPS)
        self.cycle = schedule is SCHEDULES[-1]
        self.what = problem(lambda: net(draw, deep), samples=draw.choice([24, 30, 37]), seed=seed)
        self.options: dict[str, Any] = {
            "discipline": self.discipline,
            "optimizer": None if self.discipline.brings_rule else RULES[self.rule],
            "schedule": None if schedule is None else ob.Schedule(*schedule),
            "clip": clip,
            "batch_size": draw.choice([2, 4, 5]),
            "accumulate": draw.choice([1, 1, 2]),
            "epochs": 2,
            "seed": seed,
            "shards": draw.randint(1, min(3, len(list(self.what.model.parameters())))),
        }
        self.cluster = cluster(draw, self.workers)
        clip = clip or ob.Clip()
        self.yours = Yours(
            self.options["optimizer"], *(schedule or (None, "epoch")), clip.norm, clip.value
        )

    def __str__(self) -> str:
        return f"{self.discipline} {self.rule} {self.options}"

    def untouched(self) -> Problem:
        """What is trained, as a copy: the model is needed as it was at first."""
        return self.what._replace(model=copy.deepcopy(self.what.model))

    def executed(self, folder: Path) -> torch.Tensor:
        model = copy.deepcopy(self.what.model)
        # A cycle is over after four moves, and its last rate holds.
        last = 4 if self.cycle else None
        executor = Executor(folder, model, self.what.data, self.what.loss, self.way)
        return executor.run(self.yours, last)


def check(seed: int, names: list[str] | None = None) -> None:
    drawn = Drawn(seed, names)
    with scratch() as folder:
        run = ob.train(
            *drawn.untouched(), cluster=drawn.cluster, out=folder / "run", **drawn.options
        )
        assert gap(run.model, drawn.executed(folder / "run")) < CLOSE, str(drawn)


@pytest.mark.parametrize("name", [*ways(random.Random(0), 2)])
def test_every_discipline(name: str) -> None:
    for seed in range(4):
        check(seed, [name])


@pytest.mark.parametrize("tens", range(RUNS // 10))
def test_random_settings(tens: int) -> None:
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        check(seed)


REAL: list[tuple[str, dict[str, Any]]] = [
    ("bsp", {}),
    ("bsp", {"via": "allreduce"}),
    ("average", {"via": "allreduce"}),
    ("soft", {"overlap": True}),
    ("ssp", {"overlap": True}),
    ("asp", {"layout": "pp=2,microbatches=1,split=count,schedule=stash", "accumulate": 1}),
    ("bsp", {"layout": "pp=2,microbatches=2,split=count,schedule=1f1b", "accumulate": 1}),
    ("downpour", {}),
    ("bmuf", {}),
    ("easgd", {}),
    ("async-local", {}),
    ("fedbuff", {}),
    ("gossip", {}),
]


@pytest.mark.parametrize(("name", "how"), REAL)
def test_real_processes(name: str, how: dict[str, Any]) -> None:
    check_real(5, name, how)


def check_real(seed: int, name: str, how: dict[str, Any]) -> None:
    drawn = Drawn(seed, [name], deep="layout" in how)
    options = drawn.options | how
    if "layout" in how:
        options["shards"] = 1
    with scratch() as folder:
        run = ob.train(*drawn.untouched(), workers=drawn.workers, out=folder / "run", **options)
        assert gap(run.model, drawn.executed(folder / "run")) < CLOSE, str(drawn)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 120))
@pytest.mark.parametrize(("name", "how"), REAL)
def test_many_real_processes(name: str, how: dict[str, Any], seed: int) -> None:
    check_real(seed, name, how)


def test_one_wrong_number_in_a_log_is_found(tmp_path: Path) -> None:
    drawn = Drawn(1, ["asp"])
    run = ob.train(*drawn.untouched(), cluster=drawn.cluster, out=tmp_path / "run", **drawn.options)
    file = tmp_path / "run" / "log.jsonl"
    lines = file.read_text().splitlines()
    assert gap(run.model, drawn.executed(tmp_path / "run")) < CLOSE
    found = 0
    for index, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] != "update" or not record["parts"][0]["base"]:
            continue
        for change in (_other_base, _other_lease):
            wrong = copy.deepcopy(record)
            if change(wrong["parts"][0]):
                file.write_text("\n".join([*lines[:index], json.dumps(wrong), *lines[index + 1 :]]))
                assert gap(run.model, drawn.executed(tmp_path / "run")) > 1e-9, wrong
                found += 1
    assert found > 10


def _other_base(part: dict[str, Any]) -> bool:
    part["base"] -= 1
    return True


def _other_lease(part: dict[str, Any]) -> bool:
    part["leases"][0][1] += 1
    return part["leases"][0][1] < part["leases"][0][2]


@pytest.mark.soak
@pytest.mark.parametrize("hundreds", range(40))
def test_many_random_settings(hundreds: int) -> None:
    for seed in range(10_000 + 100 * hundreds, 10_100 + 100 * hundreds):
        check(seed)
