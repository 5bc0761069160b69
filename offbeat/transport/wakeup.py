"""Something that a waiting thread can be woken by, among the sockets that it waits for."""

import os
from contextlib import suppress


class Wakeup:
    """Set from any thread; it can be waited for like a file."""

    def __init__(self) -> None:
        self.handle = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self.handle

    def wake(self) -> None:
        os.eventfd_write(self.handle, 1)

    def clear(self) -> None:
        """It has been heard."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.handle)

    def __del__(self) -> None:
        os.close(self.handle)  # not sooner: its number may be another file's by then
