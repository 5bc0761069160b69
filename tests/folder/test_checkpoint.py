"""Checkpoints are written whole or not at all, and damage is named."""

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.data.lease import Lease
from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.folder import checkpoint, disk
from offbeat.folder import tensors as tensors_module
from offbeat.folder.checkpoint import KEEP, RunFolder, model_tensors
from offbeat.folder.disk import checksum, read_json, write_json
from offbeat.folder.tensors import load_tensors, save_tensors


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create({"seed": 1}, {"w": torch.zeros(2)}, run="this")
    return made


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), value), "b": torch.tensor(int(value))}


def test_a_new_folder_holds_configuration_and_initial_weights(folder: RunFolder) -> None:
    assert folder.config() == {"seed": 1, "run": "this"}
    assert load_tensors(folder.initial_file)["w"].tolist() == [0, 0]
    assert folder.load() is None


def test_a_folder_in_use_is_never_written_over(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="exists and is not empty: pass resume=True"):
        folder.create({"seed": 2}, {})
    assert folder.config()["seed"] == 1


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


@pytest.mark.parametrize("place", ["save_tensors", "write_json", "write_all", "_sync"])
def test_a_full_disk_leaves_the_checkpoint_before_intact(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder.save(1, tensors(1), {"version": 1})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise FULL

    with monkeypatch.context() as broken:
        broken.setattr(tensors_module if place == "write_all" else checkpoint, place, fail)
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


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "cut":
        path.write_bytes(content[:-2])
    elif how == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("name", ["tensors-0.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "empty", "gone"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    folder: RunFolder, name: str, how: str
) -> None:
    folder.save(1, tensors(1), {"version": 1})
    folder.save(2, tensors(2), {"version": 2})
    damage(folder.checkpoints / "0000000002" / name, how)
    says = rf"0000000002.*{name}.*(damaged|does not exist).*went back to checkpoint 0000000001"
    with pytest.warns(UserWarning, match=says):
        loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 1
    assert loaded[0]["a"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match=r"0000000002.*no other checkpoint can be used"):
        folder.newest(back=False)
    damage(folder.checkpoints / "0000000001" / name, how)
    with pytest.raises(CheckpointError, match=r"0000000002.*start the run again in a new folder"):
        folder.load()


def test_any_digit_of_a_checkpoint_that_is_changed_is_found(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {"session": {"log": 120, "tested": 3}, "board": [[1, 2], [3, 4]]})
    for path in sorted((folder.checkpoints / "0000000001").iterdir()):
        content = path.read_bytes()
        for place, digit in enumerate(content):
            if chr(digit).isdigit():
                path.write_bytes(
                    content[:place] + b"%d" % ((digit - 47) % 10) + content[place + 1 :]
                )
                with pytest.raises(CheckpointError):
                    folder.load()
        path.write_bytes(content)
    assert folder.load() is not None


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, folder: RunFolder) -> None:
    other = RunFolder(tmp_path / "other")
    other.create({"seed": 1}, {"w": torch.zeros(2)}, run="other")
    other.save(5, tensors(5), {"version": 5})
    folder.save(1, tensors(1), {"version": 1})
    shutil.copytree(other.checkpoints / "0000000005", folder.checkpoints / "0000000005")
    with pytest.warns(UserWarning, match="0000000005 is of another run; went back to"):
        loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["version"] == 1


def test_a_version_may_be_saved_any_number_of_times(folder: RunFolder) -> None:
    for turn in range(13):
        folder.save(7, tensors(turn), {"turn": turn})
        loaded = folder.load()
        assert loaded is not None
        assert loaded[1]["turn"] == turn
    folder.save(8, tensors(8), {"turn": "next"})
    loaded = folder.load()
    assert loaded is not None
    assert loaded[1]["turn"] == "next"


def test_a_checkpoint_of_the_format_before_is_read(folder: RunFolder) -> None:
    """Without a manifest; state.json has the checksums of the tensors."""
    folder.save(1, tensors(1), {"version": 1})
    place = folder.checkpoints / "0000000001"
    total = checksum(place / "tensors-0.safetensors")
    (place / "manifest.json").unlink()
    (folder.path / "manifest.json").unlink()
    (folder.path / "run.json").write_text('{"seed": 1}')
    (place / "state.json").write_text(json.dumps({"tensors": [total], "version": 1}))
    again = RunFolder(folder.path)
    assert again.config() == {"seed": 1}
    loaded = again.load()
    assert loaded is not None
    assert loaded[1] == {"version": 1}
    again.save(2, tensors(2), {"version": 2})
    loaded = again.load()
    assert loaded is not None
    assert loaded[1] == {"version": 2}


def test_a_folder_without_its_manifest_is_not_taken_for_an_old_one(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {"version": 1})
    (folder.path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        RunFolder(folder.path).config()
    with pytest.raises(CheckpointError, match=r"manifest\.json does not exist"):
        RunFolder(folder.path).load()


def test_drafts_of_a_killed_run_are_cleaned_up(folder: RunFolder) -> None:
    folder.save(1, tensors(1), {"version": 1})
    (folder.checkpoints / ".0000000002").mkdir()
    (folder.checkpoints / ".0000000002" / "tensors-0.safetensors").write_bytes(b"half")
    (folder.path / ".summary.json").write_text("half")
    folder.reopen()
    assert not list(folder.path.rglob(".*"))
    assert folder.load() is not None


def test_a_parameter_called_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'__metadata__' cannot be kept.*call it something else"):
        RunFolder(tmp_path / "run").create({}, {"__metadata__": torch.zeros(1)})
    with pytest.raises(ConfigError, match="float8_e4m3fnuz, which safetensors files cannot keep"):
        RunFolder(tmp_path / "run").create({}, {"a": torch.zeros(1, dtype=torch.float8_e4m3fnuz)})
    assert not (tmp_path / "run").exists()


def test_complex_numbers_of_128_bits_come_back(tmp_path: Path) -> None:
    """The format has no word for them, and none for a conjugate that is only noted."""
    wide = torch.randn(2, 3, dtype=torch.complex128)
    kept = {"wide": wide.mT, "none": wide[:0], "one": wide[0, 0], "turned": wide[0].conj()}
    kept["narrow"] = wide.to(torch.complex64).conj()
    save_tensors(tmp_path / "file", kept)
    found = load_tensors(tmp_path / "file")
    assert found.keys() == kept.keys()
    for name, tensor in kept.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["checkpoints", "0000000001"])
def test_nothing_is_written_or_removed_behind_a_link(
    folder: RunFolder, tmp_path: Path, name: str
) -> None:
    folder.save(1, tensors(1), {"version": 1})
    aside = tmp_path / "aside"
    link = next(path for path in (folder.checkpoints, *folder.checkpoints.iterdir())
                if path.name == name)  # fmt: skip
    link.rename(aside)
    link.symlink_to(aside)
    before = sorted(path.name for path in aside.rglob("*"))
    if name == "checkpoints":
        with pytest.raises(CheckpointError, match="is a link or no folder"):
            folder.reopen()
    else:
        folder.reopen()
        for version in (2, 3, 4):
            folder.save(version, tensors(version), {"version": version})
    assert sorted(path.name for path in aside.rglob("*")) == before


def test_what_is_no_regular_file_is_not_read(folder: RunFolder, tmp_path: Path) -> None:
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(CheckpointError, match=r"is not a regular file|cannot be read"):
            read_json(path)
        with pytest.raises(CheckpointError, match=r"is not a regular file|cannot be read"):
            load_tensors(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_json(tmp_path / "pipe")


def test_nobody_else_may_write_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = RunFolder(tmp_path / "run")
        lock = made.lock()
        made.create({"seed": 1}, {"w": torch.zeros(2)}, run="it")
        made.save(1, tensors(1), {})
        assert stat.S_IMODE(lock.path.stat().st_mode) == 0o600
        for path in (made.path, *made.path.rglob("*")):
            assert not path.stat().st_mode & 0o022, path
        lock.release()
    finally:
        os.umask(before)


def test_json_that_is_not_text_is_damaged_too(folder: RunFolder) -> None:
    folder.config_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"run\.json is damaged or cut short"):
        folder.config()


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
        broken.setattr(disk, "sync", fail)
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
