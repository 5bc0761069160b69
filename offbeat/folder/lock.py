"""A lock on a run folder: one process at a time writes there, and the kernel knows which lives."""

import errno
import fcntl
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.errors import CheckpointError
from offbeat.folder.disk import SECRET

NAME = "lock"


class Lock:
    """Holds a folder until it is released, or until this process is gone, however it goes.

    A forked child gives its copy up at once, so that it never holds a folder for a dead launcher.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._kept = False  # whether the next child keeps its copy
        self.handle = self._taken()
        self._close = weakref.finalize(self, os.close, self.handle)
        _locks.add(self)
        self.sign()

    def _taken(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        while True:
            try:
                handle = os.open(self.path, flags, SECRET)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be locked: {error.strerror}; it belongs to nobody but the "
                    "run, so remove it if it is a link, or make the folder writable"
                ) from None
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(handle)
                os.close(handle)
                raise CheckpointError(
                    f"{self.path.parent} is in use by {holder}: wait until that has ended, or name "
                    "another folder"
                ) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL):
                    os.close(handle)
                    raise
                warnings.warn(
                    f"{self.path.parent} lies on a disk that knows no locks: make sure yourself "
                    "that no second run uses it",
                    stacklevel=2,
                )
            if self._still(handle):
                return handle
            os.close(handle)  # whoever had it has removed it meanwhile

    def _still(self, handle: int) -> bool:
        """Whether the file that is locked is the one that others find."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self.path, follow_symlinks=False))
        return False

    def sign(self) -> None:
        """Say who holds it, for those who find it taken."""
        with suppress(OSError):  # a full disk: it holds all the same
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, f"{os.getpid()}\n".encode(), 0)

    @contextmanager
    def passed_on(self) -> Iterator[None]:
        """The child that is forked inside goes on holding it; this process lets go."""
        self._kept = True
        try:
            yield
        finally:
            self._kept = False
        if self._close.alive:
            self._close()

    def release(self) -> None:
        """Let others in; in a child that has none of it any more this does nothing."""
        if self._close.alive:
            with suppress(OSError):
                os.unlink(self.path)
            self._close()

    def after_fork(self) -> None:
        """In a child."""
        if not self._kept:
            self._close()
        else:
            self._kept = False
            self.sign()


def _holder(handle: int) -> str:
    """The process that wrote its number into the lock, and what it runs."""
    try:
        number = int(os.pread(handle, 20, 0))
        with open(f"/proc/{number}/cmdline", "rb") as file:
            words = file.read(400).replace(b"\0", b" ").decode("ascii", "replace").strip()
    except (OSError, ValueError):
        return "another process"
    shown = "".join(letter if letter.isprintable() else "?" for letter in words)
    return f"process {number} ({shown[:100]})" if shown else f"process {number}"


_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.after_fork()


os.register_at_fork(after_in_child=_after_fork)
