"""The state of a run and of its replica groups, the events that change it, and the actions that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage

Phase = Literal["waiting", "running", "ending", "done", "gone"]
Presence = Literal["there", "awaited", "away"]
"""The presence of a group's nodes: all are connected, some are missing but awaited, or one is no longer awaited (though
it may still connect)."""


class GroupState(NamedTuple):
    """A replica group. Times are in seconds on the clock of `Tick`."""

    phase: Phase = "waiting"
    presence: Presence = "awaited"
    starts: int = 0
    restarts_s: tuple[float, ...] = ()
    """Times of the group's restarts within the last hour."""
    start_at_s: float = -math.inf
    """While waiting: the earliest time for the group's next start."""
    kill_at_s: float = math.inf
    """While running: the deadline by which its workers must exit, because the group has failed."""
    failures_in_a_row: int = 0
    """Number of failures since the group last took a step."""
    needs_generation: bool = False
    """While waiting: True if its next start opens a new generation of the run."""
    checkpoint_step: int = 0
    """Step of the newest checkpoint when the group was last started."""
    stepped_s: float = 0.0
    """Time of the group's last step; 0 before the first step of this start."""
    retried_s: float = 0.0
    """Time when it last retried a step because an exchange had failed."""
    taken: MemorySetting | None = None
    """The setting chosen after its last out-of-memory failure."""
    cause: str = ""
    reached_step: int = 0
    """The group's step at its last failure, and the cause of that failure (`GroupEnded.cause`)."""
    is_planned: bool = False
    """While waiting: True if it ended because memory ran out, or in order to drop a node. Its next start then does not
    count as a restart after a failure."""


class RunState(NamedTuple):
    """The state of a run. It is a named tuple, because a forecast creates hundreds of thousands of them with
    `_replace`."""

    resilience: ResilienceSpec
    groups: tuple[GroupState, ...]
    stop_grace_s: float = 0.0
    checkpoint_step: int = 0
    """Step of the newest checkpoint, or 0."""
    now_s: float = 0.0
    deadline_s: float = math.inf
    """The deadline by which workers that were asked to stop must exit."""
    stop_requested: bool = False
    """True if a user or a scheduler has asked the run to end."""
    stopping: bool = False
    killed: bool = False
    """True if the remaining processes must be killed: after the deadline, after a second request, or because they have
    nothing to save yet."""
    has_begun: bool = False
    """True once the workers of this generation have written an event. Before that, they have nothing to save."""
    has_stepped: bool = False
    expected_groups: int = 0
    """Number of groups that are running or may still join, if the run has several."""
    given_up: str = ""
    """Why the run ends although no stop was requested, for example because too few groups are left."""
    last_failure: str = "their nodes did not connect"
    exit_code: int | None = None
    """The exit code of the last group that ended."""
    memory_ladder: tuple[MemorySetting, ...] = ()
    """The settings to use one after another when memory runs out."""
    survives_lost_nodes: bool = False
    """Whether a single-group run restarts without a lost node. If not, the run ends (and its Slurm job is requeued)."""
    took_over: bool = False
    """Whether another supervisor had the run before, which was lost with its node."""
    leaving: tuple[NodeChange, ...] = ()
    """Why the next start uses other nodes. The workers were asked to exit, or were killed."""
    replaced: tuple[int, ...] = ()
    """Lost, unfit and slow nodes that the current generation does without, until its workers start."""
    left_out: tuple[int, ...] = ()
    """Slow nodes that were dropped."""
    restarts_left: int | None = None
    """Remaining restarts after failures, for a job that has a fixed number of them and manages its own checkpoints. For
    such a job, completed steps count as checkpoints. None if the plan's resilience settings decide."""

    @property
    def is_alone(self) -> bool:
        return len(self.groups) == 1

    @property
    def is_over(self) -> bool:
        return self.killed or not any(group.phase in ("waiting", "running", "ending") for group in self.groups)

    @property
    def is_lost(self) -> bool:
        """Return True if no group holds the training state any more, so that it must be read from a checkpoint."""
        return not any(group.phase == "running" for group in self.groups)

    @property
    def is_ending(self) -> bool:
        """Return whether no further group will be started."""
        return self.stopping or any(group.phase == "done" for group in self.groups)


# Events: the backend's observations


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
    """A worker or a torchrun of the group has failed; other workers in the group may still be alive."""

    group: int


@dataclass(frozen=True)
class Orphaned:
    """One of the group's torchruns has exited and left workers behind."""

    group: int


class HostFault(NamedTuple):
    hostname: str
    fault: NodeFault


@dataclass(frozen=True)
class GroupEnded:
    """All processes launched when the group was started have ended, except for those stuck in the kernel."""

    group: int
    done: bool
    headline: str = ""
    """Why the group failed, if it did."""
    exit_code: int | None = None
    """torchrun's exit code, negative for a signal; None if torchrun had to be killed."""
    own_error: bool = False
    """True if a worker has reported an error in the run's own code."""
    foreseen: bool = False
    """True if the error would recur if the run were restarted unchanged."""
    from_outside: bool = False
    """True if workers or torchrun were ended by a signal or exited without a report, and none has reported an error."""
    checkpoint_step: int = 0
    """Step of the newest checkpoint or, for a user-defined command, the number of steps completed by all of its
    starts."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be killed."""
    shortage: Shortage | None = None
    """The out-of-memory failure that made the group fail, if any."""
    has_worked: bool = False
    """True if a user-defined command whose steps are not counted has run for a long time, so that its state has most
    likely advanced."""
    cause: str = ""
    """For a user-defined command: the exception that ended it, and where it was raised; empty if unknown, or if the
    failure came from outside."""
    reached_step: int = 0
    """For a user-defined command: the furthest step reached by any of its starts."""
    was_killed: bool = False
    """True if workers or torchrun were killed by SIGKILL."""
    faults: tuple[HostFault, ...] = ()
    """What the nodes' kernels and drivers have reported since the start, the faults of machines first."""


@dataclass(frozen=True)
class NodeLost:
    node: int
    hostname: str
    why: str
    groups: tuple[int, ...]
    """Groups that run on the node, at least in part."""


@dataclass(frozen=True)
class NodeBack:
    node: int
    hostname: str = ""


@dataclass(frozen=True)
class NodeUnfit:
    """A node cannot take part because it is unfit or too slow."""

    node: int
    hostname: str
    why: str
    hint: str = ""


@dataclass(frozen=True)
class NodeSlow:
    """The run is expected to gain more time by dropping a node than the drop costs (`balance/decisions/shares.py`)."""

    node: int
    hostname: str
    why: str


@dataclass(frozen=True)
class NodeReturned:
    """A node is connected that a run on fewer nodes than planned can use, and the run is long enough to gain time."""

    node: int
    hostname: str
    why: str


@dataclass(frozen=True)
class NodesSeen:
    """The set of connected nodes, both the run's own and the spares, has changed."""

    hostnames: tuple[str, ...]
    """The nodes' hostnames by place, the run's own nodes first; empty for a node that is not connected."""
    waiting: str = ""
    """For messages: the run's own nodes that are missing, if only some are."""


@dataclass(frozen=True)
class AgentsFailed:
    """The command that starts the nodes' agents has exited before any of them connected."""

    exit_code: int


@dataclass(frozen=True)
class StopRequested:
    """The supervisor was asked to stop, for the `times`-th time."""

    times: int


@dataclass(frozen=True)
class NodeStopRequested:
    """The agent of a node was asked to stop."""

    node: int


@dataclass(frozen=True)
class RendezvousRestarted:
    """The rendezvous server had exited and was restarted."""


@dataclass(frozen=True)
class Noted:
    """A message for the user, which changes nothing."""

    text: str


Event = (
    Tick | PresenceChanged | Begun | Stepped | Retried | WorkerFailed | Orphaned | GroupEnded
    | NodeLost | NodeBack | NodeUnfit | NodeSlow | NodeReturned | NodesSeen | AgentsFailed | StopRequested
    | NodeStopRequested | RendezvousRestarted | Noted
)  # fmt: skip


NodeChange = NodeSlow | NodeLost | NodeUnfit | NodeReturned
"""Why a start of a run uses other nodes than the one before."""


# Actions of the supervisor


@dataclass(frozen=True)
class Launch:
    group: int
    number: int
    """The number of the group's start, counted from 1."""


@dataclass(frozen=True)
class Stop:
    """Ask workers to write a checkpoint and exit: those of one group, or all of them if the run should end."""

    group: int | None = None


@dataclass(frozen=True)
class Kill:
    group: int


@dataclass(frozen=True)
class BeginGeneration:
    """Close the run's current generation and open the next one, which continues from the newest checkpoint."""


@dataclass(frozen=True)
class TakeSetting:
    """Write the directive that makes the next start use less memory."""

    group: int
    shortage: Shortage
    taken: MemorySetting
    reason: str


@dataclass(frozen=True)
class ChangeNodes:
    """Select the nodes of the next start: all that are connected except those that leave, as many as the run was
    planned for."""

    reasons: tuple[NodeChange, ...]


@dataclass(frozen=True)
class Inform:
    """Show a message to the user."""

    text: str


@dataclass(frozen=True)
class MarkFailure:
    """Record when the failure was detected."""


@dataclass(frozen=True)
class ArchiveErrors:
    """Move a start's error reports to its logs before the next start."""

    group: int


@dataclass(frozen=True)
class RecordLosses:
    """Record the lost or unfit nodes that end the run."""


@dataclass(frozen=True)
class Expect:
    """Tell the workers how many groups a run waits for before its first step."""

    groups: int


@dataclass(frozen=True)
class Refuse:
    """End a run that cannot start."""

    code: str
    message: str
    hint: str = ""


Action = (
    Launch | Stop | Kill | BeginGeneration | TakeSetting | ChangeNodes | Inform
    | MarkFailure | ArchiveErrors | RecordLosses | Expect | Refuse
)  # fmt: skip
Decision = tuple[RunState, tuple[Action, ...]]
