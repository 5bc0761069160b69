"""Where the members of a group find each other: a file in memory that no other user can open."""

import fcntl
import hmac
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

HOST = "127.0.0.1"
NAME = "offbeat keys"
PROOF = 32  # bytes
LOOK_AGAIN = 0.005  # seconds


class KeyFile:
    """The server's: a fresh file for each group, always under the same number.

    So one that a killed member has left half written ends with its group, and one that comes late
    finds no other file of this process under that number.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create(NAME)
        self.secret = secrets.token_bytes(PROOF)

    @property
    def path(self) -> str:
        """For other processes of this user; the kernel lets nobody else go there."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def renew(self) -> None:
        fresh = os.memfd_create(NAME)
        os.dup2(fresh, self.file, inheritable=False)
        os.close(fresh)
        self.secret = secrets.token_bytes(PROOF)


class SharedKeys(dist.Store):  # type: ignore[misc, name-defined]
    """What gloo asks of a store of keys, over such a file: lines of JSON that are only added to."""

    def __init__(self, path: str, seconds: float):
        super().__init__()
        self.seconds = seconds
        self.file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        # The number of a process that is gone may be another one's by now.
        if not os.readlink(f"/proc/self/fd/{self.file}").startswith(f"/memfd:{NAME}"):
            self.close()
            raise ConnectionError("the server is gone")

    def close(self) -> None:
        file, self.file = self.file, -1
        os.close(file)

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else value
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            os.write(self.file, msgspec.json.encode((key, value)) + b"\n")
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._all()[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not set(keys) <= self._all().keys():
            if time.monotonic() > until:
                raise TimeoutError(f"the other members have not come within {seconds:g} s")
            time.sleep(LOOK_AGAIN)

    def _all(self) -> dict[str, bytes]:
        size = os.fstat(self.file).st_size
        *lines, _ = os.pread(self.file, size, 0).split(b"\n")  # the last one may not be whole
        return dict(msgspec.json.decode(line, type=tuple[str, bytes]) for line in lines)


class Keys:
    """A member's: what it needs to find the others, and to know that it is them."""

    def __init__(self, path: str, secret: bytes, seconds: float):
        self.path, self.secret, self.seconds = path, secret, seconds
        self.store: SharedKeys | None = None  # gloo does not keep it alive

    def connect(self, number: int, rank: int, size: int) -> Any:
        """Wait for the other members of group `number`."""
        self.store = SharedKeys(self.path, self.seconds)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
        options._timeout = timedelta(seconds=self.seconds)
        prefix = dist.PrefixStore(str(number), self.store)  # type: ignore[attr-defined]
        gloo = dist.ProcessGroupGloo(prefix, rank, size, options)
        self._prove(gloo, rank, size)
        return gloo

    def close(self) -> None:
        if self.store is not None:
            self.store.close()

    def _prove(self, gloo: Any, rank: int, size: int) -> None:
        """Anybody on this machine can connect to gloo's ports; members alone know the secret."""
        said = b"".join(self._proof(rank, other) for other in range(size))
        heard = torch.empty(size * PROOF, dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        each = [PROOF] * size
        gloo.alltoall_base(heard, mine, each, each, dist.AllToAllOptions()).wait()
        for other, proof in enumerate(heard.view(size, PROOF)):
            if not hmac.compare_digest(bytes(proof.tolist()), self._proof(other, rank)):
                raise ConnectionError(f"who connected as member {other} is none")

    def _proof(self, one: int, other: int) -> bytes:
        """What `one` says to `other`, which is of no use for anything else."""
        return hmac.digest(self.secret, f"{one} to {other}".encode(), "sha256")
