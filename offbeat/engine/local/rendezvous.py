"""Where the ranks of torchrun meet: only processes of the same user that know a token come in."""

import hashlib
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from offbeat.engine.local.private_folder import Credentials, RendezvousFiles, private_folder, sweep
from offbeat.errors import ConfigError, RunError

LARGEST = 1 << 14  # bytes of a packet
PENDING = 64  # connections that have not proved anything yet
TELL = 2000  # letters of a difference
TOKEN = 32  # bytes
TRY_AGAIN = 0.02  # seconds until a socket that is not there yet is tried again


class Packet(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """What goes through the socket; nothing else is taken."""


class Challenge(Packet):
    """The host begins: whoever knows the token can answer for this number."""

    number: bytes


class RankRequest(Packet):
    """A rank wants to come in; `proof` is over all the rest and the challenge."""

    rank: int
    number: bytes  # the host has to answer for that one
    sketch: bytes  # a hash of what its script is about
    difference: str  # where it differs from rank 0's, in words
    proof: bytes = b""


class RankAdmission(Packet):
    """Come in: the handles that come with it are the run's memory and a wire to the server."""

    proof: bytes


class Refusal(Packet):
    """Somebody of this run that cannot take part."""

    reason: str
    proof: bytes


class RankCandidate(NamedTuple):
    """One that has proved that it belongs to the run."""

    rank: int
    wire: socket.socket
    request: RankRequest
    challenge: bytes


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(RankRequest).decode
decode_challenge = msgspec.msgpack.Decoder(Challenge).decode
decode_answer = msgspec.msgpack.Decoder(RankAdmission | Refusal).decode


def plain(sketch: Mapping[str, Any]) -> dict[str, Any]:
    """A sketch as it comes out of a file."""
    return msgspec.json.decode(msgspec.json.encode(sketch), type=dict[str, Any])


def hash_of(sketch: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(msgspec.json.encode(sketch, order="deterministic")).digest()


def prove(token: bytes, who: bytes, *what: bytes) -> bytes:
    """Only who knows the token can say this; the answer to one question serves for no other."""
    return hmac.digest(token, encode([who, *what]), "sha256")


def _proof_of(token: bytes, request: RankRequest, challenge: bytes) -> bytes:
    bare = msgspec.structs.replace(request, proof=b"")
    return prove(token, b"rank", challenge, encode(bare))


def user_of(wire: socket.socket) -> int:
    """Who is at the other end, as the kernel knows it."""
    told = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    return int(struct.unpack("iII", told)[1])


# ---------------------------------------------------------------- the side of rank 0


class Rendezvous:
    """Open until all ranks are in. Whoever has not proved anything keeps nobody else waiting."""

    def __init__(self, name: str, sketch: Mapping[str, Any], patience: float):
        """After `patience` seconds a connection that says nothing is closed."""
        self.patience, self.sketch = patience, hash_of(plain(sketch))
        self.token = secrets.token_bytes(TOKEN)
        self.refused: Counter[str] = Counter()
        self.pending: dict[socket.socket, tuple[bytes, float]] = {}  # challenge and deadline
        self.is_open = True
        self.files = RendezvousFiles(private_folder(), name)
        try:
            self.lock = self._lock(time.monotonic() + patience)
        except BaseException:
            os.close(self.files.folder)
            raise
        self.listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self.selector = selectors.DefaultSelector()
        try:
            sweep(self.files.folder)
            self.files.remove(("socket", "pass"))  # of a run of this name that was killed
            self.files.write_pass(Credentials(self.token, plain(sketch)))
            self.listening.bind(self.files.path("socket"))
            self.listening.listen(PENDING)
        except BaseException:
            self.close()
            raise
        self.selector.register(self.listening, selectors.EVENT_READ)

    def _lock(self, until: float) -> int:
        """One that has just been killed may hold it for a moment."""
        while (lock := self.files.lock()) is None:
            if time.monotonic() > until:
                raise ConfigError(
                    "another run of this user with the same id and port is about to start: give "
                    "torchrun another --rdzv-id or --master-port"
                )
            time.sleep(TRY_AGAIN)
        return lock

    def close(self) -> None:
        """Nobody else comes in, and nothing is left behind."""
        if self.is_open:
            self.files.remove()
            self.forget()

    def forget(self) -> None:
        """The socket is another process's to close."""
        if not self.is_open:
            return
        self.is_open = False
        for candidate in self.pending:
            candidate.close()
        self.pending.clear()
        self.selector.close()
        self.listening.close()
        os.close(self.lock)
        os.close(self.files.folder)

    def admit(self) -> RankCandidate:
        """Wait for the next one that belongs to this run."""
        while True:
            now = time.monotonic()
            left = min((until for _, until in self.pending.values()), default=None)
            for key, _ in self.selector.select(None if left is None else max(0.0, left - now)):
                wire = key.fileobj
                assert isinstance(wire, socket.socket)
                if wire is self.listening:
                    self._meet()
                elif (candidate := self._hear(wire)) is not None:
                    return candidate
            now = time.monotonic()
            for wire in [one for one, (_, until) in self.pending.items() if until <= now]:
                self._refuse(wire, f"it said nothing for {self.patience:g} s")

    def _meet(self) -> None:
        try:
            candidate, _ = self.listening.accept()
        except OSError:  # it has gone again
            return
        candidate.setblocking(False)
        user = user_of(candidate)
        if user != os.geteuid():
            self._refuse(candidate, f"it is of another user ({user})")
            return
        if len(self.pending) == PENDING:
            self._refuse(next(iter(self.pending)), "too many others came before it had said who")
        challenge = secrets.token_bytes(TOKEN)
        self.pending[candidate] = (challenge, time.monotonic() + self.patience)
        self.selector.register(candidate, selectors.EVENT_READ)
        with suppress(OSError):  # one that is gone is heard of as one that said nothing
            candidate.send(encode(Challenge(challenge)))

    def _hear(self, wire: socket.socket) -> RankCandidate | None:
        if wire not in self.pending:  # refused in this very turn
            return None
        challenge, _ = self.pending[wire]
        try:
            said = wire.recv(LARGEST + 1)
        except BlockingIOError:
            return None
        except OSError:
            said = b""
        if not said or len(said) > LARGEST:
            self._refuse(wire, "it said too much" if said else "it left without a word")
            return None
        try:
            request = decode_request(said)
        except msgspec.MsgspecError:
            self._refuse(wire, "what it said makes no sense")
            return None
        if not hmac.compare_digest(request.proof, _proof_of(self.token, request, challenge)):
            self._refuse(wire, "it does not know the token of this run")
            return None
        del self.pending[wire]
        self.selector.unregister(wire)
        wire.setblocking(True)
        return RankCandidate(request.rank, wire, request, challenge)

    def _refuse(self, wire: socket.socket, why: str) -> None:
        """Close a connection, and say so the first time that there is this reason."""
        if self.pending.pop(wire, None) is not None:
            self.selector.unregister(wire)
        self.refused[why] += 1
        wire.close()
        if self.refused[why] == 1:
            print(
                f"offbeat: refused a connection to the ranks of this run: {why}",
                file=sys.stderr,
                flush=True,
            )

    def let_in(self, candidate: RankCandidate, handles: list[int]) -> bool:
        """Hand over the handles; False if the candidate has died meanwhile."""
        answer = encode(RankAdmission(self._answer(b"come in", candidate)))
        try:
            socket.send_fds(candidate.wire, [answer], handles)
        except OSError:
            return False
        return True

    def turn_away(self, candidate: RankCandidate, reason: str) -> None:
        answer = encode(Refusal(reason, self._answer(reason.encode(), candidate)))
        with suppress(OSError):
            candidate.wire.send(answer)

    def _answer(self, what: bytes, candidate: RankCandidate) -> bytes:
        return prove(self.token, b"host", candidate.request.number, candidate.challenge, what)


# ---------------------------------------------------------------- the side of every rank


Differ = Callable[[Mapping[str, Any], Mapping[str, Any]], str | None]


class RendezvousClient:
    """A rank on its way in."""

    def __init__(self, name: str, rank: int, sketch: Mapping[str, Any], differ: Differ):
        """`differ` says in words where rank 0's sketch and this one differ."""
        self.rank, self.sketch, self.differ = rank, plain(sketch), differ
        self.files = RendezvousFiles(private_folder(), name)

    def enter(
        self, seconds: float, alive: Callable[[], None] = lambda: None
    ) -> tuple[int, socket.socket]:
        """The run's memory and a wire to the server; `alive` raises if there never will be any."""
        until = time.monotonic() + seconds
        try:
            while True:
                alive()
                try:
                    return self._enter(until)
                except (OSError, msgspec.MsgspecError):
                    # Not open yet, or one that is being closed, or a leftover of an earlier run.
                    if time.monotonic() > until:
                        raise RunError(
                            f"rank 0 has let nobody in for {seconds:g} s: has it come to its loop?"
                        ) from None
                time.sleep(TRY_AGAIN)
        finally:
            os.close(self.files.folder)

    def _enter(self, until: float) -> tuple[int, socket.socket]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as wire:
            wire.settimeout(max(TRY_AGAIN, until - time.monotonic()))
            wire.connect(self.files.path("socket"))
            if user_of(wire) != os.geteuid():
                raise ConnectionRefusedError
            challenge = decode_challenge(wire.recv(LARGEST)).number
            found = self.files.read_pass()  # written before the socket was opened
            number = secrets.token_bytes(TOKEN)
            different = ""
            if hash_of(found.sketch) != hash_of(self.sketch):
                words = self.differ(found.sketch, self.sketch)
                different = (words or "they describe it differently")[:TELL]
            request = RankRequest(self.rank, number, hash_of(self.sketch), different)
            request.proof = _proof_of(found.token, request, challenge)
            wire.send(encode(request))
            said, handles, _, _ = socket.recv_fds(wire, LARGEST, 2)
            try:
                answer = decode_answer(said)
                what = answer.reason.encode() if isinstance(answer, Refusal) else b"come in"
                proof = prove(found.token, b"host", number, challenge, what)
                if not hmac.compare_digest(answer.proof, proof):
                    raise ConnectionRefusedError
                if isinstance(answer, Refusal):
                    raise ConfigError(answer.reason)
                memory, mine = handles
            except BaseException:
                for handle in handles:
                    os.close(handle)
                raise
            return memory, socket.socket(fileno=mine)


def gone(handle: int) -> bool:
    """Whether the process of this handle has ended."""
    ending = select.poll()
    ending.register(handle, select.POLLIN)
    return bool(ending.poll(0))
