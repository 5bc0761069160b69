"""A DataLoader in the place of a dataset: the run that its options would make, and its replay."""

import copy
import os
import random
import select
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

import offbeat as ob
from offbeat.log.records import Entry, Updated
from offbeat.protocol.server import ServerProtocol
from tests.contract.common import MOMENTUM, assert_same_bits, plain, problem
from tests.contract.real import Gate


def test_one_worker_on_a_loader_is_plain_pytorch(engine: str) -> None:
    what = problem(samples=22)
    loader, test = DataLoader(what.data, batch_size=4, shuffle=True), DataLoader(what.data)
    run = ob.train(
        copy.deepcopy(what.model), loader, what.loss, test=test, optimizer=MOMENTUM, workers=1,
        epochs=2, seed=5, engine=engine,
    )  # fmt: skip
    assert_same_bits(run.model, plain(what, MOMENTUM, seed=5))
    assert run.summary().loss is not None


def test_a_weighted_run_says_so_and_replays(engine: str, tmp_path: Path) -> None:
    what = problem(samples=20)

    def loader(**more: Any) -> DataLoader:
        return DataLoader(what.data, sampler=WeightedRandomSampler([0.5, 2] * 10, 12), **more)

    run = ob.train(
        copy.deepcopy(what.model), loader(batch_size=4), what.loss, discipline="asp",
        optimizer=MOMENTUM, workers=2, epochs=2, engine=engine, out=tmp_path, hash_every=1,
    )  # fmt: skip
    again = (copy.deepcopy(what.model), loader(batch_size=4), what.loss)
    found = ob.replay(tmp_path, *again).check()
    assert found.versions == found.compared == 6
    assert [epoch["applied"] for epoch in run.summary().ledger] == [12, 12]
    with pytest.raises(ob.CheckpointError, match="order is None here and WeightedRandomSampler"):
        ob.replay(tmp_path, what.model, what.data, what.loss, shuffle=False)
    with pytest.raises(ob.ConfigError, match="batch_size is 4, and 3 in the DataLoader"):
        ob.replay(tmp_path, what.model, loader(batch_size=3), what.loss)


class Augmented(Dataset[Any]):
    """Samples with noise from two generators."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3) + random.random() + index % 2, index % 2


def augmented(readers: int, **more: Any) -> ob.Run:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=readers)
    return ob.train(model, loader, F.cross_entropy, optimizer=MOMENTUM, epochs=2, seed=3, **more)


def test_how_many_read_changes_no_bit(engine: str) -> None:
    first = augmented(0, workers=1, engine="sim")
    assert_same_bits(augmented(2, workers=1, engine=engine).model, first.model)


def test_a_run_with_readers_and_augmentation_replays_to_the_bit(
    local_only: str, tmp_path: Path
) -> None:
    run = augmented(2, workers=2, discipline="asp", engine=local_only, out=tmp_path, hash_every=1)
    assert run.summary().overlap["input_queue"] >= 0
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    loader = DataLoader(Augmented(), batch_size=4, shuffle=True)
    found = ob.replay(tmp_path, model, loader, F.cross_entropy).check()
    assert found.compared == found.versions == 12


def test_readers_are_not_used_where_a_step_reads_in_parts(local_only: str) -> None:
    with pytest.warns(UserWarning, match="num_workers=2 of the DataLoader is not used"):
        augmented(2, workers=1, accumulate=2, engine=local_only)


class Forward(IterableDataset[Any]):
    """A stream with chance of its own."""

    def __len__(self) -> int:
        return 22

    def __iter__(self) -> Iterator[Any]:
        for index in range(22):
            yield torch.randn(3) + index % 2, index % 2


def forward(readers: int, **more: Any) -> ob.Run:
    torch.manual_seed(1)
    loader = DataLoader(Forward(), batch_size=4, num_workers=readers)
    return ob.train(
        nn.Linear(3, 2), loader, F.cross_entropy, optimizer=MOMENTUM, epochs=2, seed=3, **more
    )


@pytest.mark.parametrize("readers", [0, 2])
def test_a_stream_is_trained_on_once_and_replays(engine: str, readers: int, tmp_path: Path) -> None:
    run = forward(readers, workers=2, discipline="asp", engine=engine, out=tmp_path, hash_every=1)
    assert [epoch["applied"] for epoch in run.summary().ledger] == [22, 22]
    torch.manual_seed(1)
    found = ob.replay(tmp_path, nn.Linear(3, 2), DataLoader(Forward(), 4), F.cross_entropy).check()
    assert found.compared == found.versions == 12


def test_one_worker_on_a_stream_is_the_same_on_every_engine(engine: str) -> None:
    first = forward(0, workers=1, engine="sim")
    assert_same_bits(forward(1, workers=1, engine=engine).model, first.model)


class Killer(ob.Listener):
    """Kills the worker of the first update, and remembers its readers."""

    def __init__(self, struck: Gate) -> None:
        self.readers: list[int] = []
        self.struck = struck

    def see(self, record: Entry) -> None:
        if isinstance(record, Updated) and not self.readers:
            mine = f"offbeat {record.parts[0].worker}"
            worker = next(pid for pid in descendants() if called(pid) == mine)
            below = [pid for pid in descendants(worker) if "reader" in called(pid)]
            self.readers = [os.pidfd_open(pid) for pid in below]
            os.kill(worker, signal.SIGKILL)
            self.struck.open()


def called(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def descendants(of: int | str = "self") -> list[int]:
    found = []
    for file in Path(f"/proc/{of}/task").glob("*/children"):
        for pid in map(int, file.read_text().split()):
            found += [pid, *descendants(pid)]
    return found


def test_no_reader_is_left_when_its_worker_was_killed(
    local_only: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck, proceed = Gate(), ServerProtocol.proceed

    def held(server: ServerProtocol, now: float) -> bool:
        """However long the launcher takes to see the first update, nobody gets far before that."""
        return (server.store.version < 2 or struck.is_open()) and proceed(server, now)

    monkeypatch.setattr(ServerProtocol, "proceed", held)
    killer = Killer(struck)
    run = augmented(2, workers=2, discipline="asp", engine=local_only, listeners=[killer])
    assert run.summary().lost == 1
    assert [epoch["applied"] for epoch in run.summary().ledger] == [22, 22]
    assert len(killer.readers) == 2
    for reader in killer.readers:
        gone, _, _ = select.select([reader], [], [], 60)
        os.close(reader)
        assert gone
