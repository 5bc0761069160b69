"""PyTorch's own Hogwild example: one model in shared memory, each process with its own SGD."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

from benchmarks.peers.common import STRAGGLER, Rate, batches, image_mlp, made_up, train_step
from benchmarks.peers.launch import alone

PATIENCE = 300  # seconds until a worker that says nothing counts as lost


def straggler(
    emulate: Sequence[float] = STRAGGLER,
    *,
    batch: int = 32,
    seconds: float = 5.0,
    repeats: int = 3,
    threads: int = 1,
) -> Rate:
    """Samples per second, and the start-up, of `repeats` fresh launches.

    Start-up is from starting the workers, in a process that has torch and the model at hand,
    to the end of the last one's first step.
    """
    arguments = {"emulate": list(emulate), "batch": batch, "seconds": seconds, "threads": threads}
    runs = [alone("peers.hogwild:launch", arguments, threads) for _ in range(repeats)]
    return Rate(tuple(run["per_second"] for run in runs), tuple(run["start_up"] for run in runs))


def launch(emulate: list[float], batch: int, seconds: float, threads: int) -> dict[str, Any]:
    context = mp.get_context("spawn")
    model = image_mlp()
    model.share_memory()
    barrier, queue = context.Barrier(len(emulate)), context.Queue()
    start = time.monotonic()
    processes = [
        context.Process(
            target=work, args=(rank, model, least, batch, seconds, threads, barrier, queue)
        )
        for rank, least in enumerate(emulate)
    ]
    for process in processes:
        process.start()
    results = [queue.get(timeout=PATIENCE + seconds) for _ in processes]
    for process in processes:
        process.join()
    return {
        "per_second": sum(rate for _, rate in results),
        # Of all processes of a machine, the monotonic clock is one and the same.
        "start_up": max(first for first, _ in results) - start,
    }


def work(
    rank: int,
    model: nn.Module,
    least: float,
    batch: int,
    seconds: float,
    threads: int,
    barrier: Any,
    queue: Any,
) -> None:
    torch.set_num_threads(threads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    stream = batches(made_up(784, seed=rank), batch, rank)

    def one() -> None:
        until = time.monotonic() + least
        train_step(model, optimizer, next(stream), until)

    one()
    first = time.monotonic()
    for _ in range(3):
        one()
    barrier.wait(PATIENCE)
    start, steps = time.monotonic(), 0
    while time.monotonic() < start + seconds:
        one()
        steps += 1
    rate = steps * batch / (time.monotonic() - start)
    # Nobody leaves the machine to the others while they are still counting.
    barrier.wait(PATIENCE)
    queue.put((first, rate))
