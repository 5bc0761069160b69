"""DC-ASGD: a stale gradient corrected towards the weights that it will change."""

from dataclasses import dataclass, replace

from rich.table import Table

from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import ASP, BSP
from offbeat.discipline.parts import AdaptiveDelayCompensation, DelayCompensation
from offbeat.engine.sim.cluster import Cluster
from offbeat.studies.common import (
    ACCURACY,
    LOSS,
    RATE,
    STALENESS,
    Method,
    Result,
    StudyTask,
    TaskOf,
    digits_task,
    mnist_task,
    sgd,
    table,
)

ALONE = "sequential"
SHARED = "sequential's rate"
METHODS: dict[str, Discipline] = {
    "SSGD": BSP(),
    "ASGD": ASP(),
    "DC-ASGD-c": ASP(DelayCompensation(0.04)),
    "DC-ASGD-a": ASP(AdaptiveDelayCompensation(2.0, 0.95)),
}


@dataclass(frozen=True)
class DCASGDPlan:
    """How the study is run; the batch is that of one worker."""

    bench: StudyTask
    rates: tuple[float, ...]
    workers: tuple[int, ...] = (4, 8)
    batch_size: int = 16
    compute: str = "lognormal:20ms,0.3"

    def method(self, name: str, discipline: Discipline, rate: float, workers: int) -> Method:
        cluster = Cluster.equal(workers, self.compute)
        return Method(name, discipline, cluster, self.batch_size, sgd(rate))


def digits_plan(task: TaskOf = digits_task) -> DCASGDPlan:
    return DCASGDPlan(StudyTask(task, epochs=12, seeds=(0, 1, 2, 3, 4)), rates=(0.1, 0.3, 1.0, 2.0))


def mnist_plan(folder: str) -> DCASGDPlan:
    return DCASGDPlan(StudyTask(mnist_task(folder, limit=4000), epochs=3), rates=(0.03, 0.1, 0.3))


def study(plan: DCASGDPlan) -> Result:
    """Every method with a rate tuned for it, and once more with the rate of the sequential run."""
    alone = plan.bench.tuned(lambda r: plan.method(ALONE, BSP(), r, 1), plan.rates)
    rows = [alone]
    for workers in plan.workers:
        for name, discipline in METHODS.items():
            label = f"{name}, {workers} workers"

            def make(
                rate: float,
                label: str = label,
                discipline: Discipline = discipline,
                workers: int = workers,
            ) -> Method:
                return plan.method(label, discipline, rate, workers)

            shared = replace(make(alone.rate), name=f"{label}, {SHARED}")
            rows.append(plan.bench.tuned(make, plan.rates))
            rows.append(plan.bench.measure(shared, alone.rate))
    setting = f"dc-asgd: batch {plan.batch_size} each, {plan.bench.epochs} epochs, plain SGD"
    return Result("dc-asgd", setting, list(plan.bench.seeds), rows)


def show(result: Result) -> Table:
    return table(result, [RATE, STALENESS, ACCURACY, LOSS])


def run(folder: str | None = None) -> Result:
    """DC-ASGD: delay compensation, constant and adaptive, against plain and sequential SGD."""
    return study(digits_plan() if folder is None else mnist_plan(folder))
