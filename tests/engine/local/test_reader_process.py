"""Reader processes hand over what was read, and none is left when its worker is gone."""

import collections
import os
import random
import select
import signal
import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from offbeat.data.lease import Lease
from offbeat.data.order import Reading
from offbeat.data.prefetch import Prefetcher
from offbeat.data.random_state import RandomState
from offbeat.data.reader import Reader
from offbeat.engine.local.process import fork
from offbeat.engine.local.reader_process import INLINE, ReaderProcess, receive, send
from offbeat.errors import RunError

LEASES = [Lease(0, start, start + 4) for start in range(0, 24, 4)]
Point = collections.namedtuple("Point", "x y")


class Drawn(Dataset[Any]):
    """Samples with chance from all three generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) + random.random() + np.random.rand() + index


class Odd(Dataset[Any]):
    """Whatever a test wants of a sample."""

    def __init__(self, get: Any):
        self.get = get

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.get(index)


def handed_over(value: Any) -> Any:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        sender = threading.Thread(target=send, args=(theirs, value))
        sender.start()
        found = receive(mine)
        sender.join()
    return found


LARGE = torch.arange(2 * INLINE, dtype=torch.int32)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 3),
        torch.arange(24).reshape(2, 3, 4)[:, 1:, ::2],
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(4, 3).t(),
        torch.tensor([True, False]),
        torch.rand(5).to(torch.bfloat16),
        torch.rand(3, dtype=torch.complex64).conj(),
        LARGE,
        LARGE.reshape(2, -1).t(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.stride())}",
)
def test_a_tensor_comes_over_as_it_lies(tensor: Tensor) -> None:
    found = handed_over(tensor)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.clone().stride()  # the same, unless there were gaps
    found += found  # it may be written, as every other batch


def test_a_batch_of_any_shape_comes_over() -> None:
    batch = {
        "ids": torch.arange(3), "names": ["a", "b"], "point": Point(1, torch.ones(2)),
        "array": np.arange(INLINE, dtype=np.int16), "pair": (LARGE, None),
    }  # fmt: skip
    found = handed_over(batch)
    assert isinstance(found["point"], Point)
    assert torch.equal(found["point"].y, torch.ones(2))
    assert np.array_equal(found["array"], batch["array"])
    assert torch.equal(found["pair"][0], LARGE)
    assert found["names"] == ["a", "b"]


def read(source: ReaderProcess, lease: Lease) -> Any:
    source.ask(lease)
    return source.take(lease)


def read_all(reader: Reader, count: int) -> tuple[list[Any], RandomState]:
    sources = [ReaderProcess(reader, number, count) for number in range(count)]
    ahead = Prefetcher(reader, sources)
    try:
        for lease in LEASES:
            ahead.announce(lease)
        found = []
        for lease in LEASES:
            ahead.reseed(lease)
            found.append(ahead.read(lease))
        return found, RandomState()
    finally:
        ahead.close()
        assert [source.child.status for source in sources] == [-signal.SIGKILL] * count


def test_who_reads_and_how_many_changes_nothing_that_is_drawn() -> None:
    reader = Reader(Drawn(), seed=3)
    here = []
    for lease in LEASES:
        reader.reseed(lease)
        here.append(reader.read(lease))
    after = RandomState()
    for count in (1, 2):
        found, chance = read_all(reader, count)
        assert torch.equal(torch.stack(found), torch.stack(here))
        assert chance == after  # what the step draws next is the same, too


def test_a_reader_knows_who_it_is() -> None:
    begun: list[int] = []

    def sample(index: int) -> tuple[int, int, int]:
        info: Any = get_worker_info()
        return info.id, info.num_workers, begun[0]

    source = ReaderProcess(Reader(Odd(sample), reading=Reading(begin=begun.append)), 1, 3)
    try:
        for _ in range(2):
            ids, counts, told = read(source, LEASES[0]).batch
            assert (set(ids.tolist()), set(counts.tolist()), set(told.tolist())) == ({1}, {3}, {1})
    finally:
        source.close()
    assert not begun


def test_an_error_comes_with_its_trace_and_reading_goes_on() -> None:
    def sample(index: int) -> int:
        if index == 2:
            raise OSError("no such picture")
        return index

    source = ReaderProcess(Reader(Odd(sample), shuffle=False), 0, 1)
    try:
        with pytest.raises(RunError, match=r"OSError: no such picture\n\nIn the reader process"):
            read(source, LEASES[0])
        assert read(source, LEASES[1]).batch.tolist() == [4, 5, 6, 7]
    finally:
        source.close()


def test_what_cannot_be_handed_over_is_told() -> None:
    reader = Reader(Odd(lambda index: index), collate=lambda items: lambda: items)
    source = ReaderProcess(reader, 0, 1)
    try:
        with pytest.raises(RunError, match="pickle"):
            read(source, LEASES[0])
    finally:
        source.close()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda index: os.kill(os.getpid(), signal.SIGKILL), "ended with status -9 while it read"),
        (lambda index: os._exit(3), "ended with status 3"),
        (lambda index: exec("raise SystemExit(4)"), "SystemExit: 4"),
    ],
    ids=["killed", "exit", "SystemExit"],
)
def test_a_reader_that_ends_is_missed(end: Any, words: str) -> None:
    source = ReaderProcess(Reader(Odd(end)), 0, 1)
    try:
        with pytest.raises(RunError, match=words):
            read(source, LEASES[0])
    finally:
        source.close()


def test_readers_die_with_their_worker() -> None:
    telling, told = os.pipe()
    forever, never = os.pipe()

    def worker() -> None:
        sources = [ReaderProcess(Reader(Odd(lambda index: index)), n, 2) for n in range(2)]
        for source in sources:
            read(source, LEASES[0])
        os.write(told, b"%d %d" % tuple(source.child.pid for source in sources))
        os.read(forever, 1)

    child = fork("worker", worker)
    handles = [os.pidfd_open(int(pid)) for pid in os.read(telling, 100).split()]
    child.kill()
    child.reap()
    for handle in handles:
        gone, _, _ = select.select([handle], [], [], 60)  # readable when the process is gone
        assert gone
        os.close(handle)
    for end in (telling, told, forever, never):
        os.close(end)
