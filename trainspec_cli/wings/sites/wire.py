"""The wire between the sites: the messages of a rank, the meeting point and the inboxes, and how they are encrypted.

A message is a line of JSON, `{"op": ..., "bytes": n, ...}`, and n bytes that follow it.

Connections are encrypted by TLS of the standard library, with a certificate that each server makes anew. Nobody vouches
for the certificate: who is at the other end is proved by the handshake over the shared secret
(`core/wire/handshake.py`), whose purpose holds the certificate's digest. Somebody in between would have to show another
certificate, and the proofs would be of different purposes.
"""

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
"""What a meeting point or an inbox sends first; then both ends go on in TLS."""
MEETING_POINT = "sites"
"""The name of the meeting point in the proofs of both ends."""
LINE_BYTES = 2**24
"""The longest line of JSON that either end accepts."""
CHUNK_BYTES = 2**18
BEAT_S = 1.0
"""Both ends say that they are alive where they have had nothing else to say for this time."""
MAX_PAYLOAD_BYTES = 2**36
OPERATION = "op"
PAYLOAD_BYTES = "bytes"

# a rank of a site -> the meeting point, or an inbox


@dataclass(frozen=True)
class SiteHello:
    """A rank is there; the meeting point answers when all ranks of its site are, an inbox does not."""

    site: int
    rank: int
    ranks: int
    batch: int
    """Samples that the site takes a step, at most."""
    applied: int
    """The newest round that the rank has applied; -1 before the first."""
    recipe: str
    """A digest of what all sites have to agree on."""
    listen: str = ""
    """HOST:PORT of the site's inbox; empty: it has none."""


@dataclass(frozen=True)
class Sent:
    """An outer gradient, encoded; its bytes follow."""

    round: int
    tokens: int
    steps: int
    rate: float
    digest: str
    """Of the rank's part of the shared weights, after the round before."""
    saved_round: int
    sha256: str = ""
    """Of the encoded outer gradient."""
    direct: tuple[int, ...] = ()
    """The sites to whose inboxes the rank sends it as well."""


@dataclass(frozen=True)
class Lacking:
    """The outer gradients of some sites, which a decision has not brought and which have not come directly."""

    round: int
    sites: tuple[int, ...]


@dataclass(frozen=True)
class Followed:
    """The rank of a site that is no member has applied all rounds up to this one."""

    round: int


@dataclass(frozen=True)
class Alive:
    """Sent by both ends, so that silence means something."""


# the meeting point, or the inbox of a site -> a rank of the site


@dataclass(frozen=True)
class Passed:
    """The outer gradient of another site for a round that is not decided yet; its bytes follow."""

    round: int
    site: int


@dataclass(frozen=True)
class Gone:
    """The direct connection of another site has ended."""

    site: int


@dataclass(frozen=True)
class Welcome:
    is_member: bool
    """False: the site follows the rounds, which come now, and trains from the next one on."""
    record: object
    """That of the round which the rank has applied."""


@dataclass(frozen=True)
class Inboxes:
    """Where the sites that have been connected are reached; an empty address: through the meeting point alone."""

    sites: tuple[int, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class Decided:
    """A round: its record, and the outer gradients of some sites, one after another."""

    record: object
    sites: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each of them."""
    sha256: tuple[str, ...] = ()
    """Of the outer gradients of all sites whose work is merged, in the order of the record; none where all of them
    come with it."""


@dataclass(frozen=True)
class Refused:
    """The connection ends, and it would be refused again."""

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
    """Return the name of a site's inbox in the proofs of both ends: whoever wants another one is refused."""
    return f"site {site}"


def pack(message: Message, payload: bytes = b"") -> bytes:
    line = {OPERATION: _NAMES[type(message)], PAYLOAD_BYTES: len(payload), **asdict(message)}
    return json.dumps(line, allow_nan=False).encode() + b"\n" + payload


async def receive(reader: asyncio.StreamReader, heard: Callable[[], object]) -> tuple[Message, bytes]:
    """Return the next message and its payload; `heard` is called for everything that arrives.

    Raises OSError or EOFError where the connection ends, ValueError where what arrives is no message.
    """
    try:
        line = await reader.readuntil(b"\n")
    except asyncio.LimitOverrunError as error:
        raise ValueError("a line without an end") from error
    heard()
    fields = json.loads(line)
    if not isinstance(fields, dict) or fields.get(OPERATION) not in OPERATIONS:
        raise ValueError("a line that is no message")
    size = fields.pop(PAYLOAD_BYTES, None)
    if not isinstance(size, int) or not 0 <= size <= MAX_PAYLOAD_BYTES:
        raise ValueError(f"a message of {size} bytes")
    chunks = []
    left = size
    while left:
        chunk = await reader.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise EOFError("the connection ended within a message")
        # Each chunk counts: over a thin link a gradient takes longer than the silence that ends a connection.
        heard()
        chunks.append(chunk)
        left -= len(chunk)
    return read_record(OPERATIONS[str(fields[OPERATION])], fields), b"".join(chunks)


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


async def start_tls_as_client(writer: asyncio.StreamWriter) -> str:
    """Go on in TLS; return the digest of the certificate that the server has shown."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the handshake over the secret takes its place
    context.verify_mode = ssl.CERT_NONE
    await writer.start_tls(context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if shown is None:
        raise ConnectionError("what listens there has shown no certificate")
    return hashlib.sha256(shown).hexdigest()


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
