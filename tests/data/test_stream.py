"""A stream is read forward, and a lease finds the same samples in it whoever reads."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from offbeat.config.run_config import configure
from offbeat.data.lease import Lease
from offbeat.data.loader import in_order
from offbeat.data.prefetch import check
from offbeat.data.random_state import RandomState
from offbeat.data.stream import KEPT, StreamReader
from offbeat.errors import ConfigError, RunError


class Counted(IterableDataset[Any]):
    """Numbers with noise from three generators; it counts how often it was begun and read."""

    def __init__(self, count: int = 40, says: int | None = None):
        self.count, self.says = count, count if says is None else says
        self.begun = self.read = 0
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.says

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        for number in range(self.count):
            self.read += 1
            noise = torch.rand(()).item() + random.random() + np.random.rand()
            yield torch.tensor([number, noise])


def numbers(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].int().tolist()


def leases(count: int, size: int = 4, epoch: int = 0) -> list[Lease]:
    return [Lease(epoch, size * n, size * n + size) for n in range(count)]


def test_leases_are_the_samples_in_their_order() -> None:
    data = Counted()
    reader = StreamReader(data)
    for lease in leases(10):
        assert numbers(reader.read(lease)) == [*range(lease.start, lease.stop)]
    assert (data.begun, data.read) == (1, 40)


def test_what_others_are_given_is_passed_over_and_changes_nothing() -> None:
    every = [StreamReader(Counted(), seed=3).read(lease) for lease in leases(10)]
    some = StreamReader(Counted(), seed=3)
    for number in (1, 4, 8):
        assert torch.equal(some.read(leases(10)[number]), every[number])


def test_leases_that_come_late_are_still_there_or_are_read_again() -> None:
    data = Counted(200)
    reader = StreamReader(data, seed=3)
    last = reader.read(leases(50)[49])
    assert numbers(last) == [196, 197, 198, 199]
    assert numbers(reader.read(leases(50)[49 - KEPT])) == [132, 133, 134, 135]
    assert data.begun == 1
    assert numbers(reader.read(leases(50)[3])) == [12, 13, 14, 15]
    assert data.begun == 2
    assert torch.equal(reader.read(leases(50)[49]), last)


def test_each_epoch_begins_anew_with_chance_of_its_own() -> None:
    data = Counted()
    reader = StreamReader(data, seed=3)
    first = reader.read(Lease(0, 0, 4))
    second = reader.read(Lease(1, 0, 4))
    assert numbers(first) == numbers(second)
    assert not torch.equal(first, second)
    assert torch.equal(reader.read(Lease(0, 0, 4)), first)
    assert data.epochs == [0, 1, 0]


def test_reading_leaves_the_generators_alone() -> None:
    before = RandomState()
    StreamReader(Counted()).read(Lease(0, 4, 8))
    assert RandomState() == before


def test_a_part_of_a_batch() -> None:
    reader = StreamReader(Counted())
    lease = Lease(0, 4, 12)
    assert numbers(reader.read(lease, slice(0, 4))) == [4, 5, 6, 7]
    assert numbers(reader.read(lease, slice(4, 8))) == [8, 9, 10, 11]


def test_a_stream_that_is_too_short_says_where() -> None:
    reader = StreamReader(Counted(10, says=12))
    reader.read(Lease(0, 0, 8))
    with pytest.raises(RunError, match=r"Counted ends after 10 samples of epoch 0, .* says 12"):
        reader.read(Lease(0, 8, 12))


class Endless(IterableDataset[Any]):
    """Does not say how long it is."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


class Once(IterableDataset[Any]):
    """Its samples can be taken once, as from a socket."""

    def __init__(self) -> None:
        self.left = iter({"x": np.array([number])} for number in range(100))

    def __len__(self) -> int:
        return 50

    def __iter__(self) -> Iterator[Any]:
        return self.left


@pytest.mark.parametrize(
    ("data", "words"), [(Endless(), "give it __len__"), (Once(), "begins with other samples")]
)
def test_a_stream_whose_samples_cannot_be_numbered_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StreamReader(data).check()
    StreamReader(Counted()).check()


def test_a_stream_is_not_shuffled_for_its_user() -> None:
    with pytest.raises(ConfigError, match="shuffle in the dataset"):
        configure({"model": torch.nn.Linear(1, 1), "data": Counted(), "shuffle": True})
    config = configure({"model": torch.nn.Linear(1, 1), "data": Counted()})
    assert not config.shuffle
    assert isinstance(config.reader(), StreamReader)


def test_no_thread_reads_a_stream() -> None:
    with pytest.raises(ConfigError, match="num_workers=1"):
        check(StreamReader(Counted()), 4)


class Shards(IterableDataset[Any]):
    """Makes batches itself, as WebDataset does, and reads its share of them."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is None
        for number in range(3):
            yield torch.full((5, 2), number), ["name"] * 5


def test_batches_of_a_stream_are_leased_one_by_one() -> None:
    reader = in_order(DataLoader(Shards(), batch_size=None))
    x, names = reader.read(Lease(0, 2, 3))
    assert (x.tolist(), len(names)) == ([[2, 2]] * 5, 5)
