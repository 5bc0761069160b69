"""How two ends of a connection prove to each other that they know the run's token.

    worker   MAGIC, a random number
    store    a random number, its proof
    worker   its proof

A proof is an HMAC over who says it, both numbers and the certificate that TLS has shown, so that it
serves nobody else, at no other time, and not over a connection that somebody sits in the middle of.
All of it has a fixed length, and nothing else is looked at before both have proved what they know.
Then come small messages, each with its length before it.
"""

import hmac
import secrets
import socket
import struct
from typing import Any

import msgspec

from offbeat.errors import ConfigError

MAGIC = b"offbeat\x01"
NUMBER = 32  # bytes of a random number, and of a proof
HELLO = len(MAGIC) + NUMBER
LONGEST = 1 << 18  # bytes of a request
LARGEST = 1 << 24  # bytes of an answer, which may describe a model tensor by tensor
SHORTEST = 16  # letters of a token
TLS_ONLY, UNKNOWN = b"tls?", b"no!!"  # what a store says to one that it does not let in
REFUSAL = 4  # bytes of that
NO_TLS = b"\x15\x03\x03\x00\x02\x02\x28"  # the same in TLS: handshake failure

_LENGTH = struct.Struct("!I")


class Refused(ConfigError):
    """The store lets this worker not in, and has said why."""


class TooLate(Refused):
    """The run is over."""


# ---------------------------------------------------------------- the token


def check_token(token: bytes, where: str) -> bytes:
    """A token as it was read from a file or a variable."""
    token = token.strip()
    if len(token) < SHORTEST:
        raise ConfigError(
            f"the token in {where} has {len(token)} letters, and whoever guesses it is let in: use "
            f"{SHORTEST} or more, such as offbeat token prints"
        )
    return token


def new_token() -> str:
    """One that nobody guesses."""
    return secrets.token_urlsafe(32)


def prove(token: bytes, who: bytes, *numbers: bytes) -> bytes:
    """Only who knows the token can say this; all parts have a fixed length but the last."""
    return hmac.digest(token, b"\0".join((MAGIC, who, *numbers)), "sha256")


class Introduction:
    """The store's side of it: `wanted` bytes are read and given to `hear`, until it is `proven`."""

    def __init__(self, token: bytes, certificate: bytes = b""):
        self.token, self.certificate = token, certificate
        self.mine, self.theirs = secrets.token_bytes(NUMBER), b""
        self.wanted = HELLO
        self.proven = False

    def hear(self, said: bytes) -> bytes | None:
        """What to answer; None to one that does not know the token, or speaks otherwise."""
        if not self.theirs:
            if not hmac.compare_digest(said[: len(MAGIC)], MAGIC):
                return None
            self.theirs, self.wanted = said[len(MAGIC) :], NUMBER
            return self.mine + self._proof(b"store")
        if not hmac.compare_digest(said, self._proof(b"worker")):
            return None
        self.proven, self.wanted = True, 0
        return b""

    def _proof(self, who: bytes) -> bytes:
        return prove(self.token, who, self.theirs, self.mine, self.certificate)


def introduce(wire: socket.socket, token: bytes, certificate: bytes = b"") -> None:
    """The worker's side of it, over a socket that waits."""
    mine = secrets.token_bytes(NUMBER)
    wire.sendall(MAGIC + mine)
    first = read(wire, REFUSAL)
    if first == TLS_ONLY:
        raise Refused("the store speaks TLS alone: leave tls=False (--no-tls) out")
    if first == UNKNOWN:
        raise Refused("what listens there is a store of another version of offbeat")
    said = first + read(wire, 2 * NUMBER - REFUSAL)
    theirs, proof = said[:NUMBER], said[NUMBER:]
    if not hmac.compare_digest(proof, prove(token, b"store", mine, theirs, certificate)):
        raise Refused(
            "what listens there does not know the token of this run, or somebody sits between: "
            "compare the token files of both sides"
        )
    wire.sendall(prove(token, b"worker", mine, theirs, certificate))


# ---------------------------------------------------------------- what they say then


class Request(msgspec.Struct, array_like=True, tag=True, forbid_unknown_fields=True):
    """From a worker's host."""


class AskTerms(Request):
    """What is this run, and how is it done?"""


class Enter(Request):
    """A worker comes, with a new link of so many connections, of which this one is the first.

    It would like to have this `number`, and nothing else if it `insists`. `instead` says that the
    process that had it is gone.
    """

    link: bytes
    connections: int
    number: int
    insists: bool
    instead: bool
    sketch: bytes  # a hash of what its script is about
    difference: str  # where that differs from the store's, in words
    host: str  # what its machine is called
    round_trip: float  # seconds, as it has measured


class Attach(Request):
    """A further connection of a link, or one in the place of one that has broken."""

    link: bytes
    index: int
    received: int  # bytes that its last one has brought


class Echo(Request):
    """To measure with."""

    filling: bytes
    wanted: int = 0  # bytes of the answer


class Meet(Request):
    """From another worker, to one that listens: a member of a group wants to add up with it."""

    group: int
    worker: int
    number: bytes  # a random one
    proof: bytes  # that it has been told of the group


class Answer(msgspec.Struct, array_like=True, tag=True):
    """From the store."""


class Terms(Answer):
    """How the run is done, and what the store's own script is about."""

    settings: dict[str, Any]
    sketch: dict[str, Any]
    now: float  # by the store's clock, in seconds since 1970


class Entered(Answer):
    """The worker is in, under this number."""

    number: int


class Attached(Answer):
    """The connection is taken; so many bytes had come over the one before."""

    received: int


class NoSuchLink(Answer):
    """The store knows nothing of this link, or no more: come anew."""


class TurnedAway(Answer):
    """Somebody of this run that cannot take part."""

    reason: str


class NotYet(Answer):
    """There is no place; there may be one within patience, since one worker is out of reach."""


class RunEnded(Answer):
    """There is nothing more to do for anybody."""


class Echoed(Answer):
    """As many bytes as were wanted."""

    filling: bytes


Requests = AskTerms | Enter | Attach | Echo | Meet
Answers = Terms | Entered | Attached | NoSuchLink | TurnedAway | NotYet | RunEnded | Echoed

_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Requests).decode
_answer = msgspec.msgpack.Decoder(Answers).decode


def packet(message: Request | Answer) -> bytes:
    told = _encode(message)
    return _LENGTH.pack(len(told)) + told


def length_of(header: bytes, most: int = LONGEST) -> int:
    """How long a message is; 0 if it is none."""
    (length,) = _LENGTH.unpack(header)
    return int(length) if length <= most else 0


def request_in(told: bytes) -> Requests | None:
    """What a worker's host asks, if it is that."""
    try:
        found: Requests = _request(told)
    except msgspec.MsgspecError:
        return None
    return found


def ask(wire: socket.socket, request: Request) -> Answers:
    """Ask a store that has proved itself; waits for its answer."""
    wire.sendall(packet(request))
    length = length_of(read(wire, _LENGTH.size), LARGEST)
    if not length:
        raise Refused("the store has answered with something that is no message")
    try:
        found: Answers = _answer(read(wire, length))
    except msgspec.MsgspecError as error:
        raise Refused(f"the store has answered with something else: {error}") from error
    if isinstance(found, RunEnded):
        raise TooLate("the run is over: it has ended before this worker was in")
    if isinstance(found, TurnedAway):
        raise Refused(found.reason)
    return found


def read(wire: socket.socket, count: int) -> bytes:
    """Exactly so many bytes."""
    found = bytearray(count)
    view = memoryview(found)
    while len(view):
        came = wire.recv_into(view)
        if not came:
            raise ConnectionResetError("the other end has closed the connection")
        view = view[came:]
    return bytes(found)
