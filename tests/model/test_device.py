"""Runs on a device: the same numbers as on the CPU, and nothing that takes one for the other.

Each test runs in a process of its own, which has a device that stands in for a real one.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import offbeat as ob
from tests import standin

DEVICE = "standin:0"
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
ADAM = partial(torch.optim.Adam, lr=0.01)


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(48, 6, generator=chance)
    return TensorDataset(x, torch.randint(0, 3, (48,), generator=chance))


class Net(nn.Module):
    """Something of each: a buffer that moves, chance, a frozen part and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.inside = nn.Linear(6, 6)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.25)
        self.out = nn.Linear(6, 3, bias=False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.inside(self.frozen(x))))
        return self.out(self.drop(self.tied(x)))


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def on_device(output: Tensor, target: Tensor) -> Tensor:
    """A loss that sees where it is computed; tests are made on the CPU."""
    place = torch.device(DEVICE if torch.is_grad_enabled() else "cpu")
    assert output.device == target.device == place
    return F.cross_entropy(output, target)


def train(device: str | None, **how: Any) -> ob.Run:
    loss = F.cross_entropy if device is None else on_device
    settings: dict[str, Any] = {"optimizer": SGD, "batch_size": 8, "epochs": 2, **how}
    return ob.train(net(), data(), loss, device=device, **settings)


def same(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    for name, tensor in ours.items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, theirs[name]), name


def one_worker() -> None:
    same(
        train(DEVICE, workers=1, discipline="asp").model,
        train(None, workers=1, discipline="asp").model,
    )


def test_one_worker_on_the_local_engine() -> None:
    standin.run(one_worker)
