"""The state of a run and of its replica groups, the events that change it, and the actions that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage

Phase = Literal["waiting", "running", "ending", "done", "gone"]
Presence = Literal["there", "awaited", "away"]
"""The nodes of a group: all are connected; some may still come; or one is not waited for (it may come nevertheless)."""


class GroupState(NamedTuple):
    """A replica group; times are seconds of the clock in `Tick`."""

    phase: Phase = "waiting"
    presence: Presence = "awaited"
    starts: int = 0
    restarts_s: tuple[float, ...] = ()
    """Times of its restarts within the last hour."""
    start_at_s: float = -math.inf
    """waiting: the earliest time of its next start."""
    kill_at_s: float = math.inf
    """running: it has failed, and its workers have until then."""
    failures_in_a_row: int = 0
    """Failures since it last made a step."""
    needs_generation: bool = False
    """waiting: its next start is a new generation of the run."""
    checkpoint_step: int = 0
    """The newest checkpoint at its last start."""
    stepped_s: float = 0.0
    """Time of its last step; 0 before the first step of this start."""
    retried_s: float = 0.0
    """Time when it last began a step again, because an exchange had failed."""
    taken: MemorySetting | None = None
    """The setting of its last start after a memory shortage."""
    cause: str = ""
    reached_step: int = 0
    """Its step at the last failure, and the cause (`GroupEnded.cause`)."""
    is_planned: bool = False
    """waiting: it ended for lack of memory, or to leave a node out, so that its next start does not count as a restart
    after a failure."""


class RunState(NamedTuple):
    """The state of a run. Tuples, since a forecast makes hundreds of thousands of them (`_replace`)."""

    resilience: ResilienceSpec
    groups: tuple[GroupState, ...]
    stop_grace_s: float = 0.0
    checkpoint_step: int = 0
    """The newest step, 0 without one."""
    now_s: float = 0.0
    deadline_s: float = math.inf
    """The workers were asked to stop, and have until then."""
    stop_requested: bool = False
    """A user or a scheduler has asked the run to end."""
    stopping: bool = False
    killed: bool = False
    """True where the remaining processes are to be killed: at the deadline, at a second request, or before they had
    anything to save."""
    has_begun: bool = False
    """True once the workers of this generation have written an event: before that they have nothing to save."""
    has_stepped: bool = False
    expected_groups: int = 0
    """The number of groups that run or may still come, of several."""
    given_up: str = ""
    """Why the run ends without a request: too few groups are left."""
    last_failure: str = "their nodes did not come"
    exit_code: int | None = None
    """The exit code of the last group that has ended."""
    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings to use one after another when memory runs out."""
    leaving: NodeSlow | None = None
    """The workers were asked to write a checkpoint and end, and the next start is without this node."""
    left_out: tuple[int, ...] = ()
    """Nodes that were left out."""
    restarts_left: int | None = None
    """Remaining restarts after failures, of a job that has a fixed number of them and keeps its checkpoints itself: its
    steps take the place of checkpoints here. None: the resilience decides."""

    @property
    def is_alone(self) -> bool:
        return len(self.groups) == 1

    @property
    def is_over(self) -> bool:
        return self.killed or not any(group.phase in ("waiting", "running", "ending") for group in self.groups)

    @property
    def is_lost(self) -> bool:
        """Return whether no group holds the training state any more, so that it has to be read from a checkpoint."""
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
    """A worker or a torchrun of the group has failed; others of it may be alive."""

    group: int


@dataclass(frozen=True)
class Orphaned:
    """A torchrun of the group has ended, and has left workers behind."""

    group: int


@dataclass(frozen=True)
class GroupEnded:
    """No process of the group's start is left, except those that hang in the kernel."""

    group: int
    done: bool
    headline: str = ""
    """Why it failed, if it did."""
    exit_code: int | None = None
    """torchrun's exit code, negative for a signal; None where torchrun had to be killed."""
    own_error: bool = False
    """A worker has reported an error of its own."""
    foreseen: bool = False
    """The error would come again if the run were restarted unchanged."""
    from_outside: bool = False
    """Workers or torchrun were ended by a signal or without a report, and none has reported an error."""
    checkpoint_step: int = 0
    """The newest checkpoint; for a user-defined command the steps that all its starts have made."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be ended."""
    shortage: Shortage | None = None
    """It failed because its memory ran out."""
    has_worked: bool = False
    """A user-defined command without counted steps has worked for long: its state has most likely advanced."""
    cause: str = ""
    """For a user-defined command: the exception that ended it, and where it was raised; empty where that is unknown, or
    where the failure came from outside."""
    reached_step: int = 0
    """For a user-defined command: the furthest step of any of its starts."""
    was_killed: bool = False
    """Workers or torchrun were ended by SIGKILL."""


@dataclass(frozen=True)
class NodeLost:
    node: int
    hostname: str
    why: str
    groups: tuple[int, ...]
    """Groups that run there, at least in part."""


@dataclass(frozen=True)
class NodeBack:
    node: int


@dataclass(frozen=True)
class NodeUnfit:
    """A node cannot take part: it is unfit, or too slow."""

    node: int
    hostname: str
    why: str
    hint: str = ""


@dataclass(frozen=True)
class NodeSlow:
    """The run is expected to be faster without a node, by more than leaving it out costs
    (`balance/decisions/shares.py`)."""

    node: int
    hostname: str
    why: str


@dataclass(frozen=True)
class NodesSeen:
    """The set of connected nodes has changed: those of the run, and the spares."""

    hostnames: tuple[str, ...]
    """The nodes' names by place, the run's own first; empty for a node that is not connected."""
    waiting: str = ""
    """For messages: the run's own nodes that are missing, if only some are."""


@dataclass(frozen=True)
class AgentsFailed:
    """The command that starts the nodes' agents has ended before any of them connected."""

    exit_code: int


@dataclass(frozen=True)
class StopRequested:
    """The supervisor was asked to stop, `times` times so far."""

    times: int


@dataclass(frozen=True)
class NodeStopRequested:
    """The agent of a node was asked to stop."""

    node: int


@dataclass(frozen=True)
class RendezvousRestarted:
    """The rendezvous server had ended, and was restarted."""


Event = (
    Tick | PresenceChanged | Begun | Stepped | Retried | WorkerFailed | Orphaned | GroupEnded
    | NodeLost | NodeBack | NodeUnfit | NodeSlow | NodesSeen | AgentsFailed | StopRequested | NodeStopRequested
    | RendezvousRestarted
)  # fmt: skip


# Actions: what the supervisor does


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
    """Close what is left of this generation of the run, and open the next, which continues from the newest
    checkpoint."""


@dataclass(frozen=True)
class TakeSetting:
    """Write the directive that makes the next start use less memory."""

    group: int
    shortage: Shortage
    taken: MemorySetting
    reason: str


@dataclass(frozen=True)
class LeaveOut:
    """Make the next start without the node: with a spare if there is one, else with fewer nodes."""

    node: int


@dataclass(frozen=True)
class Inform:
    """Show a message to the user."""

    text: str


@dataclass(frozen=True)
class MarkFailure:
    """Record the time at which the run was found to have failed."""


@dataclass(frozen=True)
class ArchiveErrors:
    """Move the error reports of a start that is followed by another to its logs."""

    group: int


@dataclass(frozen=True)
class RecordLosses:
    """Record the lost or unfit nodes that end the run."""


@dataclass(frozen=True)
class Expect:
    """Let a run that has not made a step yet wait for this number of groups."""

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
