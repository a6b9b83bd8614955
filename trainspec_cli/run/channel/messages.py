"""Messages between the hub, the nodes' agents and the workers: one dataclass a message, one JSON object a line."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.core.reading.files import parse_json
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import Count, Seconds, canonical_json, from_plain, to_plain
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.recipe.results.verdict import LookOrder, MeasuredLink

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
    hint: str = ""
    """What to do about it."""


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
class StepsMade:
    """What a command of the user's own has made on the node in this start."""

    group: int
    number: int
    made: int


@dataclass(frozen=True)
class RankStands:
    """Where a rank stands of which no sign of work was seen for long."""

    rank: int
    host: str
    step: int
    """The newest that it has made."""
    stack: str
    """Of its main thread."""
    place: str
    """In the user's own code, and what that has called of torch or another library."""
    waiting: bool
    """It stands in torch, or in another library that trains."""
    stopped: bool
    """By SIGSTOP."""
    ended: bool


@dataclass(frozen=True)
class NodeStands:
    """No rank of a command of the user's own works on the node."""

    group: int
    number: int
    waited_s: float
    deadline_s: float
    ranks: tuple[RankStands, ...]


@dataclass(frozen=True)
class ProcessSilent:
    """A process of a command whose steps nobody counts."""

    rank: int | None
    """As its environment has it."""
    host: str
    pid: int
    command: str
    """The end of its command line."""
    stopped: bool
    """By SIGSTOP."""


@dataclass(frozen=True)
class NodeSilent:
    """No step of a command of the user's own is counted on the node, or none yet, and no process of it works there."""

    group: int
    number: int
    waited_s: float
    processes: tuple[ProcessSilent, ...]
    """The stopped ones, or all where none is; the first few of them."""


@dataclass(frozen=True)
class NodeWorks:
    """After it stood or was silent, a rank or a process of the node works again."""

    group: int
    number: int


@dataclass(frozen=True)
class WorkedLong:
    """A command of the user's own, of which no step is counted on the node, has worked there for so long that another
    start of it may come as far."""

    group: int
    number: int


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
class HangFound:
    """A command of the user's own hangs: the node is to write down where its ranks stand."""

    late: tuple[int, ...]
    """The ranks that the others wait for."""


@dataclass(frozen=True)
class NumberTaken:
    """Another agent has the number of the node; this one is sent away."""

    hostname: str


@dataclass(frozen=True)
class EndAgent:
    """Kill what runs on the node, and end."""


# worker -> hub


@dataclass(frozen=True)
class WorkerHello:
    rank: int
    """Among all of the run's."""


@dataclass(frozen=True, kw_only=True)
class SpeedsReport:
    """The confirmed speeds of all ranks, and how samples are divided over them: from rank 0, when they change."""

    step: Count
    """Updates made when this was sent."""
    step_s: Seconds
    """Computing of the slowest rank in the last step, with the exchanges of its micro-batches."""
    layout: Layout
    """The layout in which the speeds were measured."""
    micro_batches: Count
    """Micro-batches of every rank in a step."""
    samples: tuple[Count, ...]
    """Samples in a step by global rank, as the other lists."""
    fixed_s: tuple[Seconds, ...]
    """A micro-batch's forward and backward take this long, and"""
    per_sample_s: tuple[Seconds, ...]
    """this long for each sample in it."""
    links: tuple[MeasuredLink, ...] = ()
    """The links whose speeds are known."""

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Return what each rank computes in a step, without waiting for others."""
        each = zip(self.samples, self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + samples * sample_s for samples, fixed_s, sample_s in each)

    @property
    def even_s(self) -> tuple[float, ...]:
        """Return what each rank would compute if all took equally many samples."""
        share = sum(self.samples) / len(self.samples)
        each = zip(self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + share * sample_s for fixed_s, sample_s in each)


# worker -> hub -> all other workers


@dataclass(frozen=True)
class ShortageNote:
    """The memory of a rank has run out in a step whose end the others may wait for."""

    rank: int
    step: int
    """Updates made before that step."""


# hub -> worker; a `LookOrder` too, to the rank that is to look at itself


@dataclass(frozen=True)
class Proposal:
    """Another layout that the run would be faster in: to rank 0. The ranks agree at which step they take it up."""

    number: int
    """Proposals of a supervisor are numbered from 1."""
    before: Layout
    """It is meant for a run in this layout, and void in any other."""
    proposal: LayoutProposal


@dataclass(frozen=True)
class ExpectGroups:
    """This number of replica groups runs or may still come: a run that has not stepped yet waits for them."""

    groups: int


OwnCommandMessage = StepsMade | NodeStands | NodeSilent | NodeWorks | WorkedLong
ProcessMessage = WorkerExited | WorkersOrphaned | GroupExited | OwnCommandMessage
AgentMessage = Hello | NodeExamined | NodeRefuses | ProcessMessage | StopAsked | Goodbye
HubMessage = StartGroup | StopWorkers | KillGroup | HangFound | NumberTaken | EndAgent
WorkerMessage = WorkerHello | SpeedsReport | ShortageNote | Proposal | LookOrder | ExpectGroups
Message = Beat | AgentMessage | HubMessage | WorkerMessage
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
