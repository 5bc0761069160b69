"""Checkpoints are written whole or not at all, and damage is named."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.lease import Lease
from offbeat.store import checkpoint
from offbeat.store.checkpoint import (
    KEEP,
    RunFolder,
    load_tensors,
    model_tensors,
    read_json,
    save_tensors,
    write_json,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create({"seed": 1}, {"w": torch.zeros(2)})
    return made


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.tensor(int(value))}


def test_a_new_folder_holds_configuration_and_initial_weights(folder: RunFolder) -> None:
    assert folder.config() == {"seed": 1}
    assert load_tensors(folder.initial_file)["w"].tolist() == [0, 0]
    assert folder.load() is None


def test_a_folder_in_use_is_never_written_over(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="exists and is not empty: pass resume=True"):
        folder.create({"seed": 2}, {})
    assert folder.config() == {"seed": 1}


def test_an_empty_folder_may_be_used_and_a_file_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").create({}, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        RunFolder(tmp_path / "file").create({}, {})


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        RunFolder(tmp_path / "file" / "run").create({}, {})


def test_what_was_saved_comes_back(folder: RunFolder) -> None:
    views = torch.arange(6.0)
    folder.save(3, {"x": views[:3], "y": views[3:]}, {"lease": Lease(0, 1, 2), "n": {1: 2}})
    loaded = folder.load()
    assert loaded is not None
    found, meta = loaded
    assert (found["x"].tolist(), found["y"].tolist()) == ([0, 1, 2], [3, 4, 5])
    assert meta["lease"] == [0, 1, 2]
    assert meta["n"] == {"1": 2}


def test_the_newest_is_loaded_and_the_last_two_are_kept(folder: RunFolder) -> None:
    for version in (9, 10, 100):
        folder.save(version, tensors(version), {"version": version})
    kept = sorted(p.name for p in folder.checkpoints.iterdir())
    assert KEEP == 2
    assert kept == ["0000000010", "0000000100"]
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 100


def test_saving_a_version_again_replaces_it(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {"try": 1})
    folder.save(1, tensors(2), {"try": 2})
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["try"] == 2
    assert loaded[0]["a"].tolist() == [2, 2, 2]


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("place", ["save_tensors", "write_json", "_raw", "_sync"])
def test_a_full_disk_leaves_the_checkpoint_before_intact(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder.save(1, tensors(1), {"version": 1})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise FULL

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, place, fail)
        with pytest.raises(RunError) as caught:
            folder.save(2, tensors(2), {"version": 2})
    says = str(caught.value)
    assert "the checkpoint of version 2 could not be written (No space left on device)" in says
    assert "the one before it is intact: make room and resume" in says
    names = [p.name for p in folder.checkpoints.iterdir()]
    assert not any(name.startswith(".") for name in names)
    loaded = folder.load()
    assert loaded is not None
    if place != "_sync":  # by then the new one may already be whole
        assert loaded[1]["version"] == 1
    folder.save(3, tensors(3), {"version": 3})
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 3


def test_a_half_written_file_is_not_taken_for_a_checkpoint(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.save(1, tensors(1), {"version": 1})
    with monkeypatch.context() as broken:
        broken.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(FULL))
        with pytest.raises(RunError):
            folder.save(2, tensors(2), {"version": 2})
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 1


def test_a_draft_left_by_a_killed_run_is_ignored_and_replaced(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {"version": 1})
    draft = folder.checkpoints / ".0000000002"
    draft.mkdir()
    (draft / "tensors-0.safetensors").write_bytes(b"half")
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 1
    folder.save(2, tensors(2), {"version": 2})
    assert not draft.exists()


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damaged_tensors_are_named_with_the_way_out(folder: RunFolder, damage: str) -> None:
    folder.save(1, tensors(1), {})
    folder.save(2, tensors(2), {})
    path = folder.checkpoints / "0000000002" / "tensors-0.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "cut":
        path.write_bytes(content[:-2])
    elif damage == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        folder.load()
    assert "tensors-0.safetensors is damaged or cut short" in str(caught.value)
    assert "0000000002 to go on from 0000000001" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", '{"tensors": ', "\x00"])
def test_damaged_json_is_named_with_the_way_out(folder: RunFolder, text: str) -> None:
    folder.save(1, tensors(1), {})
    (folder.checkpoints / "0000000001" / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged or cut short .*the start"):
        folder.load()


def test_json_that_is_not_text_is_damaged_too(folder: RunFolder) -> None:
    folder.config_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged or cut short"):
        folder.config()


def test_json_without_its_file(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {})
    (folder.checkpoints / "0000000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json does not exist: delete .* the start"):
        folder.load()


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a run folder: it has no run\.json"):
        RunFolder(tmp_path).config()
    assert RunFolder(tmp_path).load() is None


def test_tensor_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_tensors(tmp_path / "none")
    save_tensors(tmp_path / "some", tensors(1))
    (tmp_path / "some").write_bytes((tmp_path / "some").read_bytes()[:20])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load_tensors(tmp_path / "some")


def test_nothing_in_a_tensor_file_is_a_pickle(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, tmp_path / "pickled")
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load_tensors(tmp_path / "pickled")


def test_json_is_replaced_in_one_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def fail(*args: Any) -> None:
        raise FULL

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, "_sync", fail)
        with pytest.raises(OSError, match="No space"):
            write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert json.loads(path.read_text()) == {"a": 1}


def test_tied_tensors_are_there_once_per_name(tmp_path: Path) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    )
    model[1].weight = model[0].weight
    save_tensors(tmp_path / "m", model_tensors(model))
    assert sorted(load_tensors(tmp_path / "m")) == ["0.weight", "1.weight"]
