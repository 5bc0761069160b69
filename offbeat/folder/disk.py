"""Files of a run folder: regular ones, whole on disk, and never through another's link."""

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from offbeat.errors import CheckpointError

# Who may read is for the umask to say; who may write is not: only the owner.
FILE, FOLDER, SECRET = 0o644, 0o755, 0o600
LARGEST = 1 << 30  # bytes of a JSON file
_OWN = Path("/proc/self/fd")  # files that this process has open: memory, and no one's to plant


def make_folder(path: Path) -> None:
    """A folder in which nobody else may write, and the folders above it."""
    path.mkdir(mode=FOLDER, parents=True, exist_ok=True)


def readable(path: Path) -> IO[bytes]:
    """Open a regular file; a device or a pipe, which may never end, is refused."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file: it is no part of a run")
    return os.fdopen(handle, "rb")


def fresh(path: Path, mode: int = FILE) -> IO[bytes]:
    """A new file to write, in the place of whatever is called so."""
    if path.parent == _OWN:
        return open(path, "wb", buffering=0)
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, mode), "wb", buffering=0)


def appended(path: Path) -> IO[bytes]:
    """A file to write on in; a link is not followed."""
    if path.parent == _OWN:
        return open(path, "ab", buffering=0)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, FILE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise CheckpointError(_refused(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(_refused(path))
    return os.fdopen(handle, "ab", buffering=0)


def _refused(path: Path) -> str:
    return f"{path} is a link or no regular file, and a run only writes files of its own: remove it"


def write_all(file: IO[bytes], data: Any) -> None:
    """Write everything; the system may take less at a time, above all when the disk is full."""
    left = memoryview(data).cast("B")
    while left:
        left = left[file.write(left) :]


def real_folder(path: Path) -> bool:
    """Whether `path` is a folder and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def sync(path: Path) -> None:
    """Make sure that a file, or the names in a folder, are on disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a JSON file in one move."""
    plain = msgspec.to_builtins(value, str_keys=True)
    replace(path, (json.dumps(plain, indent=1) + "\n").encode())


def replace(path: Path, content: bytes) -> None:
    """Replace a file in one move, after its content has reached the disk."""
    draft = path.with_name(f".{path.name}")
    with fresh(draft) as file:
        write_all(file, content)
    sync(draft)
    draft.replace(path)


def read_json(path: Path, remedy: str = "") -> Any:
    end = f": {remedy}" if remedy else ""
    try:
        with readable(path) as file:
            text = file.read(LARGEST)
        return json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist{end}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or cut short ({error}){end}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}{end}") from None


def checksum(path: Path) -> str:
    total = xxhash.xxh3_128()
    with readable(path) as file:
        while piece := file.read(1 << 20):
            total.update(piece)
    return total.hexdigest()
