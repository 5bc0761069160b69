"""A folder that is one user's alone, with the files through which the ranks of a run meet.

    private folder/NAME.socket  where they connect
    private folder/NAME.pass    the token, and what the script of rank 0 is about
    private folder/NAME.lock    held by whoever listens

The folder is the user's alone (mode 0700), and NAME says which run it is.
"""

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from offbeat.errors import ConfigError

PARTS = ("socket", "pass", "lock")


class Credentials(msgspec.Struct, forbid_unknown_fields=True):
    """What only this user's processes can read."""

    token: bytes
    sketch: dict[str, Any]


def private_folder() -> int:
    """A handle of a folder that no other user can look into."""
    mine = os.geteuid()
    places = [Path(tempfile.gettempdir()) / f"offbeat-{mine}"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(os.environ["XDG_RUNTIME_DIR"]) / "offbeat")
    for place in places:
        try:
            with suppress(FileExistsError):
                place.mkdir(0o700)
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        found = os.fstat(folder)
        if found.st_uid == mine and not stat.S_IMODE(found.st_mode) & 0o077:
            return folder
        os.close(folder)
    raise ConfigError(
        f"the ranks of this run meet in a folder that only this user may enter, and neither of "
        f"{', '.join(map(str, places))} can be one: remove it, or set TMPDIR to a folder of your "
        "own"
    )


class RendezvousFiles:
    """The files of one meeting; paths go through the folder's handle, so that none is too long."""

    def __init__(self, folder: int, name: str):
        self.folder, self.name = folder, name

    def path(self, part: str) -> str:
        return f"/proc/self/fd/{self.folder}/{self.name}.{part}"

    def remove(self, parts: tuple[str, ...] = PARTS) -> None:
        for part in parts:  # the lock last: until then nobody else makes new ones
            with suppress(FileNotFoundError):
                os.unlink(self.path(part))

    def lock(self, make: bool = True) -> int | None:
        """A handle that is locked; None while another holds it, or if there is none to lock."""
        while True:
            try:
                how = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if make else 0)
                lock = os.open(self.path("lock"), how, 0o600)
            except FileNotFoundError:
                return None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(self.path("lock"))):
                    return lock
            except FileNotFoundError:
                pass  # its last holder has removed it meanwhile
            except BlockingIOError:
                os.close(lock)
                return None
            os.close(lock)

    def write_pass(self, found: Credentials) -> None:
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.path("pass"), how, 0o600), "wb") as file:
            file.write(msgspec.msgpack.encode(found))

    def read_pass(self) -> Credentials:
        with open(self.path("pass"), "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=Credentials)


def sweep(folder: int) -> None:
    """Remove what runs have left that were killed while they listened."""
    for entry in os.listdir(folder):
        name, _, part = entry.rpartition(".")
        if part != "lock":
            continue
        files = RendezvousFiles(folder, name)
        lock = files.lock(make=False)
        if lock is not None:
            files.remove()
            os.close(lock)
