"""The last checkpoint of a run without a folder, in memory that outlives the server."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from offbeat.engine.local.shared_memory import Counts, SharedMemory
from offbeat.engine.local.state_files import StateFiles, new_file, path_of
from offbeat.folder.checkpoint import Others, nobody


class MemoryCheckpoint:
    """Two places in turn, so that one is always whole; the shared counts say which."""

    def __init__(self, shared: SharedMemory, processes: int = 1):
        """`processes` is how many hold the store, each with a file of its own."""
        self.counts = shared.counts
        self.places = [StateFiles(processes) for _ in range(2)]
        # What was logged since each of them; the first one is for a run before its first.
        self.logs = [new_file() for _ in range(3)]

    @property
    def log(self) -> Path:
        """Where records go since the last checkpoint."""
        return path_of(self.logs[int(self.counts[Counts.KEPT])])

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
        self.places[place].save(tensors, meta, others)
        self.counts[Counts.KEPT] = place + 1

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or None if there has not been one."""
        place = int(self.counts[Counts.KEPT])
        return self.places[place - 1].load() if place else None

    def close(self) -> None:
        for place in self.places:
            place.close()
        for file in self.logs:
            os.close(file)
