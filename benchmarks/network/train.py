"""What the hosts of these benchmarks run: `train.py MODEL BATCH STEPS RATE SEED [GOAL]`.

The goal is a folder of MNIST, an accuracy, and how many of its samples to take. Worker 0 then
tests, in a thread beside its steps, what it has pulled every so often, and ends the run for all
when a test has found the accuracy. What counts is when the parameters came that were tested.
"""

import copy
import sys
import threading
import time
from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.network.models import loss_of, model_of
from benchmarks.network.runs import REACHED
from benchmarks.peers.common import Batch, accuracy, made_up
from offbeat.recipes import mnist

TEST_EVERY = 32  # steps of worker 0
SOME, NEAR = 1000, 0.02  # samples that are tested first, and how near the goal they have to be


class Tests:
    """Of one model after another, while others go on."""

    def __init__(self, data: Batch, target: float):
        self.data, self.target = data, target
        self.seconds: float | None = None  # to the parameters that have reached it
        self.start = time.monotonic()
        self.thread = threading.Thread(target=lambda: None)
        self.thread.start()

    def test(self, model: nn.Module) -> None:
        """Unless the test before is still going on."""
        if not self.thread.is_alive():
            what = (copy.deepcopy(model), time.monotonic() - self.start)
            self.thread = threading.Thread(target=self._test, args=what, daemon=True)
            self.thread.start()

    def _test(self, model: nn.Module, seconds: float) -> None:
        some = tuple(part[:SOME] for part in self.data)
        # All of it takes as long as many steps, and the hosts here share few cores.
        if accuracy(model, some) > self.target - NEAR and accuracy(model, self.data) >= self.target:
            self.seconds = seconds


def main() -> None:
    name, batch, steps, rate, seed = sys.argv[1], *map(float, sys.argv[2:6])
    batch, samples = int(batch), int(steps * batch)
    torch.set_num_threads(1)
    task, tests = None, None
    data = TensorDataset(*(part[:samples] for part in made_up(784)))
    if len(sys.argv) > 6:
        folder, target, limit = sys.argv[6:]
        task = mnist(folder, limit=None if limit == "None" else int(limit))
        data = task.data
    with ob.join(checkpoint_every=10**9, hash_every=10**9, seed=int(seed)) as run:
        model = run.replica(model_of(name, int(seed)))
        optimizer = run.optimizer(partial(torch.optim.SGD, lr=rate))
        epochs = -(-samples // len(data))
        for done, (x, y) in enumerate(run.batches(data, batch_size=batch, epochs=epochs)):
            if task is not None and run.rank == 0:
                tests = tests or Tests(task.test[:], float(target))
                if tests.seconds is not None:
                    print(REACHED, tests.seconds, flush=True)
                    run.stop()
                elif done % TEST_EVERY == 0:
                    tests.test(model)
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()


main()
