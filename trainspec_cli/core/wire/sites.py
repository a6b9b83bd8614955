"""The messages between a rank of a site and the sites' meeting point, and between a rank and the inbox of a site.

A message is a line of JSON, `{"op": ..., "bytes": n, ...}`, and n bytes that follow it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainspec_cli.core.json_value import JsonObject

GREETING = b"trainspec sites 3\n"
"""What a meeting point or an inbox sends first; then both ends go on in TLS."""
MEETING_POINT = "sites"
"""The name of the meeting point in the proofs of both ends."""
LINE_BYTES = 2**24
"""The longest line of JSON that either end accepts."""
CHUNK_BYTES = 2**18
MAX_PAYLOAD_BYTES = 2**36
OPERATION, PAYLOAD_BYTES = "op", "bytes"

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


async def receive(reader: asyncio.StreamReader, heard: Callable[[], object]) -> tuple[type[Message], JsonObject, bytes]:
    """Return the kind of the next message, its fields and its payload; `heard` is called for everything that arrives.

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
    chunks, left = [], size
    while left:
        chunk = await reader.read(min(left, CHUNK_BYTES))
        if not chunk:
            raise EOFError("the connection ended within a message")
        heard()
        chunks.append(chunk)
        left -= len(chunk)
    return OPERATIONS[str(fields[OPERATION])], fields, b"".join(chunks)
