"""A replica computes what plain PyTorch computes, on parameters that are views of flat buffers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from offbeat.data.lease import Lease
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError
from offbeat.model.objective import BatchLoss
from offbeat.model.replica import Replica
from offbeat.model.table import BySize, Flat, Table, buffer_entries, parameter_entries, place

X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 2
READER = Reader(TensorDataset(X, Y), seed=7)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def tables(model: nn.Module, shards: int = 2) -> list[Table]:
    return place(parameter_entries(model), BySize(shards))


def replica(model: nn.Module, accumulate: int = 1) -> Replica:
    return Replica(model, tables(model), READER, F.cross_entropy, accumulate)


def test_parameters_are_views_of_the_flat_buffers() -> None:
    model = net()
    mine = replica(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in mine.model.named_parameters():
        assert torch.equal(parameter, start[name])
    for flat in mine.flats:
        flat.zero_()
    assert mine.model is model
    assert all((p == 0).all() for p in model.parameters())


def test_the_gradient_is_plain_pytorchs() -> None:
    model = net()
    mine = replica(model)
    lease = Lease(1, 2, 8)
    loss = mine.compute(lease)
    x, y = READER.read(lease)
    plain = copy.deepcopy(model).train()
    expected = F.cross_entropy(plain(x), y)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == expected.item()
    out = [Flat(flat.table) for flat in mine.flats]
    assert mine.collect(out) == frozenset()
    views = {name: view for flat in out for name, view in flat.views.items()}
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(views[name], parameter.grad)
    assert len(mine.gradients()) == 6


def test_computing_again_does_not_add_up() -> None:
    mine = replica(nn.Linear(3, 2))
    mine.compute(Lease(0, 0, 4))
    first = [gradient.clone() for gradient in mine.gradients()]
    mine.compute(Lease(0, 0, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, mine.gradients(), strict=True))


@pytest.mark.parametrize("parts", [2, 3, 5])
def test_accumulation_gives_the_gradient_of_the_whole(parts: int) -> None:
    model = nn.Linear(3, 2)
    whole, split = replica(model), replica(model, parts)
    lease = Lease(0, 0, 7)
    assert split.compute(lease) == pytest.approx(whole.compute(lease), rel=1e-5)
    for one, other in zip(whole.gradients(), split.gradients(), strict=True):
        torch.testing.assert_close(one, other)


def test_accumulation_of_a_short_lease() -> None:
    mine = replica(nn.Linear(3, 2), 8)
    plain = replica(mine.model)
    assert mine.compute(Lease(0, 0, 2)) == pytest.approx(plain.compute(Lease(0, 0, 2)))


class Branch(nn.Module):
    """A model of which only one half is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result


def test_parameters_without_a_gradient_are_named_and_zero() -> None:
    mine = replica(Branch())
    mine.compute(Lease(0, 0, 4))
    out = [Flat(flat.table) for flat in mine.flats]
    for flat in out:
        flat.buffer.fill_(1)
    assert mine.collect(out) == {"unused.weight", "unused.bias"}
    views = {name: view for flat in out for name, view in flat.views.items()}
    assert (views["unused.weight"] == 0).all()


def test_tied_weights_stay_tied_and_frozen_ones_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    mine = replica(model)
    assert mine.model[1].weight is mine.model[0].weight  # type: ignore[index]
    assert sorted(mine.parameters) == ["0.weight", "2.weight"]
    mine.compute(Lease(0, 0, 4))
    assert mine.model[2].bias.grad is None  # type: ignore[index]


def test_loading_is_a_copy() -> None:
    mine = replica(nn.Linear(3, 2))
    pulled = [Flat(flat.table) for flat in mine.flats]
    pulled[0].views["weight"].fill_(5.0)
    mine.load(pulled)
    assert (mine.parameters["weight"] == 5).all()
    pulled[0].zero_()
    assert (mine.parameters["weight"] == 5).all()


def test_only_averaged_buffers_leave_as_copies() -> None:
    model = net()
    mine = replica(model)
    mine.compute(Lease(0, 0, 6))
    entries = buffer_entries(model, {"1.running_var": "local"})
    sent = mine.statistics(entries)
    assert sorted(sent) == ["1.num_batches_tracked", "1.running_mean"]
    assert sent["1.num_batches_tracked"].item() == 1
    before = sent["1.running_mean"].clone()
    mine.compute(Lease(0, 6, 12))
    assert torch.equal(sent["1.running_mean"], before)


class Counting(nn.Module):
    """Replaces its buffer at every call, and another by nothing."""

    seen: torch.Tensor
    first: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("first", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen, self.first = self.seen + len(x), None
        made: torch.Tensor = self.linear(x)
        return made


def test_a_buffer_that_a_module_replaces_leaves_as_it_is_now() -> None:
    model = Counting()
    mine, entries = replica(model), buffer_entries(model, {})
    assert sorted(mine.statistics(entries)) == ["first", "seen"]
    for _ in range(2):
        mine.compute(Lease(0, 0, 4))
    sent = mine.statistics(entries)
    assert {name: tensor.item() for name, tensor in sent.items()} == {"seen": 8.0}


def test_random_layers_depend_on_the_lease_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    one, other = replica(model), replica(model)
    with torch.random.fork_rng(devices=[]):
        expected = one.compute(Lease(0, 0, 4))
        other.compute(Lease(0, 4, 8))
        assert other.compute(Lease(0, 0, 4)) == expected


def test_a_batch_loss_is_used_as_it_is() -> None:
    model = nn.Linear(3, 2)
    loss = BatchLoss(lambda m, batch: m(batch[0]).sum())
    mine = Replica(model, tables(model, 1), READER, loss)
    lease = Lease(0, 0, 4)
    assert mine.compute(lease) == model(READER.read(lease)[0]).sum().item()


def test_the_state_goes_into_tensors_and_back() -> None:
    model = net()
    first, second = replica(model), replica(net())
    first.compute(Lease(0, 0, 6))
    for flat in first.flats:
        flat.scale_(2.0)
    second.load_state({path: tensor.clone() for path, tensor in first.state().items()})
    assert second.compute(Lease(0, 6, 12)) == first.compute(Lease(0, 6, 12))
    for one, other in zip(first.model.buffers(), second.model.buffers(), strict=True):
        assert torch.equal(one, other)


def test_parameters_that_a_script_gave_other_memory_come_back_with_its_values() -> None:
    mine = replica(net())
    weight = mine.parameters["0.weight"]
    weight.data = weight.data * 2
    wanted = weight.detach().clone()
    mine.reclaim()
    view = next(flat.views["0.weight"] for flat in mine.flats if "0.weight" in flat.views)
    assert weight.is_set_to(view)
    assert torch.equal(view, wanted)
    weight.data = weight.data.double()
    with pytest.raises(ConfigError, match=r"'0.weight' is now float64 \(4, 3\) and was float32"):
        mine.reclaim()
