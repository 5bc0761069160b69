"""Eight disciplines on one uneven cluster: how soon each gets somewhere, and how far it gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from offbeat.cluster import Cluster
from offbeat.recipes import recipe
from offbeat.report.summary import Summary
from offbeat.report.tables import percent, seconds, share
from offbeat.task import OptimizerFactory
from offbeat.train import train

WORKERS, SLOWER = 4, 4
EPOCHS = 12
TESTS_PER_EPOCH = 6
TARGET = 0.9


@dataclass(frozen=True)
class Contender:
    """A discipline, the rate of plain SGD that suits it, and why that rate."""

    sync: str
    lr: float | None  # None where the discipline brings its own rule
    why: str

    @property
    def optimizer(self) -> OptimizerFactory | None:
        return None if self.lr is None else partial(torch.optim.SGD, lr=self.lr)


# Each rate is the best of a small sweep over three seeds, judged by time to 90 % and by the end.
CONTENDERS = (
    Contender("bsp", 1.2, "four gradients are averaged, so the rate may be large"),
    Contender("soft:2", 0.6, "two are averaged: half the rate of four"),
    Contender("ssp:3", 0.2, "single gradients, and a few steps old"),
    Contender("asp", 0.3, "gradients up to 15 updates old: with 0.6 it no longer learns"),
    Contender("asp:weigh=inverse", 0.8, "stale gradients are scaled down, so it can be larger"),
    Contender("local:8", 0.8, "local steps are undisturbed, and averaging calms them"),
    Contender("diloco:8", 0.4, "outer momentum amplifies the change, so steps are smaller"),
    Contender("asup:lr=0.002", None, "steps are scaled by the gradient's size, as in RMSprop"),
)


class Result(msgspec.Struct, frozen=True):
    """How one contender did; `reached` is in virtual seconds."""

    sync: str
    lr: float | None
    reached: float | None
    summary: Summary


def cluster() -> Cluster:
    """Four workers, of which the last is four times slower."""
    return Cluster.with_straggler(WORKERS, SLOWER)


def run(seen: Callable[[list[Result]], None] = lambda results: None) -> list[Result]:
    """Train every contender for the same epochs; `seen` is shown the results after each."""
    task = recipe("digits")
    samples = len(task.data)  # type: ignore[arg-type]
    results: list[Result] = []
    for contender in CONTENDERS:
        finished = train(
            task.model,
            task.data,
            task.loss,
            discipline=contender.sync,
            optimizer=contender.optimizer,
            cluster=cluster(),
            batch_size=task.batch_size,
            epochs=EPOCHS,
            test=task.test,
            evaluate_every=samples // TESTS_PER_EPOCH,
        )
        reached = finished.history.time_to(TARGET)
        results.append(Result(contender.sync, contender.lr, reached, finished.summary()))
        seen(results)
    return results


# ---------------------------------------------------------------- in words


def introduction() -> str:
    return (
        f"Handwritten digits on {WORKERS} simulated workers, the last {SLOWER} times slower than "
        f"the others; {EPOCHS} epochs each. Times are virtual seconds."
    )


def reading(results: Sequence[Result]) -> list[str]:
    """What the figures say, in two or three sentences."""
    by_name = {result.sync.partition(":")[0]: result for result in reversed(results)}
    lock = by_name["bsp"]
    rest = [result for result in results if result is not lock]
    return [_speed(lock, rest), _slack(lock, by_name["ssp"]), _price(lock, by_name["asp"])]


def _speed(lock: Result, rest: Sequence[Result]) -> str:
    known = [result for result in rest if result.reached]
    if not known or not lock.reached:
        slow = "Lock-step (bsp)" if not lock.reached else "Nothing but bsp"
        return f"{slow} did not reach {percent(TARGET)} in {EPOCHS} epochs."
    first = min(known, key=lambda result: result.reached or 0.0)
    assert first.reached is not None
    if first.reached >= lock.reached:
        return f"Nothing reached {TARGET:.0%} sooner than bsp ({seconds(lock.reached)} s)."
    return (
        f"{first.sync} reached {TARGET:.0%} after {seconds(first.reached)} s, "
        f"{lock.reached / first.reached:.1f} times sooner than lock-step (bsp, "
        f"{seconds(lock.reached)} s), whose workers spent {share(lock.summary.wait_share)} of "
        "their time waiting for the slow one."
    )


def _slack(lock: Result, ssp: Result) -> str:
    waited = share(ssp.summary.wait_share)
    if ssp.summary.wait_share < lock.summary.wait_share / 2:
        return f"A little slack ({ssp.sync}) is enough to bring the waiting down to {waited}."
    return (
        f"Slack ({ssp.sync}) evens out hiccups, but against a worker that is always slow it runs "
        f"out: {waited} waiting, and about lock-step's samples per second."
    )


def _price(lock: Result, free: Result) -> str:
    ours, theirs = lock.summary.accuracy or 0.0, free.summary.accuracy or 0.0
    points = 100 * abs(theirs - ours)
    end = "the same as lock-step's"
    if points >= 0.05:
        end = f"{points:.1f} points {'above' if theirs > ours else 'below'} lock-step's"
    return (
        f"The price of never waiting is staleness: a gradient of asp was "
        f"{free.summary.staleness_mean:.1f} updates old on average, so it needs a smaller rate; "
        f"with that, its final accuracy is {end}."
    )


def next_steps() -> list[str]:
    """Commands to go on with, each on the cluster of the demo."""
    times = ",".join(["20ms"] * (WORKERS - 1) + [f"{20 * SLOWER}ms"])
    return [
        f"offbeat simulate --sync ssp:3 --lr 0.2 --cluster {times}",
        f"offbeat simulate --sync asp --lr 0.3 --cluster {times} --epochs 12 --out runs/asp",
        "offbeat replay runs/asp",
        "offbeat simulate --cost-only --sync bsp -n 1000 --model-bytes 100000000",
    ]
