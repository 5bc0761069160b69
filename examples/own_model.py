"""A model, data and a loss of your own, on a cluster described in a file."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob

CLUSTER = Path(__file__).resolve().parent / "lab.toml"


def two_moons(count: int, seed: int) -> TensorDataset:
    """Points on two half circles that reach into each other, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    angle = torch.rand(count, generator=generator) * torch.pi
    x = torch.where(labels == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(labels == 0, angle.sin(), 0.5 - angle.sin())
    noise = torch.randn(count, 2, generator=generator) * 0.15
    return TensorDataset(torch.stack([x, y], 1) + noise, labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)
        )

    def forward(self, points: Tensor) -> Tensor:
        scores: Tensor = self.layers(points)
        return scores


def main() -> None:
    torch.manual_seed(0)
    run = ob.train(
        Net(),
        two_moons(2000, seed=1),
        F.cross_entropy,
        discipline=ob.SSP(slack=3),
        optimizer=partial(torch.optim.SGD, lr=0.2, momentum=0.5),
        cluster=ob.Cluster.from_toml(CLUSTER),
        batch_size=20,
        epochs=3,
        test=two_moons(500, seed=2),
        evaluate_every=1000,
    )
    for test in run.history.tests:
        print(f"{test.time:5.2f} s  version {test.version:3}  accuracy {test.accuracy:.1%}")
    cost = run.summary()
    for number, worker in enumerate(cost.per_worker):
        print(
            f"worker {number}: {worker.steps:3} steps, computed {worker.compute:.2f} s, "
            f"waited {worker.wait:.2f} s, sent {worker.bytes_sent / 1e3:.0f} kB"
        )
    print(f"ledger: {cost.ledger}")


if __name__ == "__main__":
    main()
