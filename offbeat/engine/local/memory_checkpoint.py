"""The last checkpoint of a run without a folder, in memory that outlives the server."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from offbeat.engine.local.shared_memory import Counts, SharedMemory
from offbeat.folder.checkpoint import Others, nobody, save_all
from offbeat.folder.tensors import load_tensors


class MemoryCheckpoint:
    """Two places in turn, so that one is always whole; the shared counts say which."""

    def __init__(self, shared: SharedMemory, processes: int = 1):
        """`processes` is how many hold the store, each with a file of its own."""
        self.counts = shared.counts
        self.files = [[_new() for _ in range(processes)] for _ in range(2)]
        self.heads = [_new() for _ in range(2)]
        # What was logged since each of them; the first one is for a run before its first.
        self.logs = [_new() for _ in range(3)]

    @property
    def log(self) -> Path:
        """Where records go since the last checkpoint."""
        return _path(self.logs[int(self.counts[Counts.KEPT])])

    def save(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        others: Others = nobody,
    ) -> None:
        """Write beside the last one, then make it the last one."""
        place = int(self.counts[Counts.KEPT]) % 2
        os.ftruncate(self.logs[place + 1], 0)
        save_all(lambda number: _path(self.files[place][number]), tensors, others)
        head = json.dumps(msgspec.to_builtins(meta, str_keys=True))
        _path(self.heads[place]).write_text(head)
        self.counts[Counts.KEPT] = place + 1

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or None if there has not been one."""
        place = int(self.counts[Counts.KEPT])
        if not place:
            return None
        tensors: dict[str, Tensor] = {}
        for file in self.files[place - 1]:
            tensors |= load_tensors(_path(file))
        return tensors, json.loads(_path(self.heads[place - 1]).read_text())

    def close(self) -> None:
        for file in (*self.files[0], *self.files[1], *self.heads, *self.logs):
            os.close(file)


def _new() -> int:
    return os.memfd_create("offbeat", os.MFD_CLOEXEC)


def _path(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}")
