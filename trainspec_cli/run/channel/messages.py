"""Messages between the hub, the nodes' agents and the workers: one dataclass per message, one JSON object per line."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.core.reading.files import parse_json
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.records import Count, Seconds, canonical_json, from_plain, to_plain
from trainspec_cli.recipe.results.doctor import NodeFault, NodeReport
from trainspec_cli.recipe.results.plan import LayoutProposal
from trainspec_cli.recipe.results.verdict import Collective, LookOrder, MeasuredLink

KIND = "kind"
"""The JSON key for the name of the message's class."""
EXIT_CODES = range(-64, 256)


@dataclass(frozen=True)
class Beat:
    """The sender is alive."""


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
    """The reason why the node cannot take part."""

    why: str
    hint: str = ""
    """What the user can do to make the node usable."""


@dataclass(frozen=True)
class WorkerExited:
    """A worker, or torchrun itself, has failed."""

    group: int
    number: int
    """Number of the group's start."""
    rank: int
    """The global rank."""
    summary: str
    was_killed: bool = False
    """True if the worker was killed by SIGKILL."""


@dataclass(frozen=True)
class WorkersOrphaned:
    """torchrun has exited and left workers behind."""

    group: int
    number: int


@dataclass(frozen=True)
class GroupExited:
    """All processes launched on the node when the group was started have ended."""

    group: int
    number: int
    exit_code: int | None
    """torchrun's exit code, negative for a signal; None if torchrun had to be killed."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be killed."""
    oom_kills: int = 0
    """Number of processes that the kernel has killed since the start because memory ran out."""
    memory_bytes: int = 0
    """Memory of the node, or the limit of its container if that is lower."""
    faults: tuple[NodeFault, ...] = ()
    """If the group failed: what the node's kernel, GPUs and NICs have reported since the start."""


@dataclass(frozen=True)
class StepsMade:
    """How far a user-defined command has progressed on the node since this start."""

    group: int
    number: int
    made: int


@dataclass(frozen=True)
class RankStands:
    """The position in the code of a rank that has made no progress for a long time."""

    rank: int
    host: str
    step: int
    """The newest step that the rank has completed."""
    stack: str
    """Stack of the main thread."""
    place: str
    """The innermost line of the user's code, and the function of torch or another library that this line called."""
    waiting: bool
    """True if the main thread is in torch or another training library."""
    stopped: bool
    """True if it was stopped by SIGSTOP."""
    ended: bool
    collectives: tuple[Collective, ...] = ()
    """The newest collectives of each process group, if the rank could be asked for its flight recorder."""


@dataclass(frozen=True)
class NodeStands:
    """On this node, no rank of a user-defined command is making progress."""

    group: int
    number: int
    waited_s: float
    deadline_s: float
    ranks: tuple[RankStands, ...]
    is_over: bool = True
    """False if this is only a suspicion, long before the time limit."""


@dataclass(frozen=True)
class ProcessSilent:
    """A process of a user-defined command whose steps are not counted."""

    rank: int | None
    """The rank stated in the process's environment."""
    host: str
    pid: int
    command: str
    """The last part of the process's command line."""
    stopped: bool
    """True if it was stopped by SIGSTOP."""


@dataclass(frozen=True)
class NodeSilent:
    """No step of a user-defined command has been counted on the node, and none of the command's processes there is
    making progress."""

    group: int
    number: int
    waited_s: float
    processes: tuple[ProcessSilent, ...]
    """The first few stopped processes, or the first few of all processes if none is stopped."""


@dataclass(frozen=True)
class NodeWorks:
    """A rank or process of the node is making progress again after a standstill or silence."""

    group: int
    number: int


@dataclass(frozen=True)
class WorkedLong:
    """A user-defined command whose steps are not counted has run on the node for a long time, so its state has most
    likely advanced."""

    group: int
    number: int


@dataclass(frozen=True)
class StopAsked:
    """The agent was asked to stop. Slurm asks all agents."""


@dataclass(frozen=True)
class Goodbye:
    """No process is left on the node, and the agent is exiting."""


# hub -> agent


@dataclass(frozen=True)
class StartGroup:
    group: int
    number: int


@dataclass(frozen=True)
class StopWorkers:
    group: int | None
    """The group to stop, or None to stop all groups because the run should end."""


@dataclass(frozen=True)
class KillGroup:
    group: int
    number: int


@dataclass(frozen=True)
class HangFound:
    """A user-defined command hangs; the node should record where in the code its ranks are."""

    late: tuple[int, ...]
    """The ranks that all other ranks are waiting for."""
    why: str
    is_over: bool
    """Same as in NodeStands."""


@dataclass(frozen=True)
class NumberTaken:
    """Another agent already has this node's number, so this agent is rejected."""

    hostname: str


@dataclass(frozen=True)
class EndAgent:
    """Kill everything that is running on the node, then exit."""

    why: str = ""
    """Why the run does not use the node; empty if the start has ended for all nodes."""


# worker -> hub


@dataclass(frozen=True)
class WorkerHello:
    rank: int
    """The global rank."""


@dataclass(frozen=True, kw_only=True)
class SpeedsReport:
    """The confirmed speeds and the sample counts of all ranks. Rank 0 sends them when they change."""

    step: Count
    """Number of updates completed when this was sent."""
    step_s: Seconds
    """Compute time of the slowest rank in the last step, including the exchanges in its micro-batches."""
    layout: Layout
    """The layout that the speeds were measured in."""
    micro_batches: Count
    """Number of micro-batches per rank per step."""
    samples: tuple[Count, ...]
    """Number of samples per step, indexed by global rank like the lists below."""
    fixed_s: tuple[Seconds, ...]
    """Fixed part of the time for a micro-batch's forward and backward pass, in seconds."""
    per_sample_s: tuple[Seconds, ...]
    """Additional time per sample of the micro-batch, in seconds."""
    links: tuple[MeasuredLink, ...] = ()
    """The links with known speeds."""

    @property
    def compute_s(self) -> tuple[float, ...]:
        """Return each rank's compute time per step in seconds, excluding waits for other ranks."""
        each = zip(self.samples, self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + samples * sample_s for samples, fixed_s, sample_s in each)

    @property
    def even_s(self) -> tuple[float, ...]:
        """Return the compute time per step, in seconds, that each rank would have if all ranks had the same number of
        samples."""
        share = sum(self.samples) / len(self.samples)
        each = zip(self.fixed_s, self.per_sample_s, strict=True)
        return tuple(self.micro_batches * fixed_s + share * sample_s for fixed_s, sample_s in each)


# worker -> hub -> all other workers


@dataclass(frozen=True)
class ShortageNote:
    """A rank has run out of memory. The other ranks may never finish this step."""

    rank: int
    step: int
    """Number of updates completed before that step."""


# hub -> worker; this includes the `LookOrder` sent to the rank that is to be profiled


@dataclass(frozen=True)
class Proposal:
    """Sent to rank 0: another layout that would make the run faster. The ranks agree on the step when they switch to
    it."""

    number: int
    """Number of the supervisor's proposal, starting at 1."""
    before: Layout
    """The layout that the proposal was computed for; in any other layout, it is ignored."""
    proposal: LayoutProposal


@dataclass(frozen=True)
class ExpectGroups:
    """Number of replica groups that are running or may still join. Before its first step, a run waits for all of
    them."""

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
    """Decode a message. Raises ValueError, or RecipeError (with every mismatched field), if the object is not a valid
    message."""
    plain = parse_json(line)
    kind = plain.pop(KIND, None) if isinstance(plain, dict) else None
    if not isinstance(kind, str) or kind not in _MESSAGES:
        raise ValueError("not a message of this protocol")
    message: Message = from_plain(_MESSAGES[kind], plain)
    if isinstance(message, GroupExited) and message.exit_code is not None and message.exit_code not in EXIT_CODES:
        raise ValueError(f"{message.exit_code} is not a process's exit code")
    return message
