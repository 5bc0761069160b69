"""Who comes in from the network: only those that prove that they know the run's token.

One thread looks after all that have connected and not proved anything yet. None of them can keep
it, or another one, waiting: each has its time, and there are only so many of them.
"""

import errno
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from offbeat.errors import ConfigError
from offbeat.transport.dial import Address
from offbeat.transport.handshake import (
    HELLO,
    MAGIC,
    NO_TLS,
    TLS_ONLY,
    UNKNOWN,
    Answer,
    Attach,
    Enter,
    Introduction,
    Meet,
    Requests,
    length_of,
    packet,
    request_in,
)
from offbeat.transport.wakeup import Wakeup

PENDING = 128  # connections that have not proved anything yet
HEADER = 4  # bytes that say how long a message is
TLS_BEGINS = b"\x16"  # the first byte that a client of TLS sends
FIRST = 1 << 14  # bytes that it may say at first
SLOWEST = 10.0  # seconds that a proof may take
SHORT = 0.05  # seconds until one looks again whether something is free

# What to answer to a request. None: the connection is somebody else's from here on.
Respond = Callable[[Requests, socket.socket], Answer | None]


def listen(address: Address) -> socket.socket:
    """A socket that workers can connect to."""
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(PENDING)
            listening.setblocking(False)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"nobody can listen at {address} ({error.strerror}): name an address of this machine "
            "(ip address shows them) and a port that is free"
        ) from error
    return listening


@dataclass
class Security:
    """What a store asks of those that come: the token, and TLS if there is a context."""

    token: bytes
    context: ssl.SSLContext | None = None
    fingerprint: bytes = b""


@dataclass
class Candidate:
    """A connection, and how far it has come."""

    wire: socket.socket
    until: float
    introduction: Introduction
    encrypting: bool = False  # whether TLS is being negotiated
    began: bool = False  # whether it is known if it speaks TLS
    wanted: int = HELLO
    came: bytearray = field(default_factory=bytearray)
    length: int = 0  # of the message that is coming, once that is known
    asks: bool = False  # whether it has proved itself


class Gone(Exception):
    """The connection is closed, or to be closed, for this reason."""


class Listener:
    """Lets in who may come in, and counts the others by reason."""

    def __init__(
        self, listening: socket.socket, security: Security, respond: Respond, patience: float
    ):
        self.listening, self.security, self.respond = listening, security, respond
        self.seconds = min(patience, SLOWEST)
        self.refused: Counter[str] = Counter()
        self.candidates: dict[socket.socket, Candidate] = {}
        self.wakeup, self.open = Wakeup(), True
        self.selector = selectors.DefaultSelector()
        self.selector.register(listening, selectors.EVENT_READ)
        self.selector.register(self.wakeup, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._work, name="listener", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """Nobody else comes in."""
        self.open = False
        self.wakeup.wake()
        self.thread.join()
        for candidate in list(self.candidates.values()):
            self._end(candidate)
        self.selector.close()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        while self.open:
            now = time.monotonic()
            until = min((one.until for one in self.candidates.values()), default=None)
            left = None if until is None else max(0.0, until - now)
            found = self.selector.select(left)
            # Whoever's time runs out while others are dealt with has yet to be looked at.
            now = time.monotonic()
            for key, _ in found:
                wire = key.fileobj
                if wire is self.listening:
                    self._meet()
                elif isinstance(wire, socket.socket) and wire in self.candidates:
                    self._hear(self.candidates[wire])
            for late in [one for one in self.candidates.values() if one.until <= now]:
                self._refuse(late, "said nothing for too long")

    def _meet(self) -> None:
        try:
            wire, _ = self.listening.accept()
        except OSError as error:  # it has gone again, or there are no more handles
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._make_room()
            return
        if len(self.candidates) == PENDING:
            self._make_room()
        wire.setblocking(False)
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        introduction = Introduction(self.security.token, self.security.fingerprint)
        candidate = Candidate(wire, time.monotonic() + self.seconds, introduction)
        self.candidates[wire] = candidate
        self.selector.register(wire, selectors.EVENT_READ)

    def _make_room(self) -> None:
        """The oldest goes, one that has proved nothing first."""
        if not self.candidates:
            time.sleep(SHORT)  # the handles are with others, and may be free then
            return
        unproven = [one for one in self.candidates.values() if not one.asks]
        self._refuse(unproven[0] if unproven else next(iter(self.candidates.values())), "many")

    def _hear(self, candidate: Candidate) -> None:
        try:
            if not candidate.began:
                self._begin(candidate)
            if candidate.encrypting:
                self._encrypt(candidate)
            while candidate.wire in self.candidates:
                self._read(candidate)
                self._understand(candidate)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except Gone as gone:
            self._refuse(candidate, str(gone))
        except OSError:
            self._refuse(candidate, "broke off")

    def _begin(self, candidate: Candidate) -> None:
        """Whether it speaks TLS shows in its first byte."""
        first = candidate.wire.recv(1, socket.MSG_PEEK)
        if not first:
            raise Gone("said nothing")
        context = self.security.context
        if first == TLS_BEGINS and context is not None:
            plain = candidate.wire
            self.selector.unregister(plain)
            del self.candidates[plain]
            candidate.wire = context.wrap_socket(
                plain, server_side=True, do_handshake_on_connect=False
            )
            candidate.encrypting = True
            self.candidates[candidate.wire] = candidate
            self.selector.register(candidate.wire, selectors.EVENT_READ)
        elif first != MAGIC[:1] or context is not None:
            candidate.wire.recv(FIRST)  # what is left unread would take the answer with it
            unknown = NO_TLS if first == TLS_BEGINS else UNKNOWN
            candidate.wire.send(TLS_ONLY if first == MAGIC[:1] else unknown)
            raise Gone("spoke otherwise")
        candidate.began = True

    def _encrypt(self, candidate: Candidate) -> None:
        wire = candidate.wire
        assert isinstance(wire, ssl.SSLSocket)
        try:
            wire.do_handshake()
        except ssl.SSLWantWriteError:
            self.selector.modify(wire, selectors.EVENT_READ | selectors.EVENT_WRITE)
            raise
        self.selector.modify(wire, selectors.EVENT_READ)
        candidate.encrypting = False

    def _read(self, candidate: Candidate) -> None:
        """Until all is there that is wanted next; raises BlockingIOError before."""
        while len(candidate.came) < candidate.wanted:
            some = candidate.wire.recv(candidate.wanted - len(candidate.came))
            if not some:
                raise Gone("left" if candidate.asks else "broke off")
            candidate.came += some

    def _understand(self, candidate: Candidate) -> None:
        said = bytes(candidate.came)
        candidate.came.clear()
        if not candidate.asks:
            self._introduced(candidate, said)
        elif not candidate.length:
            candidate.length = candidate.wanted = length_of(said)
            if not candidate.length:
                raise Gone("sent garbage")
        else:
            candidate.length, candidate.wanted = 0, HEADER
            self._answer(candidate, said)

    def _introduced(self, candidate: Candidate, said: bytes) -> None:
        introduction = candidate.introduction
        answer = introduction.hear(said)
        if answer is None:
            if not said.startswith(MAGIC) and len(said) == HELLO:
                candidate.wire.send(UNKNOWN)
            raise Gone("did not know the token")
        if answer:
            candidate.wire.send(answer)
        candidate.wanted = introduction.wanted
        if introduction.proven:
            candidate.asks, candidate.wanted = True, HEADER

    def _answer(self, candidate: Candidate, said: bytes) -> None:
        request = request_in(said)
        if request is None:
            raise Gone("sent garbage")
        wire = candidate.wire
        if isinstance(request, Enter | Attach | Meet):  # it is about to be another thread's
            self._let_go(candidate)
        answer = self.respond(request, wire)
        if answer is None:
            return
        # A proven one may take its time; what is sent is small, and it has read all before.
        candidate.until = time.monotonic() + self.seconds
        wire.setblocking(True)
        wire.settimeout(self.seconds)
        wire.sendall(packet(answer))
        if wire in self.candidates:
            wire.setblocking(False)
        else:
            wire.close()

    # ------------------------------------------------------------ the end of one

    def _let_go(self, candidate: Candidate) -> None:
        if self.candidates.pop(candidate.wire, None) is not None:
            self.selector.unregister(candidate.wire)

    def _refuse(self, candidate: Candidate, why: str) -> None:
        if why != "left":
            self.refused[why] += 1
        self._end(candidate)

    def _end(self, candidate: Candidate) -> None:
        self._let_go(candidate)
        candidate.wire.close()
