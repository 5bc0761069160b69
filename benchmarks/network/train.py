"""What the hosts of these benchmarks run: `train.py MODEL BATCH STEPS RATE SEED [FOLDER TARGET]`.

With a folder of MNIST worker 0 tests what it trains after every so many of its steps, which costs
it the time, and ends the run for all when it has found the target.
"""

import sys
import time
from functools import partial

import torch
from torch.utils.data import TensorDataset

import offbeat as ob
from benchmarks.network.models import loss_of, model_of
from benchmarks.peers.common import accuracy, made_up
from offbeat.recipes import mnist

TEST_EVERY = 32  # steps of worker 0

name, (batch, steps), rate, seed = sys.argv[1], map(int, sys.argv[2:4]), *map(float, sys.argv[4:6])
folder, target = (sys.argv[6], float(sys.argv[7])) if len(sys.argv) > 6 else ("", 1.0)
torch.set_num_threads(1)
task = mnist(folder) if folder else None
data = TensorDataset(*(part[: steps * batch] for part in made_up(784)))
data = data if task is None else task.data
with ob.join(checkpoint_every=10**9, hash_every=10**9, seed=int(seed)) as run:
    model = run.replica(model_of(name, int(seed)))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=rate))
    start = 0.0
    epochs = -(-steps * batch // len(data))
    for done, (x, y) in enumerate(run.batches(data, batch_size=batch, epochs=epochs), 1):
        start = start or time.monotonic()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if task is not None and run.rank == 0 and done % TEST_EVERY == 0:
            found = accuracy(model, task.test[:])
            if found >= target:
                print(f"reached after {time.monotonic() - start:.3f} s", flush=True)
                run.stop()
