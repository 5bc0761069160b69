"""A lease is the same batch whoever reads it, and whenever."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from offbeat.data.lease import Lease
from offbeat.data.reader import Reader, mix
from offbeat.errors import ConfigError

X = torch.arange(20, dtype=torch.float32).reshape(10, 2)
Y = torch.arange(10)


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """The same samples one by one, so that they are collated."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def test_a_seed_comes_from_all_of_its_numbers() -> None:
    assert mix(1, 2) == mix(1, 2)
    assert len({mix(1, 2), mix(2, 1), mix(1), mix(1, 2, 3), mix(1, 3)}) == 5
    assert all(0 <= mix(n, 2**40, -1) < 2**63 for n in range(20))


def test_large_seeds_are_not_mistaken_for_small_ones() -> None:
    assert mix(2**32) != mix(0)


def test_an_epoch_is_a_permutation_of_its_own() -> None:
    reader = Reader(TensorDataset(X, Y), seed=3)
    orders = [reader.order(epoch).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert Reader(TensorDataset(X, Y), seed=4).order(0).tolist() != orders[0]


def test_old_orders_are_made_again_when_needed() -> None:
    reader = Reader(TensorDataset(X, Y), seed=3)
    first = reader.order(0).tolist()
    for epoch in range(10):
        reader.order(epoch)
    assert reader.order(0).tolist() == first
    assert reader.order(9).tolist() == Reader(TensorDataset(X, Y), seed=3).order(9).tolist()


def test_without_shuffling_the_order_is_the_datasets() -> None:
    assert Reader(TensorDataset(X, Y), shuffle=False).order(5).tolist() == list(range(10))


def test_a_batch_is_the_same_stacked_or_indexed() -> None:
    lease = Lease(1, 3, 7)
    fast = Reader(TensorDataset(X, Y), seed=1).read(lease)
    slow = Reader(Pairs(), seed=1).read(lease)
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))
    assert fast[0].shape == (4, 2)


def test_parts_of_a_lease_make_the_whole() -> None:
    reader = Reader(TensorDataset(X, Y), seed=1)
    lease = Lease(0, 2, 9)
    parts = [reader.read(lease, slice(start, start + 3))[1] for start in (0, 3, 6)]
    assert torch.equal(torch.cat(parts), reader.read(lease)[1])


def test_a_collate_function_of_ones_own() -> None:
    reader = Reader(TensorDataset(X, Y), shuffle=False, collate=len)
    assert reader.read(Lease(0, 0, 4)) == 4


def test_plain_lists_are_datasets() -> None:
    reader = Reader([(1.0, 2), (3.0, 4)], shuffle=False)  # type: ignore[arg-type]
    assert len(reader) == 2
    assert [t.tolist() for t in reader.read(Lease(0, 0, 2))] == [[1.0, 3.0], [2, 4]]


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"an IterableDataset, or a DataLoader, not range_iterator"
    ):
        Reader(iter(range(3))).check()  # type: ignore[arg-type]


def test_a_lease_has_its_own_random_numbers() -> None:
    reader = Reader(Pairs(), seed=5)

    def draw(lease: Lease) -> tuple[float, float, float]:
        reader.reseed(lease)
        return torch.rand(1).item(), random.random(), float(np.random.rand())

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        one, other, again = draw(Lease(0, 0, 4)), draw(Lease(0, 4, 8)), draw(Lease(0, 0, 4))
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))
