"""Eight disciplines on uneven workers: what the simulator predicts, and what real ones do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import msgspec
import torch

from offbeat.config.task import OptimizerFactory
from offbeat.config.units import show
from offbeat.engine.result import Run
from offbeat.engine.sim.cluster import Cluster, Machine
from offbeat.engine.sim.compute_times import Constant
from offbeat.log.log import Listener
from offbeat.log.records import Entry, Updated
from offbeat.recipes import recipe
from offbeat.report.summary import Summary
from offbeat.report.tables import seconds, share
from offbeat.train import train

WORKERS, SLOWER = 4, 4
SEED = 4  # of the five seeds of the sweep, the one whose times lie closest to the mean
TESTS_PER_EPOCH = 6
TARGET = 0.9
FIRST_FEW = 3


@dataclass(frozen=True)
class Contender:
    """A discipline, the rate of plain SGD that suits it, and why that rate."""

    sync: str
    lr: float | None  # None where the discipline brings its own rule
    why: str

    @property
    def optimizer(self) -> OptimizerFactory | None:
        return None if self.lr is None else partial(torch.optim.SGD, lr=self.lr)


# Rates picked from a coarse sweep over five seeds, weighing time to 90 % against the end, on the
# same test set that the table reports: good enough to compare kinds, not to rank close rows.
CONTENDERS = (
    Contender("bsp", 0.8, "four gradients are averaged, so the rate may be large"),
    Contender("soft:2", 0.6, "two are averaged, and nearly fresh"),
    Contender("ssp:3", 0.2, "single gradients, and a few steps old"),
    Contender("asp", 0.3, "gradients up to 15 updates old: with 0.6 it no longer learns"),
    Contender("asp:weigh=inverse", 0.6, "stale gradients count less, so the rate may be larger"),
    Contender("local:8", 0.8, "local steps are undisturbed, and averaging calms them"),
    Contender("diloco:8", 0.4, "outer momentum amplifies the change, so steps are smaller"),
    Contender("asup:lr=0.0015", None, "steps are scaled by the gradient's size, as in RMSprop"),
)


@dataclass(frozen=True)
class Setting:
    """What is compared, for how long, and how many seconds a step of a fast worker takes."""

    contenders: tuple[Contender, ...] = CONTENDERS
    epochs: int = 12
    step: float = 0.02

    @property
    def steps(self) -> list[float]:
        """Seconds that each worker's step takes: the last is slow."""
        return [self.step] * (WORKERS - 1) + [self.step * SLOWER]

    def cluster(self, exchange: float = 0.0) -> Cluster:
        """The same workers for the simulator; an exchange is a push and the pull that follows."""
        each = [Machine(Constant(step), latency=exchange / 2) for step in self.steps]
        return Cluster(tuple(each))

    def __str__(self) -> str:
        return ",".join(show(step) for step in self.steps)


USUAL = Setting()


class DemoResult(msgspec.Struct, frozen=True):
    """How one contender did; `reached` are the seconds until a test first hit the target.

    `predicted` and `predicted_reached` are what the simulator had said, beside real workers only.
    """

    sync: str
    lr: float | None
    reached: float | None
    summary: Summary
    predicted: Summary | None = None
    predicted_reached: float | None = None

    @property
    def measured_rate(self) -> float:
        """Samples per second."""
        return self.summary.samples_per_second

    @property
    def predicted_rate(self) -> float | None:
        return None if self.predicted is None else self.predicted.samples_per_second

    @property
    def error(self) -> float | None:
        """How far the prediction lies above what was measured, as a share of that."""
        if self.predicted_rate is None:
            return None
        return self.predicted_rate / self.measured_rate - 1


Seen = Callable[[list[DemoResult]], None]


def simulate(setting: Setting = USUAL, seen: Seen = lambda results: None) -> list[DemoResult]:
    """Every contender on the simulated cluster; `seen` is shown the results after each."""
    results: list[DemoResult] = []
    for contender in setting.contenders:
        run = _train(setting, contender, cluster=setting.cluster())
        reached = run.history.time_to(TARGET)
        results.append(DemoResult(contender.sync, contender.lr, reached, run.summary()))
        seen(results)
    return results


def run(
    setting: Setting = USUAL,
    seen: Seen = lambda results: None,
    exchange: float | None = None,
    listeners: Sequence[Listener] = (),
) -> list[DemoResult]:
    """Every contender with real workers of emulated speed, each predicted before it is measured.

    The prediction knows the emulated times and `exchange`, which is measured here if not given.
    """
    exchange = measure_exchange(setting) if exchange is None else exchange
    results: list[DemoResult] = []
    for contender in setting.contenders:
        predicted = _train(setting, contender, cluster=setting.cluster(exchange))
        measured = _train(
            setting,
            contender,
            engine="local",
            workers=WORKERS,
            emulate=setting.steps,
            listeners=listeners,
        )
        results.append(
            DemoResult(
                contender.sync,
                contender.lr,
                measured.history.time_to(TARGET),
                measured.summary(),
                predicted.summary(),
                predicted.history.time_to(TARGET),
            )
        )
        seen(results)
    return results


def _train(setting: Setting, contender: Contender, **how: Any) -> Run:
    task = recipe("digits", seed=SEED)
    samples = len(task.data)  # type: ignore[arg-type]
    return train(
        task.model,
        task.data,
        task.loss,
        discipline=contender.sync,
        optimizer=contender.optimizer,
        batch_size=task.batch_size,
        epochs=setting.epochs,
        test=task.test,
        seed=SEED,
        evaluate_every=samples // TESTS_PER_EPOCH,
        **how,
    )


# ---------------------------------------------------------------- what the prediction knows


class _Steps(Listener):
    """Seconds that every step took with its exchange, but for each worker's first few.

    Those load what later ones find.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def see(self, record: Entry) -> None:
        if isinstance(record, Updated):
            parts = [part for part in record.parts if part.sequence >= FIRST_FEW]
            self.seconds += [part.compute + part.communication for part in parts]


def measure_exchange(setting: Setting = USUAL) -> float:
    """Seconds that a step takes here beyond its emulated time, when all workers are fast."""
    task = recipe("digits", seed=SEED)
    steps = _Steps()
    train(
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch_size=task.batch_size,
        epochs=WORKERS,
        engine="local",
        workers=WORKERS,
        emulate=[setting.step] * WORKERS,
        listeners=[steps],
    )
    return max(0.0, fmean(steps.seconds) - setting.step)


# ---------------------------------------------------------------- in words


def introduction_simulated(setting: Setting = USUAL) -> str:
    return (
        f"Handwritten digits on {WORKERS} simulated workers, the last {SLOWER} times slower than "
        f"the others; {setting.epochs} epochs each. Times are virtual seconds."
    )


def introduction(setting: Setting, exchange: float) -> str:
    fast, slow = (f"{1000 * step:g} ms" for step in (setting.steps[0], setting.steps[-1]))
    return (
        f"Handwritten digits on {WORKERS} worker processes of this machine; {setting.epochs} "
        "epochs each. Speeds are emulated: real gradients, then waiting until a step has taken "
        f"{fast}, and with the last worker {slow}. Beside what was measured (real) stands what "
        "the simulator had predicted (sim). It knew these times, and that an exchange with the "
        f"store takes {1000 * exchange:.1f} ms here, as a short run without the slow worker showed."
    )


def reading(results: Sequence[DemoResult]) -> list[str]:
    """What the figures say, one sentence for each of the things to see."""
    by_name = {result.sync.partition(":")[0]: result for result in reversed(results)}
    lock, rest = by_name["bsp"], [result for result in results if result.sync != "bsp"]
    return [
        _speed(lock, rest),
        _slack(lock, by_name["ssp"]),
        _price(lock, by_name["asp"]),
        _bytes(lock, by_name["local"]),
        *_prediction(results),
    ]


def _speed(lock: DemoResult, rest: Sequence[DemoResult]) -> str:
    target = share(TARGET)
    times = {result.reached: result for result in reversed(rest) if result.reached is not None}
    if lock.reached is None or not times:
        who = "Lock-step (bsp)" if lock.reached is None else "Nothing but lock-step (bsp)"
        reached = "did not reach" if lock.reached is None else "reached"
        return f"{who} {reached} {target} in {_epochs(lock)}."
    soonest = min(times)
    if soonest >= lock.reached:
        return f"Nothing reached {target} sooner than lock-step (bsp, {seconds(lock.reached)} s)."
    return (
        f"{times[soonest].sync} reached {target} after {seconds(soonest)} s, "
        f"{lock.reached / soonest:.1f} times sooner than lock-step (bsp, "
        f"{seconds(lock.reached)} s), whose workers spent {share(lock.summary.wait_share)} of "
        "their time waiting for the slow one."
    )


def _slack(lock: DemoResult, ssp: DemoResult) -> str:
    waited = share(ssp.summary.wait_share)
    if ssp.summary.wait_share < lock.summary.wait_share / 2:
        return f"A little slack ({ssp.sync}) brings the waiting down to {waited}."
    return (
        f"Slack ({ssp.sync}) evens out hiccups, but against a worker that is always slow it runs "
        f"out: {waited} of the time goes on waiting."
    )


def _price(lock: DemoResult, free: DemoResult) -> str:
    points = 100 * ((free.summary.accuracy or 0.0) - (lock.summary.accuracy or 0.0))
    end = f"{abs(points):.1f} points {'above' if points > 0 else 'below'} lock-step's"
    if abs(points) < 0.05:
        end = "the same as lock-step's"
    return (
        f"The price of never waiting (asp) is staleness: gradients are "
        f"{free.summary.staleness_mean:.1f} updates old on average and bear a smaller rate; "
        f"the final accuracy is {end}."
    )


def _bytes(lock: DemoResult, local: DemoResult) -> str:
    fewer = lock.summary.bytes_sent / max(1, local.summary.bytes_sent)
    here = "links cost nothing" if local.predicted is None else "memory is shared"
    return (
        f"Local steps ({local.sync}) send {fewer:.1f} times fewer bytes than lock-step, "
        f"which pays on slow links; here {here}."
    )


def _prediction(results: Sequence[DemoResult]) -> list[str]:
    """How good the prediction was, at its worst, and what it had not known there."""
    errors = {abs(result.error): result for result in results if result.error is not None}
    if not errors:
        return []
    worst = max(errors)
    off = errors[worst]
    assert off.predicted is not None
    took, expected = (1000 * _fast_step(one) for one in (off.summary, off.predicted))
    return [
        "The simulator predicted the samples per second of every row to within "
        f"{100 * worst:.1f} % of what was measured. It was furthest off with {off.sync}: there a "
        f"fast worker needed {took:.1f} ms for a step and its share of the exchange, where "
        f"{expected:.1f} ms were expected. Other work on the machine makes such gaps wider."
    ]


def _fast_step(summary: Summary) -> float:
    """Seconds that a step of the first worker took with its share of the exchange."""
    first = summary.per_worker[0]
    return (first.compute + first.communication) / max(1, first.steps)


def _epochs(result: DemoResult) -> str:
    count = len(result.summary.ledger)
    return "1 epoch" if count == 1 else f"{count} epochs"


def next_steps(setting: Setting = USUAL) -> list[str]:
    """Commands to go on with."""
    return [
        f"offbeat simulate --sync ssp:3 --lr 0.2 --cluster {setting}",
        "offbeat simulate --sync asp --epochs 4 --out runs/asp",
        "offbeat replay runs/asp",
        "offbeat simulate --cost-only --sync ssp:3 -n 100 --model-bytes 100000000",
    ]
