"""Messages between the hub and the nodes' agents: one dataclass a message, one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.reading.files import parse_json
from trainspec_cli.spec.canonical import canonical_json, from_plain, to_plain
from trainspec_cli.spec.results.doctor import NodeReport

KIND = "kind"
"""The key of a message's class."""
EXIT_CODES = range(-64, 256)


@dataclass(frozen=True)
class Beat:
    """Either end lives."""


# agent -> hub


@dataclass(frozen=True)
class Hello:
    node: int
    hostname: str


@dataclass(frozen=True)
class NodeExamined:
    report: NodeReport


@dataclass(frozen=True)
class NodeRefuses:
    """The node cannot take part."""

    why: str


@dataclass(frozen=True)
class WorkerExited:
    """A worker has failed, or torchrun itself."""

    group: int
    number: int
    """The number of the group's start."""
    rank: int
    """The rank among all of the run's."""
    summary: str
    was_killed: bool = False
    """True for SIGKILL."""


@dataclass(frozen=True)
class WorkersOrphaned:
    """torchrun has ended and left workers behind."""

    group: int
    number: int


@dataclass(frozen=True)
class GroupExited:
    """Nothing is left on the node of a group's start."""

    group: int
    number: int
    exit_code: int | None
    """torchrun's, negative for a signal; None where it had to be killed."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be ended."""
    oom_kills: int = 0
    """Processes that the kernel has killed since the start because memory had run out."""
    memory_bytes: int = 0
    """Memory of the node, or its container's limit."""


@dataclass(frozen=True)
class StopAsked:
    """The agent was asked to stop, as Slurm does with all of them."""


@dataclass(frozen=True)
class Goodbye:
    """Nothing is left on the node, and the agent ends."""


# hub -> agent


@dataclass(frozen=True)
class StartGroup:
    group: int
    number: int


@dataclass(frozen=True)
class StopWorkers:
    group: int | None
    """None: all, because the run is to end."""


@dataclass(frozen=True)
class KillGroup:
    group: int
    number: int


@dataclass(frozen=True)
class EndAgent:
    """Kill what runs on the node, and end."""


ProcessMessage = WorkerExited | WorkersOrphaned | GroupExited
AgentMessage = Hello | NodeExamined | NodeRefuses | ProcessMessage | StopAsked | Goodbye
HubMessage = StartGroup | StopWorkers | KillGroup | EndAgent
Message = Beat | AgentMessage | HubMessage
_MESSAGES: dict[str, type] = {message.__name__: message for message in Message.__args__}


def encode(message: Message) -> bytes:
    return canonical_json({KIND: type(message).__name__, **to_plain(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises ValueError, or RecipeError (with every field that does not fit), for what is no message."""
    plain = parse_json(line)
    kind = plain.pop(KIND, None) if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ValueError("no message of this protocol")
    message: Message = from_plain(_MESSAGES[kind], plain)
    if isinstance(message, GroupExited) and message.exit_code is not None and message.exit_code not in EXIT_CODES:
        raise ValueError(f"no process ends with the code {message.exit_code}")
    return message
