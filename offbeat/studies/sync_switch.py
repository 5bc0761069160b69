"""Sync-Switch: begin in lock-step, then run free, and keep the optimiser's state at the switch."""

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.table import Table

from offbeat.config.task import Task
from offbeat.discipline.discipline import Discipline
from offbeat.discipline.named import ASP, BSP
from offbeat.engine.sim.cluster import Cluster
from offbeat.errors import ConfigError, RunError
from offbeat.model.shared_model import untouched
from offbeat.studies.common import (
    ACCURACY,
    LOSS,
    NEVER,
    RATE,
    SECONDS,
    Method,
    MethodRow,
    Outcome,
    Result,
    StudyTask,
    TaskOf,
    broken,
    digits_task,
    mnist_task,
    outcome,
    sgd,
    table,
)
from offbeat.train import train

ALL_BSP, ALL_ASP, OWN_ASP = "BSP", "ASP", "ASP, rate of its own"
# The second phase reads the data in an order of its own, not again in the order of the first.
SECOND_PHASE = 1000


@dataclass(frozen=True)
class SyncSwitchPlan:
    """How the study is run; `rates` are those of a single worker, lock-step multiplies them."""

    bench: StudyTask
    rates: tuple[float, ...]
    shares: tuple[float, ...] = (0.125, 0.25, 0.5)
    workers: int = 8
    batch_size: int = 16
    momentum: float = 0.9
    slower: float = 3.0
    high_rate: float | None = None  # a rate near the limit, at which every row is run once more

    @property
    def cluster(self) -> Cluster:
        """Compute times that vary from step to step, and one worker that is always slow."""
        return Cluster.with_straggler(self.workers, self.slower, "lognormal:20ms,0.3")

    def method(self, name: str, discipline: Discipline, rate: float) -> Method:
        rule = sgd(rate, self.momentum)
        return Method(name, discipline, self.cluster, self.batch_size, rule)

    def bsp(self, rate: float) -> Method:
        return self.method(ALL_BSP, BSP(), self.workers * rate)

    def asp(self, rate: float) -> Method:
        return self.method(ALL_ASP, ASP(), rate)


def digits_plan(task: TaskOf = digits_task) -> SyncSwitchPlan:
    return SyncSwitchPlan(StudyTask(task, epochs=16), rates=(0.01, 0.03, 0.06, 0.1), high_rate=0.2)


def mnist_plan(folder: str) -> SyncSwitchPlan:
    return SyncSwitchPlan(
        StudyTask(mnist_task(folder, limit=4000), epochs=8), rates=(0.001, 0.003, 0.01)
    )


def study(plan: SyncSwitchPlan) -> Result:
    """Tune the rate in lock-step, switch at several points, and give ASP a rate of its own too."""
    for share in plan.shares:
        phases(plan.bench.epochs, share)
    rate, sweep = plan.bench.choose(plan.bsp, plan.rates)
    rows = compared(plan, rate, sweep)
    rows.append(plan.bench.tuned(lambda r: replace(plan.asp(r), name=OWN_ASP), plan.rates))
    if plan.high_rate is not None:
        rows += compared(plan, plan.high_rate, {}, " (high rate)")
    setting = (
        f"sync-switch: {plan.workers} workers, one {plan.slower:g}x slower, batch "
        f"{plan.batch_size} each, momentum {plan.momentum}, {plan.bench.epochs} epochs; lock-step "
        f"uses {plan.workers} times the rate"
    )
    return Result("sync-switch", setting, list(plan.bench.seeds), rows)


def compared(
    plan: SyncSwitchPlan, rate: float, sweep: dict[str, float], note: str = ""
) -> list[MethodRow]:
    """Lock-step, every switch and free-running, all at one rate."""
    bsp, asp = plan.bsp(rate), plan.asp(rate)
    rows = [plan.bench.measure(replace(bsp, name=bsp.name + note), rate, sweep)]
    for share in sorted(plan.shares, reverse=True):
        outcomes = [
            switched(plan, plan.bench.task(seed), share, rate, seed) for seed in plan.bench.seeds
        ]
        rows.append(MethodRow(f"BSP {100 * share:g} %, then ASP{note}", rate, outcomes))
    rows.append(plan.bench.measure(replace(asp, name=asp.name + note), rate))
    return rows


def phases(epochs: int, share: float) -> tuple[int, int]:
    """Epochs in lock-step and epochs without; the switch falls between two epochs."""
    first = share * epochs
    if not first.is_integer() or not 0 < first < epochs:
        raise ConfigError(
            f"{100 * share:g} % of {epochs} epochs is not a whole number of epochs between 1 and "
            f"{epochs - 1}; write a number of epochs that the share divides, such as 16"
        )
    return int(first), epochs - int(first)


def switched(plan: SyncSwitchPlan, task: Task, share: float, rate: float, seed: int) -> Outcome:
    """Both phases of one run; the second starts from the folder of the first."""
    first, second = phases(plan.bench.epochs, share)
    with TemporaryDirectory() as place:
        folder = Path(place) / "first"
        try:
            before = _phase(plan.bsp(rate), task, first, seed, out=folder)
            after = _phase(plan.asp(rate), task, second, seed + SECOND_PHASE, start=folder)
        except RunError as error:
            return broken(task, error)
    return Outcome(
        after.accuracy, after.loss, before.seconds + after.seconds,
        before.updates + after.updates, after.staleness, before.bytes_sent + after.bytes_sent,
    )  # fmt: skip


def _phase(
    method: Method, task: Task, epochs: int, seed: int,
    out: Path | None = None, start: Path | None = None,
) -> Outcome:  # fmt: skip
    with untouched(task.model):
        run = train(
            task.model, task.data, task.loss, test=task.test, epochs=epochs, seed=seed,
            discipline=method.discipline, optimizer=method.optimizer, cluster=method.cluster,
            batch_size=method.batch_size, hash_every=NEVER, out=out, start=start,
        )  # fmt: skip
    return outcome(run.summary())


def show(result: Result) -> Table:
    return table(result, [RATE, ACCURACY, LOSS, SECONDS])


def run(folder: str | None = None) -> Result:
    """Sync-Switch: lock-step for the first part of training, free-running for the rest."""
    return study(digits_plan() if folder is None else mnist_plan(folder))
