"""The state of a run in this process. The trainer owns it, and its helpers read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.nodes import NodeDisks
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.startup import Startup
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.paths import RunDir


@dataclass
class TrainingRun:
    """The run's inputs, and its current plan and state.

    Only the trainer sets `plan` and `state`, when the layout changes. Helpers keep a reference to this object and read
    both at each use, so they do not have to be notified of changes.
    """

    plan: Plan
    state: TrainState
    run_dir: RunDir
    recipe_digest: str
    stop: StopRequest
    journal: Journal
    """The log of this rank's events."""
    group: int | None = None
    """The number of this replica group, if there are several."""
    supervisor: SupervisorConnection = field(default_factory=SupervisorConnection)
    """The default has no address, so no messages arrive."""
    startup: Startup = field(default_factory=Startup)
    disks: NodeDisks | None = None
    """The disks of nodes that do not share the run folder; None if all nodes share it."""

    @property
    def group_field(self) -> int | Absent:
        """Return `group` in the form used in events: absent if there is only one group."""
        return ABSENT if self.group is None else self.group


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run."""

    step: int = 0
    """Number of updates made."""
    samples: int = 0
    """Number of samples read by all ranks, which is also the position of the next sample."""
