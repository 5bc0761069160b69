"""Batches are read before they are asked for, in order, and are the ones a plain reader reads."""

import os
import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from offbeat.data.lease import Lease
from offbeat.data.loader import in_order
from offbeat.data.prefetch import Prefetcher, check, worth_it
from offbeat.data.reader import Reader
from offbeat.errors import ConfigError, RunError

LEASES = [Lease(0, start, start + 4) for start in range(0, 24, 4)]


class Watched(Dataset):
    """Tells which samples were read, by which thread, and may be made to wait or fail."""

    def __init__(self):
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Semaphore(0)
        self.bad: set[int] = set()

    def __len__(self):
        return 24

    def __getitem__(self, index):
        self.begun.release()
        assert self.open.wait(60)
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        if index in self.bad:
            raise OSError(f"no sample {index}")
        return torch.tensor(float(index))


def plain(data):
    return Reader(data, shuffle=False)


def test_batches_are_the_same_as_without():
    data = Watched()
    ahead = Prefetcher(Reader(data, seed=5))
    for lease in LEASES:
        ahead.announce(lease)
    for lease in LEASES:
        assert torch.equal(ahead.read(lease), Reader(data, seed=5).read(lease))
    assert "offbeat reader" in data.threads


def test_what_was_announced_is_read_once_and_by_the_thread():
    data = Watched()
    ahead = Prefetcher(plain(data))
    for lease in LEASES[:2]:
        ahead.announce(lease)
    for lease in LEASES[:2]:
        ahead.read(lease)
    assert data.read == list(range(8))
    assert data.threads == {"offbeat reader"}


def test_what_was_not_announced_is_read_here():
    data = Watched()
    ahead = Prefetcher(plain(data))
    assert ahead.read(LEASES[0]).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert data.threads == {threading.current_thread().name}


def test_a_part_of_a_batch_is_read_here():
    ahead = Prefetcher(plain(Watched()))
    ahead.announce(LEASES[0])
    assert ahead.read(LEASES[0], slice(1, 3)).tolist() == [1.0, 2.0]


def test_a_failure_is_raised_where_the_batch_is_asked_for_and_reading_goes_on():
    data = Watched()
    data.bad = {5}
    ahead = Prefetcher(plain(data))
    for lease in LEASES[:3]:
        ahead.announce(lease)
    ahead.read(LEASES[0])
    with pytest.raises(OSError, match="no sample 5"):
        ahead.read(LEASES[1])
    assert ahead.read(LEASES[2]).tolist() == [8.0, 9.0, 10.0, 11.0]


def test_what_is_forgotten_is_read_no_more_and_may_come_again():
    """The worker was given up: the same samples may come back to it, or never."""
    data = Watched()
    ahead = Prefetcher(plain(data))
    data.open.clear()
    for lease in LEASES[:3]:
        ahead.announce(lease)
    assert data.begun.acquire(timeout=60)  # it is in the middle of the first
    ahead.forget()
    ahead.announce(LEASES[2])
    ahead.announce(LEASES[0])
    data.open.set()
    assert ahead.read(LEASES[2]).tolist() == [8.0, 9.0, 10.0, 11.0]
    assert ahead.read(LEASES[0]).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not {4, 5, 6, 7} & set(data.read)
    assert ahead.batches == {}


def test_figures_say_how_full_the_queue_was():
    data = Watched()
    ahead = Prefetcher(plain(data))
    assert ahead.figures() == {}
    for lease in LEASES[:3]:
        ahead.announce(lease)
    for lease in LEASES[:3]:
        ahead.read(lease)
    figures = ahead.figures()
    assert 0.0 <= figures["input_queue"] <= 3.0
    assert 0.0 <= figures["reading_hidden"] <= 1.0


class Random(Watched):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __getitem__(self, index):
        self.draw()
        return super().__getitem__(index)


DRAWS = [lambda: torch.rand(1), lambda: np.random.rand(), random.random]


@pytest.mark.parametrize("draw", DRAWS, ids=["t", "n", "p"])
def test_data_that_draws_is_refused_by_its_first_batch(draw):
    state = random.getstate()
    with pytest.raises(ConfigError, match="the dataset draws random numbers"):
        check(plain(Random(draw)), 4)
    assert random.getstate() == state
    check(plain(Watched()), 4)


class Slowed(Prefetcher):
    """Begins to read only when somebody waits, until that is `over`."""

    over = False

    def _read(self, lease):
        while self.awaited is None and not self.over:
            os.sched_yield()
        return super()._read(lease)


def test_a_sampler_that_may_draw_is_not_asked_by_a_thread():
    class Own(SubsetRandomSampler):
        pass

    data = TensorDataset(torch.arange(24))
    for kind in (SubsetRandomSampler, Own):
        reader = in_order(DataLoader(data, sampler=kind(range(12))))
        if kind is Own:
            with pytest.raises(ConfigError, match="Own draws from the generators of the whole"):
                check(reader, 4)
        else:
            check(reader, 4)


@pytest.mark.parametrize("draw", DRAWS, ids=["t", "n", "p"])
def test_data_that_draws_later_is_found_out_when_a_step_waits_for_it(draw):
    data = Random(lambda: None)
    ahead = Slowed(plain(data))
    for lease in LEASES[:2]:
        ahead.announce(lease)
    ahead.read(LEASES[0])
    data.draw = draw
    try:
        with pytest.raises(RunError, match="the dataset draws random numbers"):
            ahead.read(LEASES[1])
    finally:
        ahead.over = True  # or its thread would look for ever, and slow down all other tests


def test_unasked_only_data_that_cannot_draw_is_read_ahead():
    tensors = TensorDataset(torch.zeros(24))
    pairs = [(torch.zeros(2), 1)] * 4
    can = [pairs, Subset(tensors, [1, 2]), ConcatDataset([tensors, Subset(pairs, [0])])]
    assert all(worth_it(plain(data)) for data in can)
    assert worth_it(plain(StackDataset(tensors, tensors)))
    assert worth_it(plain(StackDataset(a=tensors, b=Subset(tensors, range(24)))))
    assert not worth_it(plain(tensors))  # which is faster without
    assert not worth_it(Reader(tensors, collate=lambda samples: samples))
    for data in (Watched(), Subset(Watched(), [1]), ConcatDataset([tensors, Watched()])):
        assert not worth_it(plain(data))
