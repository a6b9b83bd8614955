"""The messages between the rendezvous server and its clients (one JSON object per line), and a client's connection. A
request names its operation in `op`. Values in the store are text in which each character represents a byte."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from dataclasses import asdict, dataclass

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.wire.handshake import HandshakeError, connect

RENDEZVOUS_PURPOSE = "rendezvous"
LINE_BYTES = 2**24
"""Maximum length of a line that either end accepts."""
RETRY_S = 0.05

# client -> server: the store (the operations of torch.distributed's Store)


@dataclass(frozen=True)
class SetKey:
    key: str
    value: str


@dataclass(frozen=True)
class AddToKey:
    """Add to a key's value, an integer in decimal digits; an absent key is treated as 0."""

    key: str
    amount: int


@dataclass(frozen=True)
class AppendToKey:
    key: str
    value: str


@dataclass(frozen=True)
class CompareAndSetKey:
    """Set a key if its value is `expected`, or if it is absent and `expected` is empty."""

    key: str
    expected: str
    value: str


@dataclass(frozen=True)
class DeleteKey:
    key: str


@dataclass(frozen=True)
class CountKeys:
    """Ask for the number of keys."""


@dataclass(frozen=True)
class CheckKeys:
    """Ask whether all of the keys exist."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class GetKeys:
    """Ask for the keys' values once all of them exist."""

    keys: tuple[str, ...]
    timeout_s: float


@dataclass(frozen=True)
class AwaitKeys:
    """Wait until all of the keys exist."""

    keys: tuple[str, ...]
    timeout_s: float


# client -> server: the replica groups' quorum


@dataclass(frozen=True)
class JoinQuorum:
    """Request to take part in the step after `step`."""

    name: str
    """Name of the replica group's current start."""
    step: int
    failures: int
    """Number of consecutive exchanges that failed."""
    number: int
    """A number that the answer repeats, to identify the request."""


@dataclass(frozen=True)
class GroupBeat:
    """A heartbeat from the replica group."""

    name: str


# server -> client


@dataclass(frozen=True)
class StoreAnswer:
    value: str | int | bool | None


@dataclass(frozen=True)
class KeyValues:
    """Answers `GetKeys` with values, and `AwaitKeys` without."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class MissingKey:
    """Answers `GetKeys` and `AwaitKeys` if a key did not arrive in time."""

    missing: str


@dataclass(frozen=True)
class FormedQuorum:
    """The replica groups that take the next step together."""

    quorum: str
    """A number that changes whenever the members change or one of them has had an error."""
    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Number of updates that each group has made."""
    number: int
    """The number of the request that is answered."""


KeyRequest = SetKey | AddToKey | AppendToKey | CompareAndSetKey | DeleteKey | CountKeys | CheckKeys
"""Requests that are answered immediately with a `StoreAnswer`."""
WaitRequest = GetKeys | AwaitKeys
QuorumRequest = JoinQuorum | GroupBeat
Request = KeyRequest | WaitRequest | QuorumRequest
Answer = StoreAnswer | KeyValues | MissingKey | FormedQuorum
OPERATION = "op"
"""The JSON key that contains a request's operation."""
OPERATIONS: dict[str, type[Request]] = {
    "set": SetKey,
    "add": AddToKey,
    "append": AppendToKey,
    "compare_set": CompareAndSetKey,
    "delete": DeleteKey,
    "count": CountKeys,
    "check": CheckKeys,
    "get": GetKeys,
    "wait": AwaitKeys,
    "join": JoinQuorum,
    "beat": GroupBeat,
}
_NAMES = {request: name for name, request in OPERATIONS.items()}


def to_json(request: Request) -> JsonObject:
    return {OPERATION: _NAMES[type(request)], **asdict(request)}


class JsonClient:
    """A connection to the server. Not thread-safe, except that one thread may `send` while another is in `receive`.

    Raises OSError if the connection is lost or the server does not know the secret."""

    def __init__(self, address: str, secret: bytes, timeout_s: float):
        """Connect to `address` (host:port), retrying for `timeout_s` if the server is not listening yet."""
        host, _, port = address.rpartition(":")
        deadline = time.monotonic() + timeout_s
        self._unread = b""
        while True:
            try:
                self._connection = connect((host, int(port)), secret, RENDEZVOUS_PURPOSE)
                return
            # Do not retry with a wrong secret: that would only delay the error.
            except HandshakeError:
                raise
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(RETRY_S)

    def ask(self, request: JsonObject, timeout_s: float) -> JsonObject:
        """Send a request and wait for its answer. Raises TimeoutError if no answer arrives in time."""
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: JsonObject) -> None:
        self._connection.sendall(json.dumps(request, allow_nan=False).encode() + b"\n")

    def receive(self, timeout_s: float) -> JsonObject:
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._unread:
            piece = self._connection.recv(2**16)
            if not piece:
                raise ConnectionResetError("the rendezvous server closed the connection")
            self._unread += piece
            if len(self._unread) > LINE_BYTES:
                raise ConnectionError("the rendezvous server sent a line that is too long")
        # A read may also return the start of the next line.
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """Close the connection, which also wakes a thread that is waiting in `receive`."""
        with contextlib.suppress(OSError):  # the other end may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
