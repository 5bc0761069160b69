"""What torchrun starts on three hosts."""

import os
from functools import partial

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

torch.manual_seed(5)
x = torch.randn(96, 6)
y = x.sum(1, keepdim=True)
out = os.path.join(os.environ["PLACE"], "run")  # the store's, which is beside rank 0
with ob.join(discipline="ssp:2", token="offbeat.token", out=out, hash_every=1) as run:
    model = run.replica(torch.nn.Linear(6, 1))
    optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.05))
    for features, target in run.batches(TensorDataset(x, y), batch_size=4, epochs=3):
        F.mse_loss(model(features), target).backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"rank {run.rank} of {run.workers} ends at version {run.version}")
