"""A batch is tried in a process of its own: nothing is left of it but what it showed."""

import os
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from offbeat.config import trial
from offbeat.config.trial import try_batch
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError
from offbeat.model.checks import made_of_torch

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


def test_no_trace_is_left_where_no_other_process_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    model[1].eval()
    gradient = torch.ones(2)
    model[2].bias.grad = gradient
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    monkeypatch.setattr(trial, "fork", lambda *_: pytest.fail("a process was started"))
    found = try_batch(model, READER, F.cross_entropy, 4)
    assert (found.sparse, found.reads) == ([], False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model[2].bias.grad is gradient
    assert torch.equal(gradient, torch.ones(2))
    assert model[2].weight.grad is None
    assert [module.training for module in model] == [True, False, True]
    with pytest.raises(ConfigError, match="does not take inputs"):
        try_batch(nn.Linear(5, 2), READER, nn.CrossEntropyLoss(), 4)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def patched() -> nn.Module:
    model = nn.Linear(3, 2)
    model.forward = lambda x: F.linear(x, model.weight)  # type: ignore[method-assign]
    return model


def hooked() -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_forward_hook(lambda *_: None)
    return model


def masked() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


@pytest.mark.parametrize(
    "make", [lambda: Counting(3, 2), patched, hooked, masked, parametrized, Noisy]
)
def test_what_holds_code_of_the_users_is_not_torchs_own(make: Callable[[], nn.Module]) -> None:
    assert not made_of_torch(nn.Sequential(make()), F.cross_entropy)
    assert made_of_torch(nn.Sequential(nn.Linear(3, 2)), F.cross_entropy)
    assert not made_of_torch(nn.Sequential(nn.Linear(3, 2)), lambda o, y: F.cross_entropy(o, y))


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
