"""Run folders on disk: safetensors and JSON, written whole or not at all."""

import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offbeat.errors import CheckpointError, ConfigError, RunError
from offbeat.folder.disk import (
    FOLDER,
    checksum,
    make_folder,
    read_json,
    real_folder,
    sync,
    write_json,
)
from offbeat.folder.lock import NAME as LOCK
from offbeat.folder.lock import Lock
from offbeat.folder.manifest import NAME as MANIFEST
from offbeat.folder.manifest import Manifest, read_manifest
from offbeat.folder.tensors import KINDS, load_tensors, save_tensors
from offbeat.log.files import checksum as log_checksum
from offbeat.log.files import measure
from offbeat.log.log import read
from offbeat.log.records import Entry

KEEP = 2  # checkpoints; the one before the last is for a disk that fails during the last

STATE = "state.json"
_DRAFT = ".run.json"
_NAME = re.compile(r"[0-9]{10,18}(\.[0-9]{1,9})?")
_TENSORS = re.compile(r"tensors-[0-9]{1,6}\.safetensors")
_sync = sync

# Has other processes write the tensors that they hold, each to the file of its number; what it
# returns waits until they have, for their checksums.
Others = Callable[[Callable[[int], Path]], Callable[[], list[str]]]


def nobody(file: Callable[[int], Path]) -> Callable[[], list[str]]:
    """One process holds everything."""
    return list


class Checkpoint(NamedTuple):
    """A checkpoint that was found whole."""

    name: str
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


# Raises CheckpointError if a checkpoint, whose `meta` this is, cannot be used.
Fits = Callable[[Mapping[str, Any]], None]


def anything(meta: Mapping[str, Any]) -> None:
    """Whatever is whole can be used."""


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
        self._run: str | None = None  # once it is known

    def lock(self) -> Lock:
        """Keep every other run out of the folder, which is made if need be."""
        try:
            make_folder(self.path)
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        return Lock(self.path)

    def create(
        self,
        config: Mapping[str, Any],
        initial: Mapping[str, Tensor],
        resume: bool = False,
        run: str = "",
    ) -> None:
        """Begin a new run; an existing one is never written over.

        `run.json` is written last. With `resume`, a folder that was left without it by a kill is
        begun again, if nothing but such a beginning is in it. `run` names the run in every file
        that could be mistaken for another's.
        """
        self.check_new(resume)
        check_storable(initial)
        try:
            make_folder(self.path)
            make_folder(self.checkpoints)
            self._own_checkpoints()
            self.clean()
            told = {**config, "run": run} if run else config
            sums = {self.initial_file.name: save_tensors(self.initial_file, initial)}
            write_json(self.config_file.with_name(_DRAFT), told)
            sums[self.config_file.name] = checksum(self.config_file.with_name(_DRAFT))
            if run:
                Manifest(run, sums).write(self.path)
            self.config_file.with_name(_DRAFT).replace(self.config_file)
            sync(self.path)
            self._run = run
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error

    def check_new(self, resume: bool) -> None:
        """ConfigError unless a run may begin here."""
        if self.path.exists() and not (self.path.is_dir() and self._unbegun(resume)):
            raise ConfigError(
                f"{self.path} exists and is not empty: pass resume=True to go on with it, "
                "or name another folder"
            )

    def _unbegun(self, resume: bool) -> bool:
        beginning = {self.checkpoints.name, self.initial_file.name, f".{self.config_file.name}"}
        beginning |= {f".{self.initial_file.name}", _DRAFT, f".{_DRAFT}", MANIFEST, f".{MANIFEST}"}
        found = {file.name for file in self.path.iterdir()} - {LOCK}
        return not found or (resume and found <= beginning and not self._names())

    def _own_checkpoints(self) -> None:
        """Nothing is written, nor removed, behind a link."""
        if not real_folder(self.checkpoints):
            raise CheckpointError(
                f"{self.checkpoints} is a link or no folder, and a run only writes into folders "
                "of its own: put a real folder there"
            )

    def clean(self) -> None:
        """Remove the drafts of a run that was killed; only for whoever holds the lock."""
        for folder in (self.path, self.checkpoints):
            for found in folder.glob(".*") if real_folder(folder) else ():
                if real_folder(found):
                    shutil.rmtree(found, ignore_errors=True)
                else:
                    found.unlink(missing_ok=True)

    # ------------------------------------------------------------ what it says

    def config(self) -> dict[str, Any]:
        """What run.json says."""
        if not self.config_file.exists():
            raise CheckpointError(f"{self.path} is not a run folder: it has no run.json")
        config: dict[str, Any] = read_json(self.config_file)
        if not isinstance(config, dict):
            raise CheckpointError(f"{self.config_file} is not of a run, or is damaged")
        self._manifest(config)
        return config

    def manifest(self) -> Manifest | None:
        """The checksums of the folder, of which that of run.json is compared; None if it is old."""
        return self._manifest(read_json(self.config_file))

    def _manifest(self, config: Any) -> Manifest | None:
        run = config.get("run") if isinstance(config, Mapping) else None
        if run is None and not (self.path / MANIFEST).exists():
            return None
        found = read_manifest(self.path)
        found.check(self.config_file)
        if found.run != run:
            raise CheckpointError(f"{self.path / MANIFEST} is of another run than run.json")
        return found

    @property
    def run(self) -> str:
        """Whose folder it is; nothing for one of an earlier version."""
        if self._run is None:
            found = self.manifest()
            self._run = "" if found is None else found.run
        return self._run

    def records(self, length: int | None = None) -> Iterator[Entry]:
        """The records of the log, or of its first `length` bytes."""
        return read(self.log_file, length, self.run)

    def finished_log(self, sums: Manifest) -> int | None:
        """How long the log of a finished run is; CheckpointError if it is another by now."""
        length, told = sums.log.get("length"), sums.log.get("checksum")
        if not isinstance(length, int):
            return None
        if log_checksum(self.log_file, length, sums.run) != told:
            raise CheckpointError(f"{self.log_file} is damaged or cut short")
        return length

    def check_end(self) -> None:
        """CheckpointError if the log of a finished run ends before the run did."""
        found = self.manifest()
        length = found.log.get("length") if found is not None else None
        if isinstance(length, int) and measure(self.log_file, self.run)[0] < length:
            raise CheckpointError(f"{self.log_file} ends before the run did: it has been cut")

    def checked(self, file: Path) -> Path:
        """`file`, if it is as it was written; those of an earlier version are not known."""
        found = self.manifest()
        if found is not None:
            found.check(file)
        return file

    def note(self, *files: Path, log: Mapping[str, Any] | None = None) -> None:
        """Take files that have just been written into the manifest, and the log of the end."""
        found = self.manifest()
        if found is not None:
            found.files |= {file.name: checksum(file) for file in files}
            found.log = dict(log or {})
            found.write(self.path)

    def reopen(self) -> None:
        """A run goes on here: whatever it had come to does not count any more."""
        self._own_checkpoints()
        self.clean()
        found = self.manifest()
        if found is not None and self.summary_file.name in found.files:
            for file in (self.summary_file, self.model_file):
                found.files.pop(file.name, None)
            found.log = {}
            self.summary_file.unlink(missing_ok=True)
            found.write(self.path)

    # ------------------------------------------------------------ checkpoints

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others = nobody,
    ) -> None:
        """Write a checkpoint beside the others, then make it visible with one rename."""
        again = [number for found, number in map(_parsed, self._names()) if found == version]
        # Never in the place of another.
        name = f"{version:010d}" + (f".{max(again) + 1}" if again else "")
        draft = self.checkpoints / f".{name}"
        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(mode=FOLDER)
            sums = save_all(lambda number: _file(draft, number), tensors, others)
            write_json(draft / STATE, meta)
            files = {_file(draft, number).name: one for number, one in enumerate(sums)}
            Manifest(self.run, files | {STATE: checksum(draft / STATE)}).write(draft)
            _sync(draft)
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
        """Of all checkpoints, the newest last."""
        if not self.checkpoints.is_dir():
            return []
        found = (p.name for p in self.checkpoints.iterdir() if _NAME.fullmatch(p.name))
        return sorted(found, key=_parsed)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint that is whole, or None if there has never been one."""
        found = self.newest()
        return None if found is None else (found.tensors, found.meta)

    def newest(self, fits: Fits = anything, back: bool = True) -> Checkpoint | None:
        """The newest checkpoint that is whole and that `fits`, or None if there never was one.

        Its tensors stay in their files until they are read. With `back` it may be an older one, if
        the newest cannot be used; a warning says so.
        """
        names, wrong = self._names(), ""
        for name in reversed(names):
            try:
                found = self._load(self.checkpoints / name)
                fits(found[1])
            except CheckpointError as error:
                wrong = wrong or str(error)
                if back:
                    continue
                break
            if wrong:
                warnings.warn(f"{wrong}; went back to checkpoint {name}", stacklevel=2)
            return Checkpoint(name, *found)
        if wrong:
            raise CheckpointError(
                f"{wrong}; no other checkpoint can be used: start the run again in a new folder"
            )
        return None

    def inside(self, name: str) -> "RunFolder":
        """A folder in this one, for checkpoints of what somebody else keeps of the same run."""
        found = RunFolder(self.path / name)
        found._run = self.run
        return found

    def at_most(self, version: int, forget: bool) -> Checkpoint | None:
        """The newest whole checkpoint of `version` or before; the oldest if all are later.

        With `forget` later ones are removed: a run has gone back to this version.
        """
        names = self._names()
        before = [name for name in names if _parsed(name)[0] <= version] or names[:1]
        if forget:
            for name in names:
                if name not in before:
                    shutil.rmtree(self.checkpoints / name, ignore_errors=True)
        for name in reversed(before):
            try:
                return Checkpoint(name, *self._load(self.checkpoints / name))
            except CheckpointError as error:
                warnings.warn(f"{error}; went on without it", stacklevel=2)
        return None

    def _load(self, folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
        run, sums = self.run, None
        if run or (folder / MANIFEST).exists():
            sums = read_manifest(folder)
            if sums.run != run:
                raise CheckpointError(f"{folder} is of another run")
            sums.check(folder / STATE)
        meta = read_json(folder / STATE)
        if not isinstance(meta, dict):
            raise CheckpointError(f"{folder / STATE} is damaged or not of a run")
        if sums is None:  # of an earlier version, which kept the checksums of tensors here
            told = meta.pop("tensors", None)
            if not isinstance(told, list):
                raise CheckpointError(f"{folder} is not a checkpoint of this version")
            files = {_file(folder, number).name: one for number, one in enumerate(told)}
            sums = Manifest("", files)
        tensors: dict[str, Tensor] = {}
        for name in sums.files:
            if name != STATE:
                if not _TENSORS.fullmatch(name):
                    raise CheckpointError(f"{folder} is not a checkpoint of this version")
                sums.check(folder / name)
                tensors |= load_tensors(folder / name)
        return tensors, meta

    def forget_after(self, name: str) -> None:
        """A run goes on from checkpoint `name`: later ones are of a future that will not be."""
        for later in self._names():
            if _parsed(later) > _parsed(name):
                shutil.rmtree(self.checkpoints / later, ignore_errors=True)


def _parsed(name: str) -> tuple[int, int]:
    """Version and number of a checkpoint, by which they are in order."""
    version, _, again = name.partition(".")
    return int(version), int(again or 0)


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse what a checkpoint could not hold, whether it is made in a folder or in memory."""
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise ConfigError(
                "a tensor called '__metadata__' cannot be kept, because safetensors files have "
                "another use for that name: call it something else"
            )
        if tensor.dtype not in KINDS:
            raise ConfigError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files cannot keep: "
                "use another"
            )


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


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """A model's state under its own names, tied tensors included once per name."""
    return dict(model.state_dict())
