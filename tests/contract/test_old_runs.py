"""Folders that earlier code has written are replayed and gone on with, to the same bits."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.old_runs import CASES, EXPECTED, FOLDER, arithmetic, summary

Told = dict[str, Any]
TOLD: Told = json.loads(EXPECTED.read_text())
FOLDERS = ("finished", "stopped")
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module")
def same_bits() -> bool:
    """Another processor, or another PyTorch, may round otherwise than what made the folders."""
    return arithmetic() == TOLD["arithmetic"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # where scripts are put
    return tmp_path


def unpack(case: Any, name: str, to: Path) -> Path:
    """One of the two folders of a case."""
    with tarfile.open(FOLDER / f"{case.name}.tar.gz") as tar:
        inside = [entry for entry in tar if Path(entry.name).parts[0] == name]
        tar.extractall(to, inside, filter="data")
    return to / name


def check_ledger(found: Told, whole: Told) -> None:
    """Every sample of every epoch counts once, and not one that the whole run left out."""
    assert len(found["ledger"]) == len(whole["ledger"])
    for epoch, like in zip(found["ledger"], whole["ledger"], strict=True):
        assert epoch["repeated"] == epoch["missing"] == 0
        assert epoch["applied"] + epoch["dropped"] == like["applied"] + like["dropped"] > 0


def hashed(case: Any, updates: int) -> int:
    """How many of so many versions have a hash in the log."""
    return updates // getattr(case, "options", {}).get("hash_every", 1)


@each
def test_a_finished_run_replays(case: Any, folders: Path, same_bits: bool) -> None:
    told, folder = TOLD["cases"][case.name], unpack(case, "finished", folders)
    found = summary(folder)
    assert (found["parameter_hash"], found["updates"]) == (told["finished"], told["updates"])
    if not same_bits:
        pytest.skip("PyTorch rounds otherwise here than where the folders were made")
    assert case.replay(folder) == hashed(case, told["updates"])


@each
def test_a_stopped_run_goes_on(case: Any, folders: Path, same_bits: bool) -> None:
    """Its log is then of two parts, one old and one new, and is replayed as one."""
    told, folder = TOLD["cases"][case.name], unpack(case, "stopped", folders)
    whole = summary(unpack(case, "finished", folders))
    case.run(folder, resume=True)
    found = summary(folder)
    check_ledger(found, whole)
    if not same_bits:
        pytest.skip("PyTorch rounds otherwise here than where the folders were made")
    assert case.replay(folder) == hashed(case, found["updates"])
    if case.exact:
        assert (found["parameter_hash"], found["updates"]) == (told["resumed"], told["updates"])
    if case.engine == "sim":  # as if it had never been stopped, and with the same buffers
        one, other = (load_file(folders / name / "model.safetensors") for name in FOLDERS)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_every_case_has_its_folders() -> None:
    """And none is left over of a case that is gone: nobody can make it again."""
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    assert {file.name.removesuffix(".tar.gz") for file in FOLDER.glob("*.gz")} == set(names)
    assert set(TOLD["cases"]) == set(names)
