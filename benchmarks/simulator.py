"""What the simulator itself costs: beside a plain PyTorch loop, and per event as workers grow."""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import offbeat as ob
from benchmarks.figure import Figure
from offbeat.data import Reader
from offbeat.lease import Lease
from offbeat.recipes import recipe

EPOCHS = 20
REPEATS = 7


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def own_share() -> list[Figure]:
    """The same batches, gradients and updates with and without the simulator around them."""
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

    def simulated(hash_every: int) -> None:
        ob.train(
            task.model,
            task.data,
            task.loss,
            discipline="asp",
            optimizer=partial(torch.optim.SGD, lr=0.05),
            workers=4,
            epochs=EPOCHS,
            hash_every=hash_every,
        )

    kinds: dict[str, Callable[[], None]] = {
        "plain": plain,
        "hash at every version": partial(simulated, 1),
        "hash at every 100th": partial(simulated, 100),
    }
    for work in kinds.values():
        work()
    # Interleaved, so that a slow moment of the machine falls on all of them alike.
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(REPEATS):
        for name, work in kinds.items():
            times[name].append(_seconds(work))
    loop = statistics.median(times.pop("plain"))
    return [
        Figure(
            f"simulator's own share of the time, digits MLP, {name}",
            1 - loop / statistics.median(spent),
            "of the run",
            "at most 0.15",
            f"plain loop {loop:.3f} s, simulated {statistics.median(spent):.3f} s",
        )
        for name, spent in times.items()
    ]


def scaling() -> list[Figure]:
    """Cost-only runs under SSP: microseconds per step as the cluster grows a hundredfold."""

    def run(workers: int, steps: int) -> float:
        cluster = ob.Cluster.equal(workers, "exponential:20ms")
        return _seconds(lambda: ob.estimate(cluster, "ssp:3", steps=steps))

    run(100, 100)
    small = statistics.median(run(100, 1000) / 100_000 for _ in range(3))
    large = run(10_000, 100)
    return [
        Figure("10,000 workers x 100 steps under SSP, cost only", large, "s", "under 60"),
        Figure(
            "cost per step, 10,000 workers against 100",
            large / 1_000_000 / small,
            "x",
            "under 3",
            f"{small * 1e6:.1f} and {large:.1f} us a step",
        ),
    ]
