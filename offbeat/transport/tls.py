"""TLS 1.3 for links that leave the host, with a certificate of the user's or one made for the run.

A certificate that is made for a run is signed by nobody. What makes it good is the token: both ends
put what they have seen of the certificate into their proofs (`handshake.py`).
"""

import datetime
import hashlib
import os
import ssl
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ConfigError

DAYS = 3650


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in files as PEM; `authority` signs those of the workers too."""

    certificate: Path
    key: Path

    @classmethod
    def of(cls, text: str) -> "Certificate":
        """From `certificate.pem,key.pem`."""
        parts = [Path(part) for part in text.split(",")]
        if len(parts) != 2:
            raise ConfigError(
                f"a certificate is given with its key: --certificate cert.pem,key.pem, not {text!r}"
            )
        for part in parts:
            if not part.is_file():
                raise ConfigError(f"there is no file {part}: name a certificate and its key")
        return cls(*parts)


def store_context(own: Certificate | None) -> tuple[ssl.SSLContext, bytes]:
    """For a store, with the fingerprint of its certificate, which is made here if it has none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    if own is None:
        certificate, key = _made()
        # The system's library reads files alone; they are gone before anybody connects.
        folder = tempfile.mkdtemp(prefix="offbeat-tls-")
        files = [os.path.join(folder, name) for name in ("certificate", "key")]
        try:
            for file, content in zip(files, (certificate, key), strict=True):
                with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                    out.write(content)
            context.load_cert_chain(*files)
        finally:
            for file in files:
                with suppress(FileNotFoundError):
                    os.unlink(file)
            os.rmdir(folder)
        return context, fingerprint(ssl.PEM_cert_to_DER_cert(certificate.decode()))
    try:
        context.load_cert_chain(own.certificate, own.key, password="")  # and nobody is asked
        text = own.certificate.read_text()
        end = "-----END CERTIFICATE-----"
        first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{own.certificate} and {own.key} are no certificate and its key ({error}): both are "
            "PEM files, and the key fits the certificate"
        ) from error
    return context, fingerprint(ssl.PEM_cert_to_DER_cert(first))


def worker_context(authority: Path | None) -> ssl.SSLContext:
    """For a worker; with an `authority` the store's certificate must be signed by that."""
    if authority is not None:
        try:
            context = ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise ConfigError(
                f"{authority} is no certificate to check others with ({error}): name a PEM file"
            ) from error
    else:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE  # the token's proof is over what is shown
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def fingerprint(certificate: bytes) -> bytes:
    """What proofs are made over, of a certificate in DER."""
    return hashlib.sha256(certificate).digest()


def _made() -> tuple[bytes, bytes]:
    """A certificate and its key, as PEM, for this run alone."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ConfigError(
            "links that leave this host are encrypted, and the certificate for that is made with "
            "another package: pip install offbeat[tls], name one of your own with --certificate "
            "cert.pem,key.pem, or say --no-tls in a network that you trust"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "offbeat")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .sign(key, hashes.SHA256())
    )
    how = serialization.NoEncryption()
    kind = serialization.PrivateFormat.PKCS8
    return (
        made.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, kind, how),
    )
