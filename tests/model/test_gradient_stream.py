"""Gradients that leave while backward runs are the same gradients."""

import torch
from torch import nn
from torch.nn import functional as F

from offbeat.model.gradient_stream import Stream
from offbeat.model.table import BySize, Flat, parameter_entries, place

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2


class Net(nn.Module):
    """A layer that is used twice, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.twice = nn.Linear(3, 4), nn.Linear(4, 4)
        self.never, self.last = nn.Linear(2, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.twice(torch.tanh(self.twice(torch.tanh(self.first(x))))))


def places(model: nn.Module) -> list[Flat]:
    return [Flat(table) for table in place(parameter_entries(model), BySize(2))]


def test_what_arrives_is_what_the_parameters_would_have_carried() -> None:
    model, plain = Net(), Net()
    stream, into = Stream(dict(model.named_parameters())), places(model)
    for flat in into:
        flat.buffer.fill_(7)  # what lies there from before does not matter
    stream.begin(into)
    F.cross_entropy(model(X), Y).backward()
    F.cross_entropy(plain(X), Y).backward()
    assert stream.absent() == {"never.weight", "never.bias"}
    found = {name: view for flat in into for name, view in flat.views.items()}
    for name, parameter in plain.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.equal(found[name], expected), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert stream.finite()


def test_parts_of_a_batch_add_up() -> None:
    model, plain = Net(), Net()
    stream, into = Stream(dict(model.named_parameters())), places(model)
    stream.begin(into)
    for rows in (slice(0, 4), slice(4, 8)):
        (F.cross_entropy(model(X[rows]), Y[rows]) / 2).backward()
        (F.cross_entropy(plain(X[rows]), Y[rows]) / 2).backward()
    found = {name: view for flat in into for name, view in flat.views.items()}
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(found[name], parameter.grad), name


def test_what_is_not_finite_is_found_and_what_is_only_large_is_not() -> None:
    model = Net()
    stream, into = Stream(dict(model.named_parameters())), places(model)
    stream.begin(into)
    (F.cross_entropy(model(X), Y) * 1e25).backward()
    assert stream.finite()
    stream.begin(into)
    (F.cross_entropy(model(X), Y) * float("nan")).backward()
    assert not stream.finite()


def test_one_that_has_ended_leaves_gradients_alone() -> None:
    model = Net()
    stream = Stream(dict(model.named_parameters()))
    stream.end()
    F.cross_entropy(model(X), Y).backward()
    assert model.first.weight.grad is not None
