"""The messages between the rendezvous server and its clients, each one JSON object a line.

A request has the name of its operation under `op`. A store's values are text, in which each character is a byte.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from trainspec_cli.core.json_value import JsonObject

# client -> server: the store (the operations of torch.distributed's Store)


@dataclass(frozen=True)
class SetKey:
    key: str
    value: str


@dataclass(frozen=True)
class AddToKey:
    """Add to a key that holds a whole number in decimal digits; an absent one counts from 0."""

    key: str
    amount: int


@dataclass(frozen=True)
class AppendToKey:
    key: str
    value: str


@dataclass(frozen=True)
class CompareAndSetKey:
    """Set a key that holds `expected`, or an absent key where `expected` is empty."""

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
    """Ask for a place in the step after `step`."""

    name: str
    """The name of the replica group's start."""
    step: int
    failures: int
    """Exchanges in a row that have failed."""
    number: int
    """The answer repeats it."""


@dataclass(frozen=True)
class GroupBeat:
    """The replica group lives."""

    name: str


# server -> client


@dataclass(frozen=True)
class StoreAnswer:
    value: str | int | bool | None


@dataclass(frozen=True)
class KeyValues:
    """Answers `GetKeys` and `AwaitKeys`, the latter without values."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class MissingKey:
    """Answers `GetKeys` and `AwaitKeys` where a key did not come in time."""

    missing: str


@dataclass(frozen=True)
class FormedQuorum:
    """The replica groups that make the next step together."""

    quorum: str
    """Another one whenever the members change, or one of them has met an error."""
    names: tuple[str, ...]
    steps: tuple[int, ...]
    """Updates that each of them has made."""
    number: int
    """The number of the request."""


KeyRequest = SetKey | AddToKey | AppendToKey | CompareAndSetKey | DeleteKey | CountKeys | CheckKeys
"""Requests that are answered at once, by a `StoreAnswer`."""
WaitRequest = GetKeys | AwaitKeys
QuorumRequest = JoinQuorum | GroupBeat
Request = KeyRequest | WaitRequest | QuorumRequest
Answer = StoreAnswer | KeyValues | MissingKey | FormedQuorum
OPERATION = "op"
"""The key of a request's operation."""
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
