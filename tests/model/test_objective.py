"""Model, batch and loss are tried once, and a misfit is explained."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.data.reader import Reader
from offbeat.errors import ConfigError
from offbeat.model.objective import BatchLoss, cost, tried

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
READER = Reader(TensorDataset(X, Y))


def test_the_cost_of_a_pair() -> None:
    model = nn.Linear(3, 2)
    assert torch.equal(cost(model, (X, Y), F.cross_entropy), F.cross_entropy(model(X), Y))
    assert torch.equal(cost(model, [X, Y], F.cross_entropy), F.cross_entropy(model(X), Y))


def test_the_cost_of_any_batch() -> None:
    loss = BatchLoss(lambda model, batch: model(batch).square().mean())
    model = nn.Linear(3, 2)
    assert torch.equal(cost(model, X, loss), model(X).square().mean())


def bad(model: nn.Module, loss: Any, reader: Reader = READER) -> str:
    with pytest.raises(ConfigError) as caught:
        tried(model, reader, loss, 4)
    return str(caught.value)


def test_inputs_that_the_model_does_not_take() -> None:
    says = bad(nn.Linear(5, 2), F.cross_entropy)
    assert says.startswith("the model does not take inputs of shape (4, 3): RuntimeError")


def test_an_output_that_does_not_fit_the_loss() -> None:
    says = bad(nn.Sequential(nn.Linear(3, 2), nn.Flatten(0)), F.cross_entropy)
    assert (
        "the model's output of shape (8,) does not fit the loss with targets of shape (4,)" in says
    )


@pytest.mark.parametrize(
    ("loss", "shape"),
    [(lambda o, y: F.cross_entropy(o, y, reduction="none"), r"shape (4,)"),
     (lambda o, y: 1.0, "type float"), (lambda o, y: (o, y), "2 items"),
     (BatchLoss(lambda m, b: m(b[0])), "shape (4, 2)")],
)  # fmt: skip
def test_a_loss_that_is_not_one_number(loss: Any, shape: str) -> None:
    says = bad(nn.Linear(3, 2), loss)
    assert says == (
        f"the loss must be one number, but it is {shape}: reduce it, for example with .mean()"
    )


def test_a_loss_of_one_element_will_do() -> None:
    tried(nn.Linear(3, 2), READER, lambda o, y: F.cross_entropy(o, y).reshape(1), 4)


def test_batches_that_are_no_pairs() -> None:
    says = bad(nn.Linear(3, 2), F.cross_entropy, Reader(TensorDataset(X)))
    assert says == (
        "a batch is 1 items, not (inputs, target): pass loss=ob.BatchLoss(fn) with fn(model, batch)"
    )
    alone: Any = [row for row in X]  # noqa: C416
    assert "a batch is shape (4, 3), not (inputs, target)" in bad(
        nn.Linear(3, 2), F.cross_entropy, Reader(alone)
    )


def test_samples_that_cannot_be_stacked() -> None:
    ragged: list[tuple[Tensor, int]] = [(torch.zeros(n + 1), 0) for n in range(4)]
    says = bad(nn.Linear(3, 2), F.cross_entropy, Reader(ragged))  # type: ignore[arg-type]
    assert says.startswith("the first batch cannot be read from the dataset (RuntimeError")
    assert says.endswith("make samples of equal shape, or pass collate=")
