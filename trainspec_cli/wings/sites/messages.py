"""Messages exchanged among the sites' ranks, the meeting point and the inboxes, and how they are encrypted.

A message is a line of JSON, `{"op": ..., "bytes": n, ...}`, followed by n bytes.

Connections use the standard library's TLS, with a certificate that each server creates at startup. No authority signs
the certificate: identity is proved by the shared-secret handshake (`core/wire/handshake.py`), whose purpose contains
the certificate's digest. A man-in-the-middle attacker would have to present a different certificate, and the proofs of
the two ends would then differ."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import json
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from trainspec_cli.recipe.records import read_record

GREETING = b"trainspec sites 3\n"
"""The first bytes that a meeting point or an inbox sends, before both ends start TLS."""
MEETING_POINT = "sites"
"""The name of the meeting point in the identity proofs of both ends."""
LINE_BYTES = 2**24
"""Maximum length of a JSON line that either end accepts."""
CHUNK_BYTES = 2**18
BEAT_S = 1.0
"""Each end sends `Alive` if it has sent nothing else for this many seconds."""
MAX_PAYLOAD_BYTES = 2**36
OPERATION = "op"
PAYLOAD_BYTES = "bytes"

# from a rank of a site to the meeting point or an inbox


@dataclass(frozen=True)
class SiteHello:
    """The first message of a rank. The meeting point answers once all ranks of the site are connected; an inbox does
    not answer."""

    site: int
    rank: int
    ranks: int
    batch: int
    """Maximum number of samples that the site takes in a step."""
    applied: int
    """The newest round that the rank has applied; -1 before the first one."""
    recipe: str
    """A digest of everything that all sites must agree on."""
    listen: str = ""
    """HOST:PORT of the site's inbox; empty if it has none."""


@dataclass(frozen=True)
class Sent:
    """Announces an outer gradient. Its encoded bytes follow."""

    round: int
    tokens: int
    steps: int
    rate: float
    digest: str
    """Digest of the rank's part of the shared weights, after the previous round."""
    saved_round: int
    sha256: str = ""
    """Digest of the encoded outer gradient."""
    direct: tuple[int, ...] = ()
    """The sites to whose inboxes the rank also sends the outer gradient."""


@dataclass(frozen=True)
class Lacking:
    """Requests outer gradients that came neither with a decision nor directly."""

    round: int
    sites: tuple[int, ...]


@dataclass(frozen=True)
class Followed:
    """Reports that a rank of a site that is not a member has applied all rounds up to `round`."""

    round: int


@dataclass(frozen=True)
class Alive:
    """Sent periodically by both ends, so that silence means a lost connection."""


# from the meeting point or a site's inbox to a rank of the site


@dataclass(frozen=True)
class Passed:
    """Announces another site's outer gradient for a round that has not been decided yet. Its bytes follow."""

    round: int
    site: int


@dataclass(frozen=True)
class Gone:
    """Reports that the direct connection of another site has ended."""

    site: int


@dataclass(frozen=True)
class Welcome:
    is_member: bool
    """Whether the site is a member. If not, it follows the rounds, which are sent now, and trains once it has caught
    up."""
    record: object
    """The record of the newest round that the rank has applied."""


@dataclass(frozen=True)
class Inboxes:
    """The inbox addresses of the sites that have connected. A site with an empty address can only be reached through
    the meeting point."""

    sites: tuple[int, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """A decided round: its record and the outer gradients of some sites, concatenated."""

    record: object
    sites: tuple[int, ...]
    sizes: tuple[int, ...]
    """Number of bytes of each outer gradient."""
    sha256: tuple[str, ...] = ()
    """Digests of the outer gradients of all merged sites, in the order of the record. Empty if all of these gradients
    follow."""


@dataclass(frozen=True)
class Refused:
    """Rejects the connection and ends it. A new connection would also be rejected."""

    reason: str
    hint: str


Message = SiteHello | Sent | Lacking | Followed | Alive | Passed | Gone | Welcome | Inboxes | Decided | Refused
OPERATIONS: dict[str, type[Message]] = {
    "hello": SiteHello,
    "sent": Sent,
    "lacking": Lacking,
    "followed": Followed,
    "alive": Alive,
    "passed": Passed,
    "gone": Gone,
    "welcome": Welcome,
    "inboxes": Inboxes,
    "decided": Decided,
    "refused": Refused,
}
_NAMES = {message: name for name, message in OPERATIONS.items()}


def inbox_of(site: int) -> str:
    """Return the name of a site's inbox in the proofs of both ends. A client that expects another inbox is rejected."""
    return f"site {site}"


def pack(message: Message, payload: bytes = b"") -> bytes:
    line = {OPERATION: _NAMES[type(message)], PAYLOAD_BYTES: len(payload), **asdict(message)}
    return json.dumps(line, allow_nan=False).encode() + b"\n" + payload


async def receive(reader: asyncio.StreamReader, on_data: Callable[[], object]) -> tuple[Message, bytes]:
    """Return the next message and its payload. `on_data` is called whenever data arrives.

    Raises OSError or EOFError if the connection ends, and ValueError if the data is not a message."""
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("a line without an end") from error
    on_data()
    fields = json.loads(line)
    if not isinstance(fields, dict) or fields.get(OPERATION) not in OPERATIONS:
        raise ValueError("a line that is not a message")
    size = fields.pop(PAYLOAD_BYTES, None)
    if not isinstance(size, int) or not 0 <= size <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a message of {size} bytes")
    chunks = []
    left = size
    while left:
        chunk = await reader.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise EOFError("the connection ended within a message")
        # Every chunk is treated as a sign of life, because on a slow link, a gradient takes longer than the silence
        # limit.
        on_data()
        chunks.append(chunk)
        left -= len(chunk)
    return read_record(OPERATIONS[str(fields[OPERATION])], fields), b"".join(chunks)


LIFETIME = datetime.timedelta(days=3650)
PACKAGE = "cryptography"
"""The package that creates certificates. It comes with the extra `sites`."""


@dataclass(frozen=True)
class TlsCertificate:
    context: ssl.SSLContext
    digest: str
    """The SHA-256 of a certificate in DER encoding."""

    def purpose(self, server: str) -> str:
        return purpose_of(server, self.digest)


def purpose_of(server: str, digest: str) -> str:
    """Return the purpose of a handshake inside a TLS connection. It contains the server's name and certificate
    digest."""
    return f"{server} {digest}"


def make_certificate() -> TlsCertificate:
    """Create a key and its certificate. They are on disk only while they are being loaded."""
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
    with tempfile.NamedTemporaryFile() as file:  # only this user can read it; ssl can only load files
        Path(file.name).write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file.name)
    return TlsCertificate(context, hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).hexdigest())


async def start_tls_as_client(writer: asyncio.StreamWriter) -> str:
    """Start TLS. Return the digest of the server's certificate."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the shared-secret handshake replaces this check
    context.verify_mode = ssl.CERT_NONE
    await writer.start_tls(context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if shown is None:
        raise ConnectionError("the server has sent no certificate")
    return hashlib.sha256(shown).hexdigest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
