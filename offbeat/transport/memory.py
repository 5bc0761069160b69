"""Memory that the processes of a run share; it has no name, so it is gone with the last of them."""

import mmap
import os

import torch
from torch import Tensor

from offbeat.config.limits import memory_left
from offbeat.errors import ConfigError

PAGE = 4096


def pages(nbytes: int) -> int:
    """What a piece of `nbytes` takes up."""
    return max(1, -(-nbytes // PAGE)) * PAGE


class Arena:
    """A stretch of shared memory, handed out piece by piece and never taken back.

    `file` is one that another process has made; without it a new one is made.
    """

    def __init__(self, nbytes: int, file: int | None = None):
        if file is None:
            file = self._made(nbytes)
        elif os.fstat(file).st_size != nbytes:
            raise ConfigError("the processes of this run have models of different sizes")
        self.file = file
        self.map = mmap.mmap(file, nbytes)
        self.used = 0

    def _made(self, nbytes: int) -> int:
        file = os.memfd_create("offbeat", os.MFD_CLOEXEC)
        try:
            # Reserved now, so that a machine with too little memory says so before the run.
            left = memory_left()
            if left is not None and nbytes > left:
                raise OSError(12, f"{left / 2**20:.0f} MiB are free")
            os.posix_fallocate(file, 0, nbytes)
        except OSError as error:
            os.close(file)
            raise ConfigError(
                f"{nbytes / 2**20:.0f} MiB of shared memory are not to be had ({error.strerror}): "
                "use fewer workers, a smaller model, or a machine or container with more memory"
            ) from error
        return file

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes`, on a page of their own."""
        piece = torch.frombuffer(
            self.map, dtype=torch.uint8, count=max(1, nbytes), offset=self.used
        )
        self.used += pages(nbytes)
        return piece[:nbytes]

    def let_go(self, piece: Tensor) -> None:
        """Take a piece out of this process until it is touched again; others have it as it is."""
        start = piece.data_ptr() - torch.frombuffer(self.map, dtype=torch.uint8).data_ptr()
        self.map.madvise(mmap.MADV_DONTNEED, start, pages(piece.numel()))

    def close(self) -> None:
        """Give up the name of the memory; it goes with the last tensor in it."""
        os.close(self.file)
