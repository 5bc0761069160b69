"""A batch is tried in a process of its own: nothing is left of it but what it showed."""

import os
import random
import signal
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from offbeat.config.trial import try_batch
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
READER = Reader(TensorDataset(X, Y))


class Noisy(nn.Module):
    """Leaves traces wherever it can."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, list[float]()
        self.body = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(random.random() + np.random.rand())
        print("computing")
        warnings.warn("computing", stacklevel=2)
        out: Tensor = self.body(x)
        return out


def test_no_trace_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    model = Noisy()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states: Any = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    found = try_batch(model, READER, F.cross_entropy, 4)
    assert (found.sparse, found.reads) == ([], False)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index, union-attr]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.calls, model.seen, model.training) == (0, [], True)
    assert capfd.readouterr() == ("", "")


def test_a_misfit_is_told_as_where_it_is_found() -> None:
    with pytest.raises(ConfigError, match=r"^the model does not take inputs of shape \(4, 3\)"):
        try_batch(nn.Linear(5, 2), READER, F.cross_entropy, 4)


@pytest.mark.parametrize("end", [signal.SIGKILL, 0])
def test_a_step_that_ends_its_process(end: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if end:
            os.kill(os.getpid(), end)
        os._exit(0)

    with pytest.raises(ConfigError, match=f"ended with status {-end}: is there memory enough"):
        try_batch(nn.Linear(3, 2), READER, loss, 4)


def test_a_loss_that_looks_at_the_model() -> None:
    model = nn.Linear(3, 2)
    found = try_batch(
        model, READER, lambda o, y: F.cross_entropy(o, y) + model.weight.square().sum(), 4
    )
    assert found.reads


def test_sparse_gradients_are_named() -> None:
    model = nn.Sequential(nn.Embedding(3, 4, sparse=True), nn.Flatten(), nn.Linear(8, 2))
    reader = Reader(TensorDataset(torch.ones(8, 2, dtype=torch.int64), Y))
    assert try_batch(model, reader, F.cross_entropy, 4).sparse == ["0.weight"]
