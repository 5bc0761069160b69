"""Certificates: of the run, of the user, and of one who sits in the middle."""

import datetime
import ipaddress
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from offbeat.errors import ConfigError
from offbeat.transport.dial import Address, Dialer
from offbeat.transport.handshake import Introduction, Refused, read
from offbeat.transport.tls import Certificate, fingerprint, store_context, worker_context

TOKEN = b"a token of these tests"
LONG = 20.0
PEM = serialization.Encoding.PEM
PLAIN = serialization.NoEncryption()


class Signed:
    """A certificate for `host`, signed by `authority`, or one that signs others."""

    def __init__(self, host: str | None, authority: "Signed | None" = None):
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host or "authority")])
        now = datetime.datetime.now(datetime.UTC)
        signer = authority or self
        made = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(signer.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=host is None, path_length=None), True)
        )
        made = made.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), False
        ).add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()), False
        )
        if host is None:
            usage = dict.fromkeys(
                (
                    *("content_commitment", "key_encipherment", "data_encipherment"),
                    *("key_agreement", "encipher_only", "decipher_only"),
                ),
                False,
            )
            usage |= {"digital_signature": True, "key_cert_sign": True, "crl_sign": True}
            made = made.add_extension(x509.KeyUsage(**usage), True)
        else:
            names: list[Any] = [x509.DNSName(host)]
            with suppress(ValueError):
                names = [x509.IPAddress(ipaddress.ip_address(host))]
            made = made.add_extension(x509.SubjectAlternativeName(names), False)
        self.certificate = made.sign(signer.key, hashes.SHA256())

    def files(self, folder: Path, secret: bytes = b"") -> Certificate:
        folder.mkdir()
        how = serialization.BestAvailableEncryption(secret) if secret else PLAIN
        kind = serialization.PrivateFormat.PKCS8
        (folder / "cert.pem").write_bytes(self.certificate.public_bytes(PEM))
        (folder / "key.pem").write_bytes(self.key.private_bytes(PEM, kind, how))
        return Certificate.of(f"{folder / 'cert.pem'},{folder / 'key.pem'}")


class Server:
    """Speaks TLS with this certificate, and introduces itself over that one."""

    def __init__(self, context: ssl.SSLContext, shown: bytes, token: bytes = TOKEN):
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.listening.settimeout(LONG)
        self.context, self.shown, self.token = context, shown, token
        self.let_in = 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        self.address = Address(*self.listening.getsockname()[:2])

    def _work(self) -> None:
        while True:
            try:
                wire, _ = self.listening.accept()
            except OSError:
                return
            with suppress(OSError), wire:
                wire.settimeout(LONG)
                self._meet(wire)

    def _meet(self, wire: socket.socket) -> None:
        with self.context.wrap_socket(wire, server_side=True) as safe:
            introduction = Introduction(self.token, self.shown)
            while introduction.wanted:
                answer = introduction.hear(read(safe, introduction.wanted))
                if answer is None:
                    return
                safe.sendall(answer)
            self.let_in += introduction.proven

    def close(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self.thread.join(LONG)
        assert not self.thread.is_alive()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for one in made:
        one.close()


def reaches(server: Server, authority: Path | None = None) -> None:
    wire, _ = Dialer(server.address, TOKEN, True, authority).connect(LONG)
    with wire:
        assert isinstance(wire, ssl.SSLSocket)
        assert wire.version() == "TLSv1.3"


# ---------------------------------------------------------------- made for the run


def test_a_certificate_is_made_for_the_run_and_no_file_of_it_stays(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    context, shown = store_context(None)
    assert os.listdir(tmp_path) == []
    servers.append(Server(context, shown))
    reaches(servers[0])
    _, another = store_context(None)
    assert another != shown  # each run has its own


def test_one_in_the_middle_is_found_out(servers: list[Server]) -> None:
    """It cannot show the store's certificate, and passes on all that both ends say."""
    _, of_store = store_context(None)
    context, _ = store_context(None)
    servers.append(Server(context, of_store))  # what the store proves is over its own
    with pytest.raises(Refused, match="somebody sits between"):
        reaches(servers[0])
    assert servers[0].let_in == 0


def test_one_who_does_not_know_the_token_is_found_out(servers: list[Server]) -> None:
    servers.append(Server(*store_context(None), token=b"another token than that"))
    with pytest.raises(Refused, match="compare the token files"):
        reaches(servers[0])


def test_older_tls_is_refused(servers: list[Server]) -> None:
    context, shown = store_context(None)
    servers.append(Server(context, shown))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    where = (servers[0].address.host, servers[0].address.port)
    with socket.create_connection(where, LONG) as wire, pytest.raises(ssl.SSLError):
        old.wrap_socket(wire)
    assert worker_context(None).minimum_version == ssl.TLSVersion.TLSv1_3


# ---------------------------------------------------------------- of the user


def test_certificates_of_the_users_that_fit(servers: list[Server], tmp_path: Path) -> None:
    authority = Signed(None)
    authority.files(tmp_path / "authority")
    mine = Signed("127.0.0.1", authority).files(tmp_path / "mine")
    servers.append(Server(*store_context(mine)))
    reaches(servers[0], tmp_path / "authority" / "cert.pem")
    reaches(servers[0])  # the token is proof enough


@pytest.mark.parametrize(
    ("host", "why"), [("10.1.2.3", "IP address mismatch"), ("127.0.0.1", "unable to get local")]
)
def test_a_certificate_that_does_not_fit_is_named(
    servers: list[Server], tmp_path: Path, host: str, why: str
) -> None:
    authority, other = Signed(None), Signed(None)
    for one, name in ((authority, "authority"), (other, "other")):
        one.files(tmp_path / name)
    signed_by = authority if host == "10.1.2.3" else other
    mine = Signed(host, signed_by).files(tmp_path / "mine")
    servers.append(Server(*store_context(mine)))
    with pytest.raises(Refused, match=f"does not fit: .*{why}.*; compare --authority"):
        reaches(servers[0], tmp_path / "authority" / "cert.pem")
    assert servers[0].let_in == 0


def test_the_fingerprint_is_of_what_is_shown(tmp_path: Path) -> None:
    """Also where others that have signed it stand behind it in the same file."""
    authority = Signed(None)
    mine = Signed("127.0.0.1", authority)
    files = mine.files(tmp_path / "mine")
    with files.certificate.open("ab") as out:
        out.write(authority.certificate.public_bytes(PEM))
    _, shown = store_context(files)
    assert shown == fingerprint(mine.certificate.public_bytes(serialization.Encoding.DER))


def test_files_that_are_none_are_a_clear_error(tmp_path: Path) -> None:
    fits = Signed("127.0.0.1").files(tmp_path / "fits")
    other = Signed("127.0.0.1").files(tmp_path / "other")
    secret = Signed("127.0.0.1").files(tmp_path / "secret", b"secret")
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    for wrong in (
        Certificate(fits.certificate, other.key),
        Certificate(nonsense, fits.key),
        Certificate(fits.certificate, nonsense),
        secret,  # and nobody is asked for it: there may be no terminal
    ):
        with pytest.raises(ConfigError, match=r"are no certificate and its key .*PEM files"):
            store_context(wrong)


@pytest.mark.parametrize("text", ["cert.pem", "a,b,c", ""])
def test_a_certificate_is_given_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--certificate cert\.pem,key.pem"):
        Certificate.of(text)
    with pytest.raises(ConfigError, match="there is no file"):
        Certificate.of("/nowhere/cert.pem,/nowhere/key.pem")
