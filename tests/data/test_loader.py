"""A DataLoader is taken as it is, with PyTorch's batches; what cannot be is refused."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from offbeat.config.run_config import RunConfig, configure
from offbeat.data.lease import Lease
from offbeat.data.loader import in_order, taken
from offbeat.errors import ConfigError, RunError

DATA = TensorDataset(torch.arange(20), torch.arange(20) % 2)


def asked(loader: DataLoader, **more: Any) -> RunConfig:
    return configure({"model": torch.nn.Linear(1, 1), "data": loader} | more)


def epoch(loader: DataLoader, number: int = 0, **more: Any) -> list[int]:
    """The samples of an epoch in the order in which leases give them out."""
    reader = asked(loader, **more).reader()
    return reader.order(number).tolist()


class Shuffling(Sampler[int]):
    """Keeps a list that it shuffles anew each time, with Python's generator."""

    def __init__(self) -> None:
        self.rows, self.epoch = list(range(20)), 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.rows)
        return iter(self.rows[: 10 + self.epoch])

    def __len__(self) -> int:
        return 10


class Rows(Sampler[Any]):
    """Yields what it was given."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def test_a_loader_says_the_options_of_a_run() -> None:
    config = asked(DataLoader(DATA, batch_size=6, drop_last=True, shuffle=True))
    assert (config.data, config.batch_size, config.shuffle, config.drop_last) == (
        DATA,
        6,
        True,
        True,
    )
    assert config.collate is None
    config = asked(DataLoader(DATA, batch_size=6, collate_fn=len))
    assert (config.shuffle, config.drop_last, config.collate) == (False, False, len)


def test_what_is_not_said_is_as_without_a_loader() -> None:
    plain = configure({"model": torch.nn.Linear(1, 1), "data": DATA, "batch_size": None})
    assert (plain.batch_size, plain.shuffle, plain.drop_last) == (32, True, False)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("batch_size", 5, "batch_size is 5, and 6 in the DataLoader"),
        ("shuffle", True, "shuffle is True, and False in the DataLoader"),
        ("drop_last", True, "drop_last is True, and False in the DataLoader"),
        ("collate", max, "collate is max, and len in the DataLoader"),
    ],
)
def test_what_is_said_twice_agrees(name: str, value: Any, words: str) -> None:
    loader = DataLoader(DATA, batch_size=6, collate_fn=len)
    with pytest.raises(ConfigError, match=words):
        asked(loader, **{name: value})
    assert asked(loader, batch_size=6, shuffle=False, collate=len).batch_size == 6


def test_a_random_sampler_is_our_shuffled_order() -> None:
    shuffled = configure({"model": torch.nn.Linear(1, 1), "data": DATA, "seed": 3})
    for loader in (DataLoader(DATA, shuffle=True), DataLoader(DATA, sampler=RandomSampler(DATA))):
        assert epoch(loader, 1, seed=3) == shuffled.reader().order(1).tolist()


def test_a_sequential_sampler_is_the_order_of_the_dataset() -> None:
    assert epoch(DataLoader(DATA)) == list(range(20))
    assert epoch(DataLoader(DATA, sampler=SequentialSampler(DATA)), 4) == list(range(20))


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([0.0] * 5 + [1.0] * 15, 8),
        SubsetRandomSampler(range(5, 13)),
        RandomSampler(DATA, replacement=True, num_samples=8),
        RandomSampler(DATA, num_samples=8),
    ],
    ids=["weighted", "subset", "replacement", "fewer"],
)
def test_a_samplers_order_depends_on_seed_and_epoch_alone(sampler: Sampler[int]) -> None:
    loader = DataLoader(DATA, batch_size=4, sampler=sampler)
    reader = asked(loader).reader()
    before = torch.get_rng_state()
    found = [reader.order(number).tolist() for number in (0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert found == [epoch(loader, number) for number in (0, 1)]
    assert [len(one) for one in found] == [8, 8]
    assert found[0] != found[1] != epoch(loader, 1, seed=7)
    if not isinstance(sampler, RandomSampler):
        assert min(found[0] + found[1]) >= 5


def test_weights_are_obeyed() -> None:
    sampler = WeightedRandomSampler([1.0] * 19 + [19.0], 4000)
    found = epoch(DataLoader(DATA, sampler=sampler))
    assert 1900 < found.count(19) < 2100


def test_a_sampler_of_ones_own_begins_anew_in_each_process_and_epoch() -> None:
    sampler = Shuffling()
    loader = DataLoader(DATA, batch_size=5, sampler=sampler)
    first = asked(loader, seed=1).reader()
    order = first.order(0).tolist()
    assert order != sorted(order)
    assert sampler.rows == list(range(20))
    assert asked(loader, seed=1).reader().order(0).tolist() == order
    with pytest.raises(
        RunError, match="Shuffling yields 11 samples in epoch 1 and 10 in the first"
    ):
        first.order(1)


def test_a_sampler_that_comes_out_otherwise_each_time_is_refused() -> None:
    class Spent(Rows):
        def __iter__(self) -> Iterator[int]:
            DRAWN.append(len(DRAWN) % 20)
            return iter(DRAWN[-1:])

    with pytest.raises(ConfigError, match="Spent yields another order each time"):
        taken(DataLoader(DATA, sampler=Spent([0])))


DRAWN: list[int] = []


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["a"], "yields str"),
        ([20], "others than 0 to 19"),
        ([-1], "others than 0"),
        ([], "no samples"),
    ],
)
def test_what_is_no_number_of_a_sample_is_refused(rows: list[Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        taken(DataLoader(DATA, sampler=Rows(rows)))


def test_a_distributed_sampler_is_left_out_and_that_is_said() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, shuffle=False)
    with pytest.warns(UserWarning, match="leases share the samples of the whole dataset"):
        assert epoch(DataLoader(DATA, sampler=sampler)) == list(range(20))


def test_a_sampler_of_one_rank_is_refused() -> None:
    class Share(DistributedSampler[Any]):
        pass

    with pytest.raises(ConfigError, match=r"Share yields one of 2 shares.*num_replicas=1"):
        taken(DataLoader(DATA, sampler=Share(DATA, num_replicas=2, rank=0)))


def test_pytorchs_own_batch_sampler_is_a_sampler_and_a_size() -> None:
    loader = DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 6, True))
    config = asked(loader)
    assert (config.batch_size, config.drop_last, config.shuffle) == (6, True, False)


def test_batches_of_one_size_are_taken_as_they_come() -> None:
    batches = [[3, 1, 2], [9, 8, 7], [0]]
    config = asked(DataLoader(DATA, batch_sampler=Rows(batches)))
    assert config.batch_size == 3
    assert config.reader().order(0).tolist() == [3, 1, 2, 9, 8, 7, 0]


def test_batches_of_several_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"batches of 1 to 3 samples.*make batches of one size"):
        taken(DataLoader(DATA, batch_sampler=Rows([[3, 1, 2], [0], [9, 8, 7]])))


class Batches(Dataset[Any]):
    """Its samples are batches already, as a loader with batch_size=None has them."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return [index] * 3


def test_a_dataset_of_batches_is_leased_batch_by_batch() -> None:
    config = asked(DataLoader(Batches(), batch_size=None))
    assert config.batch_size == 1
    assert config.reader().read(Lease(0, 2, 3)) == [2, 2, 2]


class Columns(Dataset[Any]):
    """As datasets of the Hugging Face kind: dicts of tensors, and several samples at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"ids": torch.full((2,), index), "label": index}

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        self.asked.append(rows)
        return [self[row] for row in rows]


def test_samples_are_taken_all_at_once_where_a_dataset_can() -> None:
    data = Columns()
    reader = asked(DataLoader(data, batch_size=2)).reader()
    batch = reader.read(Lease(0, 2, 4))
    assert data.asked == [[2, 3]]
    assert batch["ids"].tolist() == [[2, 2], [3, 3]]
    assert batch["label"].tolist() == [2, 3]


def test_batches_are_those_of_the_loader() -> None:
    loader = DataLoader(Columns(), batch_size=4)
    reader = in_order(loader)
    for number, batch in enumerate(loader):
        mine = reader.read(Lease(0, 4 * number, min(6, 4 * number + 4)))
        assert torch.equal(mine["ids"], batch["ids"])
