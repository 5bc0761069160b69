"""Model, batch and loss are tried once, and a misfit is explained."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from offbeat.data import Reader
from offbeat.errors import ConfigError
from offbeat.replica import objective
from offbeat.replica.objective import BatchLoss, backward, cost, tried

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


class Counted(Tensor):
    """A loss that wants to know of its backward passes."""

    passes = 0

    def backward(self, *args: Any, **kwargs: Any) -> None:
        Counted.passes += 1
        super().backward(*args, **kwargs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("known", [True, False])
def test_a_backward_pass_is_pytorchs(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(objective, "_ENGINE", None)
    model, seen = nn.Linear(3, 2), list[Tensor]()
    model.weight.register_post_accumulate_grad_hook(seen.append)  # type: ignore[no-untyped-call]
    F.cross_entropy(model(X), Y).backward()  # type: ignore[no-untyped-call]
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    backward(F.cross_entropy(model(X), Y))  # added to what is there, as PyTorch does
    assert len(seen) == len(wanted) == 2
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient + gradient)


def test_a_loss_of_its_own_kind_is_asked() -> None:
    model = nn.Linear(3, 2)
    backward(model(X).square().mean().as_subclass(Counted))
    assert Counted.passes == 1
    assert model.weight.grad is not None


def test_a_hook_that_spoils_its_gradient_spoils_one_step() -> None:
    weight = nn.Parameter(torch.ones(()))
    for _ in range(2):
        weight.grad = None
        loss = weight * 3
        loss.register_hook(lambda gradient: gradient.mul_(2))
        backward(loss)
        assert weight.grad is not None
        assert weight.grad.item() == 6


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (torch.ones(()), "does not require grad"),
        (torch.ones(3, requires_grad=True) * 2, "only for scalar outputs"),
    ],
    ids=["constant", "vector"],
)
def test_what_has_no_backward_pass_says_so(loss: Tensor, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        backward(loss)


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
