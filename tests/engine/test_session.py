"""Tests and checkpoints come when they are due, and Ctrl-C stops at a whole step."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import offbeat as ob
from offbeat.folder.checkpoint import RunFolder
from offbeat.log import log
from offbeat.log.records import Entry, Evaluated, Updated

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
DATA = TensorDataset(X, Y)


def train(**changes: Any) -> ob.Run:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "model": nn.Linear(3, 2), "data": DATA, "loss": F.cross_entropy, "workers": 2,
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "batch_size": 4, "epochs": 3,
        "discipline": "asp", "engine": "sim",
    }  # fmt: skip
    return ob.train(**settings | changes)


@pytest.mark.parametrize(
    ("every", "expected"),
    [(None, [24, 48, 72]), (12, [12, 24, 36, 48, 60, 72]), (30, [32, 60, 72]), (10_000, [72])],
)
def test_tests_come_after_so_many_samples_and_at_the_end(
    every: int | None, expected: list[int]
) -> None:
    settings = {} if every is None else {"evaluate_every": every}
    run = train(test=DATA, **settings)
    assert [test.samples for test in run.history.tests] == expected
    last = run.history.tests[-1]
    with torch.no_grad():
        output = run.model(X)
    assert last.loss == pytest.approx(F.cross_entropy(output, Y).item(), rel=1e-6)
    assert last.accuracy == (output.argmax(1) == Y).float().mean().item()


def test_without_a_test_set_there_are_no_tests() -> None:
    assert train().history.tests == []


def test_testing_does_not_change_the_run() -> None:
    assert train(test=DATA, evaluate_every=4).parameter_hash == train().parameter_hash


class Saves(ob.Listener):
    """Notes which checkpoints there are at every update."""

    def __init__(self, folder: Path):
        self.folder, self.found = RunFolder(folder), set[str]()

    def see(self, record: Entry) -> None:
        if self.folder.checkpoints.is_dir():
            self.found |= {p.name for p in self.folder.checkpoints.iterdir()}


@pytest.mark.parametrize(
    ("every", "versions"), [(None, [6, 12]), (5, [5, 10, 15]), (1, range(1, 18))]
)
def test_checkpoints_come_per_epoch_or_per_version(
    every: int | None, versions: Any, tmp_path: Path
) -> None:
    saves = Saves(tmp_path / "run")
    train(out=tmp_path / "run", checkpoint_every=every, listeners=[saves])
    assert sorted(saves.found)[: len(versions)] == [f"{version:010d}" for version in versions]


class Interrupt(ob.Listener):
    """Presses Ctrl-C when a version is reached, or sends another signal."""

    def __init__(self, version: int, times: int = 1, what: signal.Signals = signal.SIGINT):
        self.version, self.times, self.what = version, times, what

    def see(self, record: Entry) -> None:
        if isinstance(record, Updated) and record.version == self.version:
            for _ in range(self.times):
                signal.raise_signal(self.what)


@pytest.mark.parametrize("discipline", ["asp", "bsp", "ssp:1", "local:2", "easgd:2", "soft:2"])
def test_ctrl_c_saves_and_the_run_goes_on_from_there(discipline: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = {"discipline": discipline, "test": DATA, "evaluate_every": 20}
    whole = train(**settings)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(out=out, listeners=[Interrupt(2)], **settings)
    assert signal.getsignal(signal.SIGINT) is before
    loaded = RunFolder(out).load()
    assert loaded is not None
    assert loaded[1]["store"]["version"] == 2
    again = train(out=out, resume=True, **settings)
    assert again.summary() == whole.summary()
    assert again.history == whole.history
    versions = [r.version for r in log.read(RunFolder(out).log_file) if isinstance(r, Updated)]
    assert versions == list(range(1, len(versions) + 1))


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, what: signal.Signals) -> None:
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(out=out, listeners=[Interrupt(2, times=2, what=what)])
    assert RunFolder(out).load() is None


def test_sigterm_saves_as_ctrl_c_does(tmp_path: Path) -> None:
    out = tmp_path / "run"
    whole = train()
    with pytest.raises(KeyboardInterrupt) as caught:
        train(out=out, listeners=[Interrupt(2, what=signal.SIGTERM)])
    assert isinstance(caught.value, SystemExit)  # an uncaught one ends the program with this code
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    loaded = RunFolder(out).load()
    assert loaded is not None
    assert loaded[1]["store"]["version"] == 2
    assert train(out=out, resume=True).parameter_hash == whole.parameter_hash


def test_a_program_keeps_its_own_handler_for_sigterm() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        train(listeners=[Interrupt(2, what=signal.SIGTERM)])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert heard == [signal.SIGTERM]


def test_ctrl_c_without_a_folder_just_stops() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(listeners=[Interrupt(1)])


def test_a_finished_run_resumes_to_the_same_end(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = train(out=out, test=DATA)
    second = train(out=out, test=DATA, resume=True)
    assert second.summary() == first.summary()
    tests = [r for r in log.read(RunFolder(out).log_file) if isinstance(r, Evaluated)]
    assert len(tests) == len(first.history.tests)


def test_resuming_what_never_began_begins_it(tmp_path: Path) -> None:
    assert train(out=tmp_path / "run", resume=True).parameter_hash == train().parameter_hash
