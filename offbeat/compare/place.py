"""The folder of a comparison: which cells it holds, and whether they belong to this plan."""

import fcntl
import shutil
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offbeat.compare.plan import Point
from offbeat.config.describe import first_difference
from offbeat.errors import CheckpointError, ConfigError
from offbeat.folder.checkpoint import RunFolder
from offbeat.folder.disk import read_json, write_json


class ComparisonFolder:
    """`compare.json` and one run folder per cell, which gets its name when the run is over.

    A cell that is under way lies in a folder whose name begins with a dot, so that a kill at any
    moment leaves nothing that looks finished.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.plan_file = self.path / "compare.json"
        self.cells = self.path / "cells"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else may run cells here meanwhile."""
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            file = open(self.path / ".lock", "w")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}") from error
        with file:
            try:
                # Not flock: workers would inherit it, and they may outlive a kill by a moment.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"another comparison is running in {self.path}: wait for it, "
                    "or name another folder"
                ) from None
            yield

    def check(self, shared: Mapping[str, Any]) -> None:
        """Refuse a folder of something else, or of a comparison with other settings."""
        if not self.plan_file.exists():
            if self.path.exists() and any(f.name != ".lock" for f in self._files()):
                raise ConfigError(
                    f"{self.path} is not empty and holds no comparison: name another folder"
                )
            return
        saved = read_json(self.plan_file)
        there = saved.get("shared") if isinstance(saved, dict) else None
        if not isinstance(there, dict):
            raise CheckpointError(f"{self.plan_file} is damaged: name another folder")
        difference = first_difference(there, shared)
        if difference is not None:
            raise self._other(difference)

    def _files(self) -> list[Path]:
        if not self.path.is_dir():
            raise ConfigError(f"{self.path} is a file: name a folder")
        # An invocation that was killed before it had written its plan leaves an empty `cells`.
        return [f for f in self.path.iterdir() if f != self.cells or any(f.iterdir())]

    def _other(self, difference: str) -> CheckpointError:
        words = difference.replace("in the run", "in that folder")
        return CheckpointError(
            f"{self.path} holds another comparison: {words}; use the same settings to go on "
            "with it, or name another folder with --out"
        )

    def write_plan(self, shared: Mapping[str, Any], axes: Mapping[str, Any]) -> None:
        write_json(self.plan_file, {"shared": shared, **axes})

    # ------------------------------------------------------------ cells

    def folder(self, point: Point) -> Path:
        return self.cells / point.name

    def finished(self, point: Point, wanted: Mapping[str, Any]) -> bool:
        """Whether the cell has been run to its end; an error if that was with other settings."""
        folder = RunFolder(self.folder(point))
        if not folder.summary_file.exists() or self._failure(point).exists():
            return False
        difference = first_difference(folder.config(), wanted)
        if difference is not None:
            raise self._other(f"of {point}, {difference}")
        return True

    def _failure(self, point: Point) -> Path:
        return self.folder(point) / "failed.json"

    def failure(self, point: Point) -> str:
        """Why the cell failed when it was last run, or nothing."""
        if not self._failure(point).exists():
            return ""
        return str(read_json(self._failure(point)).get("reason") or "for a reason unknown")

    def begin(self, point: Point) -> Path:
        """A folder for the run of the cell; what an earlier attempt left is removed."""
        draft = self._draft(point)
        for left in (draft, self.folder(point)):
            if left.exists():
                shutil.rmtree(left)
        return draft

    def finish(self, point: Point) -> None:
        self._draft(point).rename(self.folder(point))

    def fail(self, point: Point, reason: str, error: Exception) -> None:
        """Keep the reason beside what the run had written by then."""
        draft = self._draft(point)
        draft.mkdir(exist_ok=True)
        trace = "".join(traceback.format_exception(error))
        write_json(draft / "failed.json", {"reason": reason, "trace": trace})
        draft.rename(self.folder(point))

    def _draft(self, point: Point) -> Path:
        return self.cells / f".{point.name}"
