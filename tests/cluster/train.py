"""What the hosts of these tests train: `train.py GATE SAMPLES EPOCHS`.

As long as nothing can be read from the pipe `GATE`, every step takes a while; then none does. So a
run lasts until everything has happened to it, and is over soon after.
"""

import os
import select
import sys
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

STEP, LATER = 0.1, 0.4  # seconds of a step, and of one in the last third of the epochs

torch.set_num_threads(1)
samples, epochs = map(int, sys.argv[2:])
chance = torch.Generator().manual_seed(7)
x = torch.randn(samples, 6, generator=chance)
y = x @ torch.randn(6, 2, generator=chance)
torch.manual_seed(11)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
gate = os.open(sys.argv[1], os.O_RDONLY | os.O_NONBLOCK)
with ob.join(discipline="asp", hash_every=1) as run:
    model = run.replica(model)
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.02))
    for features, target in run.batches(TensorDataset(x, y), batch_size=4, epochs=epochs):
        select.select([gate], [], [], STEP if run.epoch < epochs * 2 / 3 else LATER)
        F.mse_loss(model(features), target).backward()
        optimizer.step()
        optimizer.zero_grad()
os.close(gate)
print(f"worker {run.rank} ends at version {run.version}")
