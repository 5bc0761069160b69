"""Run folders on disk: safetensors and JSON, written whole or not at all."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch
import xxhash
from torch import Tensor

from offbeat.errors import CheckpointError, ConfigError, RunError

KEEP = 2  # checkpoints; the one before the last is for a disk that fails during the last

# Has other processes write the tensors that they hold, each to the file of its number; what it
# returns waits until they have, for their checksums.
Others = Callable[[Callable[[int], Path]], Callable[[], list[str]]]


def nobody(file: Callable[[int], Path]) -> Callable[[], list[str]]:
    """One process holds everything."""
    return list


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

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others = nobody,
    ) -> None:
        """Write a checkpoint beside the others, then make it visible with one rename."""
        name = f"{version:010d}"
        again = sum(found.startswith(name) for found in self._names())
        name += f".{again}" if again else ""  # never in the place of another
        draft = self.checkpoints / f".{name}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            checksums = save_all(lambda number: _file(draft, number), tensors, others)
            write_json(draft / "state.json", {"tensors": checksums, **meta})
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
        """The newest checkpoint, or None if the run was stopped before its first.

        Its tensors stay in their files until they are read.
        """
        names = self._names()
        if not names:
            return None
        newest = self.checkpoints / names[-1]
        remedy = f"delete {newest} to go on from " + (names[-2] if len(names) > 1 else "the start")
        meta = read_json(newest / "state.json", remedy)
        checksums = meta.get("tensors")
        if not isinstance(checksums, list):
            raise CheckpointError(f"{newest} is not a checkpoint of this version: {remedy}")
        tensors: dict[str, Tensor] = {}
        for number, checksum in enumerate(checksums):
            file = _file(newest, number)
            if not file.exists() or _checksum(file) != checksum:
                raise CheckpointError(f"{file} is damaged or cut short: {remedy}")
            tensors |= load_tensors(file)
        return tensors, meta


def _file(checkpoint: Path, number: int) -> Path:
    """Where the process of this number writes its tensors."""
    return checkpoint / f"tensors-{number}.safetensors"


def save_all(
    file: Callable[[int], Path], tensors: Mapping[str, Tensor], others: Others
) -> list[str]:
    """Write what this process holds while others write what they hold; returns the checksums."""
    rest = others(file)
    try:
        mine = save_tensors(file(0), tensors)
    finally:
        theirs = rest()
    return [mine, *theirs]


_KINDS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8"},
    torch.bool: "BOOL",
}


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors from where they lie, and make sure that they are on disk.

    In the format of safetensors, whose own functions need all of them a second time in memory.
    Returns a checksum.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # The widest first, so that each begins at a multiple of its width.
    order = sorted(own, key=lambda name: (-own[name].element_size(), name))
    header, offset = {}, 0
    for name in order:
        end = offset + own[name].numel() * own[name].element_size()
        about = {"dtype": _KINDS[own[name].dtype], "shape": list(own[name].shape)}
        header[name] = about | {"data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    total = xxhash.xxh3_128()
    with path.open("wb") as file:
        for piece in (len(head).to_bytes(8, "little"), head, *(_raw(own[name]) for name in order)):
            file.write(piece)
            total.update(piece)
    _sync(path)
    return total.hexdigest()


def _raw(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy()


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; they are read from it when they are looked at."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
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
    total = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's state under its own names, tied tensors included once per name."""
    return dict(model.state_dict())
