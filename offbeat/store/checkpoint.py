"""Run folders on disk: safetensors and JSON, written whole or not at all."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from offbeat.errors import CheckpointError, ConfigError, RunError

KEEP = 2  # checkpoints; the one before the last is for a disk that fails during the last


class RunFolder:
    """Where a run keeps its configuration, log, checkpoints, final model and summary."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config_file = self.path / "run.json"
        self.log_file = self.path / "log.jsonl"
        self.initial_file = self.path / "initial.safetensors"
        self.start_file = self.path / "start.safetensors"  # only of a run that began with another
        self.model_file = self.path / "model.safetensors"
        self.summary_file = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"

    def create(
        self, config: Mapping[str, Any], initial: Mapping[str, Tensor], resume: bool = False
    ) -> None:
        """Begin a new run; an existing one is never written over.

        `run.json` is written last. With `resume`, a folder that was left without it by a kill is
        begun again, if nothing but such a beginning is in it.
        """
        if self.path.exists() and not (self.path.is_dir() and self._unbegun(resume)):
            raise ConfigError(
                f"{self.path} exists and is not empty: pass resume=True to go on with it, "
                "or name another folder"
            )
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            save_tensors(self.initial_file, initial)
            write_json(self.config_file, config)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error

    def _unbegun(self, resume: bool) -> bool:
        beginning = {self.checkpoints.name, self.initial_file.name, f".{self.config_file.name}"}
        found = {file.name for file in self.path.iterdir()}
        return not found or (resume and found <= beginning and not self._names())

    def config(self) -> dict[str, Any]:
        if not self.config_file.exists():
            raise CheckpointError(f"{self.path} is not a run folder: it has no run.json")
        config: dict[str, Any] = read_json(self.config_file)
        return config

    # ------------------------------------------------------------ checkpoints

    def save(self, version: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write a checkpoint beside the others, then make it visible with one rename."""
        name = f"{version:010d}"
        again = sum(found.startswith(name) for found in self._names())
        name += f".{again}" if again else ""  # never in the place of another
        draft = self.checkpoints / f".{name}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            save_tensors(draft / "tensors.safetensors", tensors)
            checksum = _checksum(draft / "tensors.safetensors")
            write_json(draft / "state.json", {"tensors": checksum, **meta})
            draft.rename(self.checkpoints / name)
            _sync(self.checkpoints)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise RunError(
                f"the checkpoint of version {version} could not be written ({error.strerror}); "
                "the one before it is intact: make room and resume"
            ) from error
        for old in self._names()[:-KEEP]:
            shutil.rmtree(self.checkpoints / old, ignore_errors=True)

    def _names(self) -> list[str]:
        if not self.checkpoints.is_dir():
            return []
        return sorted(p.name for p in self.checkpoints.iterdir() if not p.name.startswith("."))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint, or None if the run was stopped before its first."""
        names = self._names()
        if not names:
            return None
        newest = self.checkpoints / names[-1]
        remedy = f"delete {newest} to go on from " + (names[-2] if len(names) > 1 else "the start")
        meta = read_json(newest / "state.json", remedy)
        tensors_file = newest / "tensors.safetensors"
        if not tensors_file.exists() or _checksum(tensors_file) != meta.get("tensors"):
            raise CheckpointError(f"{tensors_file} is damaged or cut short: {remedy}")
        return load_tensors(tensors_file), meta


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and make sure that they are on disk."""
    # Clones, because views of one flat buffer share their storage, which the format refuses.
    own = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    path.write_bytes(safetensors.torch.save(own))
    _sync(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or cut short: {error}") from None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one move."""
    draft = path.with_name(f".{path.name}")
    plain = msgspec.to_builtins(value, str_keys=True)
    draft.write_text(json.dumps(plain, indent=1) + "\n")
    _sync(draft)
    draft.replace(path)


def read_json(path: Path, remedy: str = "") -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist{': ' + remedy if remedy else ''}") from None
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged or cut short ({error}){': ' + remedy if remedy else ''}"
        ) from None


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's state under its own names, tied tensors included once per name."""
    return dict(model.state_dict())
