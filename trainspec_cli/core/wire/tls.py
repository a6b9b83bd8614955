"""Encrypted connections between sites: TLS by the standard library, with a certificate that each server makes anew.

Nobody vouches for the certificate: who is at the other end is proved by the handshake over the shared secret
(`handshake.py`), whose purpose holds the certificate's digest. Somebody in between would have to show another
certificate, and the proofs would be of different purposes.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIFETIME = datetime.timedelta(days=3650)
PACKAGE = "cryptography"
"""The package that makes certificates, of the extra `sites`."""


@dataclass(frozen=True)
class TlsCertificate:
    context: ssl.SSLContext
    digest: str
    """SHA-256 of its DER."""

    def purpose(self, server: str) -> str:
        return purpose_of(server, self.digest)


def purpose_of(server: str, digest: str) -> str:
    """Return the purpose of a handshake inside of a TLS connection: who listens, and the certificate that it shows."""
    return f"{server} {digest}"


def make_certificate() -> TlsCertificate:
    """Make a key and its certificate, which are on the disk only while they are loaded."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainspec")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    dated = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + LIFETIME)
    certificate = dated.sign(key, hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:  # for this user alone; ssl loads from files only
        Path(file.name).write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file.name)
    return TlsCertificate(context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest())


def client_context() -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the handshake over the secret takes its place
    context.verify_mode = ssl.CERT_NONE
    return context


def peer_digest(connection: ssl.SSLObject) -> str:
    """Return the digest of the certificate that the server has shown."""
    shown = connection.getpeercert(binary_form=True)
    if shown is None:
        raise ConnectionError("what listens there has shown no certificate")
    return hashlib.sha256(shown).hexdigest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
