"""DiLoCo: many local steps between two syncs, for data-parallel quality at a part of the bytes."""

from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import BSP, DiLoCo, LocalSGD
from offbeat.engine.sim.cluster import Cluster
from offbeat.model.shared_model import untouched
from offbeat.studies.common import (
    ACCURACY,
    LOSS,
    NEVER,
    RATE,
    Column,
    Method,
    Result,
    StudyTask,
    TaskOf,
    digits_task,
    mnist_task,
    table,
)
from offbeat.train import train

PARALLEL = "data-parallel"
EQUAL = "outer SGD with rate 1 equals averaging, bit for bit"
KILOBYTES: Column = ("kB sent", lambda r: f"{r.mean('bytes_sent') / 1000:.0f}")


@dataclass(frozen=True)
class DiLoCoPlan:
    """How the study is run; the inner optimiser is AdamW with the published betas and decay."""

    bench: StudyTask
    rates: tuple[float, ...]
    local_steps: tuple[int, ...] = (1, 5, 20, 50)
    averaged: int = 20  # local steps of plain averaging, for comparison
    workers: int = 4
    batch_size: int = 16

    def method(self, name: str, discipline: Discipline, rate: float) -> Method:
        inner = partial(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
        cluster = Cluster.equal(self.workers, "lognormal:20ms,0.3")
        return Method(name, discipline, cluster, self.batch_size, inner)

    def parallel(self, rate: float) -> Method:
        return self.method(PARALLEL, BSP(), rate)

    def local(self, steps: int, rate: float) -> Method:
        return self.method(f"DiLoCo, H = {steps}", DiLoCo(steps), rate)

    def average(self, rate: float) -> Method:
        return self.method(f"averaging, H = {self.averaged}", LocalSGD(self.averaged), rate)


def digits_plan(task: TaskOf = digits_task) -> DiLoCoPlan:
    bench = StudyTask(task, epochs=30, seeds=(0, 1, 2, 3, 4))
    return DiLoCoPlan(bench, rates=(0.0003, 0.001, 0.003, 0.01, 0.03))


def mnist_plan(folder: str) -> DiLoCoPlan:
    bench = StudyTask(mnist_task(folder, limit=4000), epochs=4)
    return DiLoCoPlan(bench, rates=(0.0003, 0.001, 0.003), local_steps=(5, 20, 50))


def study(plan: DiLoCoPlan) -> Result:
    """Every H with an inner rate tuned for it, and all on the same number of samples."""
    rows = [plan.bench.tuned(plan.parallel, plan.rates)]
    rows += [plan.bench.tuned(partial(plan.local, steps), plan.rates) for steps in plan.local_steps]
    rows.append(plan.bench.tuned(plan.average, plan.rates))
    setting = (
        f"diloco: {plan.workers} workers, batch {plan.batch_size} each, {plan.bench.epochs} "
        "epochs, inner AdamW, outer Nesterov 0.7/0.9"
    )
    checks = {EQUAL: outer_sgd_is_averaging(plan, rows[-1].rate)}
    return Result("diloco", setting, list(plan.bench.seeds), rows, checks)


def outer_sgd_is_averaging(plan: DiLoCoPlan, rate: float) -> bool:
    """Whether DiLoCo with an outer SGD of rate 1 and averaging end with the same bits."""
    task = plan.bench.task(0)
    hashes = set()
    for discipline in (DiLoCo(plan.averaged, lr=1.0, momentum=0.0), LocalSGD(plan.averaged)):
        method = plan.method("", discipline, rate)
        with untouched(task.model):
            run = train(
                task.model, task.data, task.loss, epochs=1, seed=0, discipline=discipline,
                optimizer=method.optimizer, cluster=method.cluster, batch_size=method.batch_size,
                hash_every=NEVER,
            )  # fmt: skip
        hashes.add(run.parameter_hash)
    return len(hashes) == 1


def show(result: Result) -> Table:
    return table(result, [RATE, ACCURACY, LOSS, KILOBYTES])


def run(folder: str | None = None) -> Result:
    """DiLoCo: the quality of data-parallel training with 1/H of its communication."""
    return study(digits_plan() if folder is None else mnist_plan(folder))
