"""What the simulator itself costs: beside the training it simulates, and as workers grow."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

import offbeat as ob
from benchmarks.figure import Figure
from benchmarks.scale import Scale
from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.model.replica import Replica
from offbeat.recipes import recipe
from offbeat.rules.updater import Updater
from offbeat.store.store import Store
from offbeat.worker.worker import NumberWorker

EPOCHS = 20


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


class Stopwatch:
    """Time spent inside some methods, wherever they are called from; nested calls count once."""

    def __init__(self, *methods: tuple[type, str]):
        self.methods, self.seconds, self.depth = methods, 0.0, 0

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            self.depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.process_time() - start

        return call

    @contextmanager
    def running(self) -> Iterator[None]:
        patches = [
            mock.patch.object(owner, name, self._timed(getattr(owner, name)))
            for owner, name in self.methods
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()


# What every engine has to do: the worker's and the store's own code.
WORK = (
    *((NumberWorker, name) for name in ("contribution", "accept", "catch_up")),
    *((Store, name) for name in ("join", "lease", "push", "pull", "hold", "released", "rest")),
)
# What a plain loop does too: gradients and updates, nothing else.
TRAINING = ((Replica, "compute"), (Updater, "step"))


def own_share(scale: Scale) -> list[Figure]:
    """How much of a simulated run of the digits MLP is not training."""
    torch.set_num_threads(1)
    task = recipe("digits")

    def plain() -> None:
        model = copy.deepcopy(task.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        reader = Reader(task.data, seed=0)
        for epoch in range(EPOCHS):
            for start in range(0, len(reader), 32):
                x, y = reader.read(Lease(epoch, start, min(start + 32, len(reader))))
                loss = task.loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss.item()

    simulated = partial(
        ob.train,
        task.model,
        task.data,
        task.loss,
        discipline="asp",
        optimizer=partial(torch.optim.SGD, lr=0.05),
        workers=4,
        epochs=EPOCHS,
        engine="sim",
    )
    plain()
    simulated()
    engine, beside, ratio = [], [], []
    for _ in range(scale.repeats):
        for methods, shares in ((WORK, engine), (TRAINING, beside)):
            watch = Stopwatch(*methods)
            with watch.running():
                total = _seconds(simulated)
            shares.append(1 - watch.seconds / total)
        ratio.append(_seconds(simulated) / _seconds(plain))
    return [
        Figure(
            "simulator's own share of a run, digits MLP",
            statistics.median(engine),
            "of the time",
            at_most=0.15,
            beside="events, clock and links; worker and store run the same code in every engine",
        ),
        Figure(
            "the same with the worker's and store's bookkeeping",
            statistics.median(beside),
            "of the time",
            beside="all but gradients and updates: copies, ledger, log, a hash of every version",
        ),
        Figure(
            "the whole run against a plain PyTorch loop",
            statistics.median(ratio),
            "x",
            beside="the same batches, gradients and updates, in the same process",
        ),
    ]


def _sites(count: int) -> ob.Cluster:
    """Sites with a link each of 100 to 500 Mbit/s, and a store with 10 Gbit/s."""
    hosts = tuple(
        ob.Host(f"site{n}", 1.25e7 * (1 + n % 3), 1.25e7 * (1 + n % 5), 0.02, 4e6)
        for n in range(count)
    )
    step = ob.Cluster.equal(1, "lognormal:20ms,0.3").machines[0].compute
    machines = tuple(ob.Machine(step, host=host.name) for host in hosts for _ in range(8))
    return ob.Cluster(machines, network=ob.Network(hosts, ob.StoreLink(1.25e9, 1.25e9)))


def sites(scale: Scale) -> list[Figure]:
    """Cost-only runs on hosts that share WAN links."""
    count = scale.workers // 10
    cluster = _sites(count)
    seconds = _seconds(lambda: ob.estimate(cluster, "local:16", steps=125, model_bytes=1_000_000))
    return [
        Figure(
            f"{count:,} sites x 8 workers x 125 steps over shared links, local:16, cost only",
            seconds,
            "s",
            at_most=300,
            beside=f"{seconds / (count * 1000) * 1e6:.1f} us a step",
        )
    ]


def scaling(scale: Scale) -> list[Figure]:
    """Cost-only runs under SSP: microseconds per step as the cluster grows a hundredfold."""

    def run(workers: int, steps: int) -> float:
        cluster = ob.Cluster.equal(workers, "exponential:20ms")
        return _seconds(lambda: ob.estimate(cluster, "ssp:3", steps=steps))

    run(100, 100)
    small = statistics.median(run(100, 1000) / 100_000 for _ in range(3))
    many = scale.workers
    large = run(many, 100)
    return [
        Figure(f"{many:,} workers x 100 steps under SSP, cost only", large, "s", at_most=60),
        Figure(
            f"cost per step, {many:,} workers against 100",
            large / (100 * many) / small,
            "x",
            at_most=3,
            beside=f"{large / (100 * many) * 1e6:.1f} and {small * 1e6:.1f} us a step",
        ),
    ]
