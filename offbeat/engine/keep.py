"""The last checkpoint of a run without a folder, in memory that outlives the server."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
from torch import Tensor

from offbeat.link.memory import Counts, Shared


class Keep:
    """Two places in turn, so that one is always whole; the shared counts say which."""

    def __init__(self, shared: Shared):
        self.counts = shared.counts
        self.files = [os.memfd_create("offbeat", os.MFD_CLOEXEC) for _ in range(2)]
        # What was logged since each of them; the first one is for a run before its first.
        self.logs = [os.memfd_create("offbeat", os.MFD_CLOEXEC) for _ in range(3)]

    @property
    def log(self) -> Path:
        """Where records go since the last checkpoint."""
        return _path(self.logs[int(self.counts[Counts.KEPT])])

    def save(self, version: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Write beside the last one, then make it the last one."""
        place = int(self.counts[Counts.KEPT]) % 2
        os.ftruncate(self.logs[place + 1], 0)
        # Clones, because views of one flat buffer share their storage, which the format refuses.
        body = safetensors.torch.save({name: t.detach().clone() for name, t in tensors.items()})
        head = json.dumps(msgspec.to_builtins(meta, str_keys=True)).encode()
        file = self.files[place]
        os.ftruncate(file, 0)
        for offset, piece in ((0, len(head).to_bytes(8, "big") + head), (8 + len(head), body)):
            _write(file, piece, offset)
        self.counts[Counts.KEPT] = place + 1

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last checkpoint, or None if there has not been one."""
        place = int(self.counts[Counts.KEPT])
        if not place:
            return None
        file = self.files[place - 1]
        with os.fdopen(os.dup(file), "rb") as stream:
            stream.seek(0)
            head = stream.read(int.from_bytes(stream.read(8), "big"))
            return safetensors.torch.load(stream.read()), json.loads(head)

    def close(self) -> None:
        for file in (*self.files, *self.logs):
            os.close(file)


def _path(file: int) -> Path:
    return Path(f"/proc/self/fd/{file}")


def _write(file: int, piece: bytes, offset: int) -> None:
    view = memoryview(piece)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
