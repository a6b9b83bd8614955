"""The state of a run and of its replica groups, the events that change it, and the actions that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage

Phase = Literal["waiting", "running", "ending", "done", "gone"]
Presence = Literal["there", "awaited", "away"]
"""The nodes of a group: all are there; some may still come; or one is not waited for (it may come all the same)."""


class GroupState(NamedTuple):
    """A replica group; times are seconds of the clock that `Tick` brings."""

    phase: Phase = "waiting"
    presence: Presence = "awaited"
    starts: int = 0
    restarts_s: tuple[float, ...] = ()
    """When it was started again, within the last hour."""
    start_at_s: float = -math.inf
    """waiting: not before."""
    kill_at_s: float = math.inf
    """running: it has failed, and its workers have until then."""
    failures_in_a_row: int = 0
    """Failures since it last made a step."""
    needs_generation: bool = False
    """waiting: its next start is a new generation of the run."""
    checkpoint_step: int = 0
    """The newest checkpoint when it was last started."""
    stepped_s: float = 0.0
    """When it was last seen to have made a step; 0 before the first of this start."""
    retried_s: float = 0.0
    """When it was last seen to begin a step again, because an exchange had failed."""
    taken: MemorySetting | None = None
    """The setting that it was last started with because its memory had run out."""
    cause: str = ""
    reached_step: int = 0
    """How far it had come when it last failed, and why (`GroupEnded.cause`)."""
    is_planned: bool = False
    """waiting: it ended for want of memory, or to leave a node out, so that its next start is no restart after a
    failure."""


class RunState(NamedTuple):
    """The state of a run. Tuples, since a forecast makes hundreds of thousands of them (`_replace`)."""

    resilience: ResilienceSpec
    groups: tuple[GroupState, ...]
    stop_grace_s: float = 0.0
    checkpoint_step: int = 0
    """The newest, 0 where there is none."""
    now_s: float = 0.0
    deadline_s: float = math.inf
    """The workers were asked to stop, and have until then."""
    stop_requested: bool = False
    """A person or a scheduler wants the run to end."""
    stopping: bool = False
    killed: bool = False
    """True where the processes that are left are to be killed: at the deadline, at a second request, or before there
    was anything to save."""
    has_begun: bool = False
    """True once the workers of this generation have written an event: before that there is nothing to save."""
    has_stepped: bool = False
    expected_groups: int = 0
    """The number of groups that run or may still come, of several."""
    given_up: str = ""
    """Why the run ends although nobody wanted it to: too few groups are left."""
    last_failure: str = "their nodes did not come"
    exit_code: int | None = None
    """The exit code of the last group that has ended."""
    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings to take in turn where memory runs out."""
    leaving: NodeSlow | None = None
    """The workers were asked to write a checkpoint and end, and the next start is without this node."""
    left_out: tuple[int, ...] = ()
    """Nodes that were left out."""
    restarts_left: int | None = None
    """Starts after failures that are left, of a job that has a number of them and keeps its checkpoints itself: the
    steps that it has made stand for them here. None: the resilience decides."""

    @property
    def is_alone(self) -> bool:
        return len(self.groups) == 1

    @property
    def is_over(self) -> bool:
        return self.killed or not any(group.phase in ("waiting", "running", "ending") for group in self.groups)

    @property
    def is_lost(self) -> bool:
        """Return whether no group holds the training state any more: it has to be read from a checkpoint."""
        return not any(group.phase == "running" for group in self.groups)

    @property
    def is_ending(self) -> bool:
        """Return whether no group is started any more."""
        return self.stopping or any(group.phase == "done" for group in self.groups)


# Events: what was observed


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now_s: float


@dataclass(frozen=True)
class PresenceChanged:
    group: int
    presence: Presence


@dataclass(frozen=True)
class Begun:
    """The group's workers have written their first event."""

    group: int


@dataclass(frozen=True)
class Stepped:
    group: int


@dataclass(frozen=True)
class Retried:
    group: int


@dataclass(frozen=True)
class WorkerFailed:
    """A worker or a torchrun of the group has failed; others of it may live."""

    group: int


@dataclass(frozen=True)
class Orphaned:
    """A torchrun of the group has ended, and has left workers behind."""

    group: int


@dataclass(frozen=True)
class GroupEnded:
    """Nothing is left of the group's start, but for processes that hang in the kernel."""

    group: int
    done: bool
    headline: str = ""
    """Why it failed, where it did."""
    exit_code: int | None = None
    """torchrun's, negative for a signal; None where it had to be killed."""
    own_error: bool = False
    """A worker has reported an error of its own."""
    foreseen: bool = False
    """The error would come again where the run is started again as it is."""
    from_outside: bool = False
    """Workers or torchrun were ended by a signal or without a report, and none has reported an error."""
    checkpoint_step: int = 0
    """The newest checkpoint by now; of a command of the user's own the steps that all its starts have made."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be ended."""
    shortage: Shortage | None = None
    """Its memory ran out, and that is why it failed."""
    has_worked: bool = False
    """A command of the user's own, none of whose steps is counted, has worked for long: its state has most likely come
    further."""
    cause: str = ""
    """Of a command of the user's own: the exception that ended it, and where it was raised; empty where none is known,
    or where it came from outside."""
    reached_step: int = 0
    """Of a command of the user's own: the furthest step of any of its starts."""
    was_killed: bool = False
    """Workers or torchrun were ended by SIGKILL."""


@dataclass(frozen=True)
class NodeLost:
    node: int
    hostname: str
    why: str
    groups: tuple[int, ...]
    """Groups that run there, or partly."""


@dataclass(frozen=True)
class NodeBack:
    node: int


@dataclass(frozen=True)
class NodeUnfit:
    """A node cannot take part: it lacks something, or is too slow."""

    node: int
    hostname: str
    why: str
    hint: str = ""


@dataclass(frozen=True)
class NodeSlow:
    """The run is expected to go on faster without a node, by more than that costs (`leave_out.py`)."""

    node: int
    hostname: str
    why: str


@dataclass(frozen=True)
class NodesSeen:
    """Other nodes are there than before: those of the run, and those that stand by."""

    hostnames: tuple[str, ...]
    """The nodes' names by place, the run's own first; empty for a node that is not there."""
    waiting: str = ""
    """For people: which of the run's own nodes are missing, where some are there."""


@dataclass(frozen=True)
class AgentsFailed:
    """The command that starts the nodes' agents has ended before any of them came."""

    exit_code: int


@dataclass(frozen=True)
class StopRequested:
    """The supervisor was asked to stop, `times` so far."""

    times: int


@dataclass(frozen=True)
class NodeStopRequested:
    """The agent of a node was asked to stop."""

    node: int


@dataclass(frozen=True)
class RendezvousRestarted:
    """The rendezvous server had ended, and was started again."""


Event = (
    Tick | PresenceChanged | Begun | Stepped | Retried | WorkerFailed | Orphaned | GroupEnded
    | NodeLost | NodeBack | NodeUnfit | NodeSlow | NodesSeen | AgentsFailed | StopRequested | NodeStopRequested
    | RendezvousRestarted
)  # fmt: skip


# Actions: what is to be done


@dataclass(frozen=True)
class Launch:
    group: int
    number: int
    """The number of the group's start, from 1."""


@dataclass(frozen=True)
class Stop:
    """Ask workers to write a checkpoint and end: all of them, because the run is to end, or those of one group."""

    group: int | None = None


@dataclass(frozen=True)
class Kill:
    group: int


@dataclass(frozen=True)
class BeginGeneration:
    """Close what is left of this generation of the run, and open the next, which goes on from the newest checkpoint."""


@dataclass(frozen=True)
class TakeSetting:
    """Write the directive by which the next start takes less memory."""

    group: int
    shortage: Shortage
    taken: MemorySetting
    reason: str


@dataclass(frozen=True)
class LeaveOut:
    """Let the next start be without a node: on a spare one where there is one, else on fewer."""

    node: int


@dataclass(frozen=True)
class Inform:
    """People should know."""

    text: str


@dataclass(frozen=True)
class MarkFailure:
    """Note when the run was found to have failed."""


@dataclass(frozen=True)
class ArchiveErrors:
    """Move the error reports of a start that is made good again to its logs."""

    group: int


@dataclass(frozen=True)
class RecordLosses:
    """Write down the nodes that are lost or unfit: the run ends because of them."""


@dataclass(frozen=True)
class Expect:
    """Let a run that has not stepped yet wait for this many groups."""

    groups: int


@dataclass(frozen=True)
class Refuse:
    """End the run, which cannot begin."""

    code: str
    message: str
    hint: str = ""


Action = (
    Launch | Stop | Kill | BeginGeneration | TakeSetting | LeaveOut | Inform
    | MarkFailure | ArchiveErrors | RecordLosses | Expect | Refuse
)  # fmt: skip
Decision = tuple[RunState, tuple[Action, ...]]
