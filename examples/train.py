"""A loop of your own: `python train.py` alone, `offbeat run train.py` with several workers."""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob


def spirals(count: int, seed: int) -> TensorDataset:
    """Points on two spirals, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    turn = torch.rand(count, generator=generator).sqrt() * 2 * torch.pi
    angle = turn + labels * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / torch.pi
    return TensorDataset(points + torch.randn(count, 2, generator=generator) * 0.05, labels)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    )


def main() -> None:
    torch.manual_seed(0)
    with ob.join() as run:
        model = run.replica(net())
        optimizer = run.optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.5))
        for x, y in run.batches(spirals(2000, seed=1), batch_size=20, epochs=10):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            run.record(loss)
            optimizer.step()
            optimizer.zero_grad()
    if run.rank == 0:
        x, y = spirals(500, seed=2).tensors
        right = (model(x).argmax(1) == y).float().mean()
        print(f"{run.workers} workers, version {run.version}: accuracy {right:.1%}")


if __name__ == "__main__":
    main()
