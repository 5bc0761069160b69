"""Reaching a store: an address, a connection that both ends have proved themselves over."""

import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.transport.handshake import Refused, introduce
from offbeat.transport.tls import fingerprint, worker_context

PORT = 7077  # where a store listens if nobody says otherwise
SECONDS = 10.0  # that a connection may take to be made


@dataclass(frozen=True)
class Address:
    """Where a store listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> "Address":
        """From `host:port`, `host`, or `[::1]:port`."""
        host, port = text, str(PORT)
        if text.startswith("["):
            host, _, rest = text[1:].partition("]")
            port = rest.removeprefix(":") or port
        elif text.count(":") == 1:
            host, _, port = text.partition(":")
        number = int(port) if port.isascii() and port.isdigit() else -1
        try:
            known = bool(host.encode("idna"))
        except UnicodeError:
            known = False
        if not known or not 0 <= number < 1 << 16:
            raise ConfigError(
                f"{text!r} is no address: write a host and a port, such as 192.168.1.5:{PORT}"
            )
        return cls(host, number)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def stays_here(self) -> bool:
        """Whether what goes there does not leave this machine."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True)
class Dialer:
    """Makes connections to one store; `tls` None means where they leave this machine."""

    address: Address
    token: bytes
    tls: bool | None = None
    authority: Path | None = None

    def connect(
        self, seconds: float = SECONDS, reach: float | None = None
    ) -> tuple[socket.socket, float]:
        """A connection that both ends have proved themselves over, and its round trip in seconds.

        An answer may take so many `seconds`, and the first one only `reach`, if that is given.
        Raises OSError if nothing listens there or answers, Refused if that is not the store.
        """
        wire = socket.create_connection((self.address.host, self.address.port), reach or seconds)
        try:
            wire.settimeout(seconds)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seen = b""
            if self.encrypts:
                wire = self._encrypted(wire)
                shown = wire.getpeercert(binary_form=True)
                seen = fingerprint(shown or b"")
            start = time.perf_counter()
            introduce(wire, self.token, seen)
            return wire, time.perf_counter() - start
        except BaseException:
            wire.close()
            raise

    @property
    def encrypts(self) -> bool:
        return not self.address.stays_here if self.tls is None else self.tls

    def _encrypted(self, wire: socket.socket) -> ssl.SSLSocket:
        context = worker_context(self.authority)
        try:
            return context.wrap_socket(wire, server_hostname=self.address.host)
        except ssl.SSLCertVerificationError as error:
            raise Refused(
                f"the certificate of {self.address} does not fit: {error.verify_message}; compare "
                "--authority with the one that signed it, and the name that it is for"
            ) from error
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise ConnectionResetError("the connection has broken off") from error
        except ssl.SSLError as error:
            raise Refused(
                f"{self.address} does not speak TLS as offbeat does ({error.reason}): is it a "
                "store that was started with --no-tls, or something else?"
            ) from error
