"""Staleness-aware rates: 30 free-running workers fail at one learner's rate, and 1/τ cures it."""

from dataclasses import dataclass

from rich.table import Table

from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import ASP, BSP, SoftSync
from offbeat.discipline.parts import Constant, Inverse, Weigh
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

ALONE, FIXED, AWARE = "one learner", "ASP, fixed rate", "ASP, rate / τ"
BEST_ALONE = "one learner, best rate"


@dataclass(frozen=True)
class StalenessPlan:
    """How the study is run; the batch is small so that all workers together see about 128."""

    bench: StudyTask
    rates: tuple[float, ...]
    workers: int = 30
    batch_size: int = 4
    momentum: float = 0.9
    margin: float = 0.01  # how much accuracy a higher rate may cost the one learner
    compute: str = "lognormal:20ms,0.2"

    def method(self, name: str, discipline: Discipline, rate: float, workers: int) -> Method:
        cluster = Cluster.equal(workers, self.compute)
        return Method(name, discipline, cluster, self.batch_size, sgd(rate, self.momentum))


def digits_plan(task: TaskOf = digits_task) -> StalenessPlan:
    return StalenessPlan(StudyTask(task, epochs=20), rates=(0.02, 0.05, 0.1, 0.2))


def mnist_plan(folder: str) -> StalenessPlan:
    return StalenessPlan(
        StudyTask(mnist_task(folder, limit=2000), epochs=6), rates=(0.003, 0.01, 0.03)
    )


def study(plan: StalenessPlan) -> Result:
    """Tune the rate of one learner, then give that very rate to every other method."""
    # Near its limit one learner gains nothing from a higher rate, and loses little; dividing that
    # rate by the staleness is what leaves the others enough of it.
    rate, sweep = plan.bench.choose(
        lambda r: plan.method(ALONE, BSP(), r, 1), plan.rates, plan.margin
    )
    rows = [plan.bench.measure(plan.method(ALONE, BSP(), rate, 1), rate, sweep)]
    best = max(plan.rates, key=lambda r: sweep[f"{r:g}"])
    if best != rate:
        rows.append(plan.bench.measure(plan.method(BEST_ALONE, BSP(), best, 1), best))
    for name, discipline, scale in _methods(plan.workers):
        method = plan.method(name, discipline, rate * scale, plan.workers)
        rows.append(plan.bench.measure(method, rate * scale))
    setting = (
        f"staleness: {plan.workers} workers, batch {plan.batch_size}, momentum {plan.momentum}, "
        f"{plan.bench.epochs} epochs, one learner's rate {rate:g}"
    )
    return Result("staleness", setting, list(plan.bench.seeds), rows)


def _methods(workers: int) -> list[tuple[str, Discipline, float]]:
    """Name, discipline, and what part of one learner's rate it gets."""
    fixed: Weigh = Constant()
    half = max(1, workers // 2)
    return [
        (FIXED, ASP(fixed), 1.0),
        (AWARE, ASP(Inverse()), 1.0),
        (f"ASP, rate / {workers}", ASP(fixed), 1 / workers),
        ("SoftSync 2, fixed rate", SoftSync(2, fixed), 1.0),
        ("SoftSync 2, rate / τ", SoftSync(2), 1.0),
        (f"SoftSync {half}, fixed rate", SoftSync(half, fixed), 1.0),
        (f"SoftSync {half}, rate / τ", SoftSync(half), 1.0),
    ]


def show(result: Result) -> Table:
    return table(result, [RATE, STALENESS, ACCURACY, LOSS])


def run(folder: str | None = None) -> Result:
    """Staleness-aware ASGD: the rate of one learner divided by the staleness of each gradient."""
    return study(digits_plan() if folder is None else mnist_plan(folder))
