"""The state of a store in memory that outlives its processes: a file for each that holds a part."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from offbeat.folder.checkpoint import Others, nobody, save_all
from offbeat.folder.tensors import load_tensors


def new_file() -> int:
    """A file without a name, gone with the last process that has it open."""
    return os.memfd_create("offbeat", os.MFD_CLOEXEC)


def path_of(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}")


class StateFiles:
    """Tensors and what is said of them; written whole or of no use to anybody."""

    def __init__(self, processes: int = 1):
        """`processes` is how many hold the store, each with a file of its own."""
        self.files = [new_file() for _ in range(processes)]
        self.head = new_file()

    def save(
        self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], others: Others = nobody
    ) -> None:
        """Write over what was there; the meta goes last."""
        save_all(lambda number: path_of(self.files[number]), tensors, others)
        path_of(self.head).write_text(json.dumps(msgspec.to_builtins(meta, str_keys=True)))

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What was saved; tensors are read from there when they are looked at."""
        tensors: dict[str, Tensor] = {}
        for file in self.files:
            tensors |= load_tensors(path_of(file))
        return tensors, json.loads(path_of(self.head).read_text())

    def clear(self) -> None:
        """Give the memory back; nobody may have tensors of here."""
        for file in (*self.files, self.head):
            os.ftruncate(file, 0)

    def close(self) -> None:
        for file in (*self.files, self.head):
            os.close(file)
