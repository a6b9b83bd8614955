"""The messages between a rank of a site and the sites' meeting point.

A message is a line of JSON, `{"op": ..., "bytes": n, ...}`, and n bytes that follow it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from trainspec_cli.json_value import JsonObject

GREETING = b"trainspec sites 1\n"
"""What the meeting point sends first; then both ends go on in TLS."""
LINE_BYTES = 2**24
"""The longest line of JSON that either end accepts."""
CHUNK_BYTES = 2**18
MAX_PAYLOAD_BYTES = 2**36
OPERATION, PAYLOAD_BYTES = "op", "bytes"

# a rank of a site -> the meeting point


@dataclass(frozen=True)
class SiteHello:
    """A rank is there; the meeting point answers when all ranks of its site are."""

    site: int
    rank: int
    ranks: int
    batch: int
    """Samples that the site takes a step, at most."""
    applied: int
    """The newest round that the rank has applied; -1 before the first."""
    recipe: str
    """A digest of what all sites have to agree on."""


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
    step_s: float = 0.0
    exchange_s: float = 0.0
    """From when the rank sent for the round before until it had that round's decision, with the others' outer
    gradients; 0: not measured."""


@dataclass(frozen=True)
class Followed:
    """The rank of a site that is no member has applied all rounds up to this one."""

    round: int


@dataclass(frozen=True)
class Alive:
    """Sent by both ends, so that silence means something."""


# the meeting point -> a rank of a site


@dataclass(frozen=True)
class Welcome:
    is_member: bool
    """False: the site follows the rounds, which come now, and trains from the next one on."""
    record: object
    """That of the round which the rank has applied."""


@dataclass(frozen=True)
class Decided:
    """A round: its record, and the outer gradients of some sites, one after another."""

    record: object
    sites: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of each of them."""


@dataclass(frozen=True)
class Refused:
    """The connection ends, and it would be refused again."""

    reason: str
    hint: str


Message = SiteHello | Sent | Followed | Alive | Welcome | Decided | Refused
OPERATIONS: dict[str, type[Message]] = {
    "hello": SiteHello,
    "sent": Sent,
    "followed": Followed,
    "alive": Alive,
    "welcome": Welcome,
    "decided": Decided,
    "refused": Refused,
}
_NAMES = {message: name for name, message in OPERATIONS.items()}


def pack(message: Message, payload: bytes = b"") -> bytes:
    line = {OPERATION: _NAMES[type(message)], PAYLOAD_BYTES: len(payload), **asdict(message)}
    return json.dumps(line, allow_nan=False).encode() + b"\n" + payload


async def receive(reader: asyncio.StreamReader, heard: Callable[[], object]) -> tuple[JsonObject, bytes]:
    """Return the fields of the next message and its payload; `heard` is called for everything that arrives.

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
    return fields, b"".join(chunks)
