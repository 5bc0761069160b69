"""Eight disciplines on one uneven cluster: how soon each gets somewhere, and how far it gets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from offbeat.cluster import Cluster
from offbeat.recipes import recipe
from offbeat.report.summary import Summary
from offbeat.report.tables import seconds, share
from offbeat.task import OptimizerFactory
from offbeat.train import train

WORKERS, SLOWER = 4, 4
EPOCHS = 12
SEED = 4  # of the five seeds of the sweep, the one whose times lie closest to the mean
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
    task = recipe("digits", seed=SEED)
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
            seed=SEED,
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
    """What the figures say, one sentence for each of the things to see."""
    by_name = {result.sync.partition(":")[0]: result for result in reversed(results)}
    lock, rest = by_name["bsp"], [result for result in results if result.sync != "bsp"]
    return [
        _speed(lock, rest),
        _slack(lock, by_name["ssp"]),
        _price(lock, by_name["asp"]),
        _bytes(lock, by_name["local"]),
    ]


def _speed(lock: Result, rest: Sequence[Result]) -> str:
    target = share(TARGET)
    times = {result.reached: result for result in reversed(rest) if result.reached is not None}
    if lock.reached is None or not times:
        who = "Lock-step (bsp)" if lock.reached is None else "Nothing but lock-step (bsp)"
        reached = "did not reach" if lock.reached is None else "reached"
        return f"{who} {reached} {target} in {EPOCHS} epochs."
    soonest = min(times)
    if soonest >= lock.reached:
        return f"Nothing reached {target} sooner than lock-step (bsp, {seconds(lock.reached)} s)."
    return (
        f"{times[soonest].sync} reached {target} after {seconds(soonest)} s, "
        f"{lock.reached / soonest:.1f} times sooner than lock-step (bsp, "
        f"{seconds(lock.reached)} s), whose workers spent {share(lock.summary.wait_share)} of "
        "their time waiting for the slow one."
    )


def _slack(lock: Result, ssp: Result) -> str:
    waited = share(ssp.summary.wait_share)
    if ssp.summary.wait_share < lock.summary.wait_share / 2:
        return f"A little slack ({ssp.sync}) brings the waiting down to {waited}."
    return (
        f"Slack ({ssp.sync}) evens out hiccups, but against a worker that is always slow it runs "
        f"out: {waited} of the time goes on waiting."
    )


def _price(lock: Result, free: Result) -> str:
    points = 100 * ((free.summary.accuracy or 0.0) - (lock.summary.accuracy or 0.0))
    end = f"{abs(points):.1f} points {'above' if points > 0 else 'below'} lock-step's"
    if abs(points) < 0.05:
        end = "the same as lock-step's"
    return (
        f"The price of never waiting (asp) is staleness: gradients are "
        f"{free.summary.staleness_mean:.1f} updates old on average and bear a smaller rate; "
        f"the final accuracy is {end}."
    )


def _bytes(lock: Result, local: Result) -> str:
    fewer = lock.summary.bytes_sent / max(1, local.summary.bytes_sent)
    return (
        f"Local steps ({local.sync}) send {fewer:.1f} times fewer bytes than lock-step, "
        "which pays on slow links; here links cost nothing."
    )


def next_steps() -> list[str]:
    """Commands to go on with."""
    times = ",".join(["20ms"] * (WORKERS - 1) + [f"{20 * SLOWER}ms"])
    return [
        f"offbeat simulate --sync ssp:3 --lr 0.2 --cluster {times}",
        "offbeat simulate --sync asp --epochs 4 --out runs/asp",
        "offbeat replay runs/asp",
        "offbeat simulate --cost-only --sync ssp:3 -n 100 --model-bytes 100000000",
    ]
