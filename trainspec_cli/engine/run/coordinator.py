"""The trainer asks its coordinator who takes part in each step, and what is exchanged beyond its own ranks.

An ordinary run is one replica group (`SingleGroup`); `replica_groups.py` has the coordinator of several. A wing gives
another one for runs of its own kind (`COORDINATORS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import Division, OwnSamples, even_division_of
from trainspec_cli.core.wings import Point
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import BatchReader
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.engine.run.faults import StopRequest
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import parts_for
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.paths import RunDir


@dataclass(frozen=True)
class RunContext:
    """All that a run is made of: what the trainer and its coordinator are given."""

    plan: Plan
    run_dir: RunDir
    source: DataSource
    state: TrainState
    recipe_digest: str
    stop: StopRequest
    supervisor: SupervisorConnection = field(default_factory=SupervisorConnection)
    """Without an address it hears nothing."""


@dataclass(frozen=True)
class TrainProgress:
    """The progress of a run."""

    step: int = 0
    """Updates made."""
    samples: int = 0
    """Samples that all ranks have taken: the position of the next one."""


@dataclass(frozen=True)
class StepStart:
    progress: TrainProgress
    """Where the step begins: further than before where the state was healed or restored."""
    stop: bool = False
    """No step is made: the run ends here."""


@dataclass(frozen=True)
class StepSamples:
    micro_batches: list[MicroBatch]
    """This rank's, on the device."""
    own: OwnSamples
    """Their positions in the run."""
    division: Division
    """How the group's samples were divided."""
    global_tokens: int
    """Targets that count, over all replica groups: the step's loss is the mean over them."""
    step_samples: int
    """Samples of all replica groups together."""
    group_samples: int
    """Samples of this group."""
    lr_factor: float = 1.0
    """The learning rate is multiplied by it."""
    group: int | Absent = ABSENT
    """The number of this replica group, where there are several."""
    groups: tuple[int, ...] | Absent = ABSENT
    """The replica groups that take part in the step."""
    took: tuple[int, int] | Absent = ABSENT
    """The first sample of this replica group, and the number of its samples."""


class Coordinator(Protocol):
    """All methods are called by every rank of the replica group together, in this order for each step."""

    restores_at_start: bool
    """The state comes from a checkpoint before the first step; else `begin` heals or restores it."""
    waits_for_groups: bool
    """Each step waits for other replica groups, and its figures have reached the host when it ends."""
    merges_at_end: bool
    """The weights of the last step are those that `bring_together` makes: none are saved before."""
    leads: bool
    """This replica group writes the run's log and its checkpoints."""
    finished_without: bool
    """The other replica groups had finished the run before this one came back: it leaves their result as it is."""
    batches: GroupBatches
    """The samples of this replica group."""

    @property
    def group(self) -> int | None:
        """The number of this replica group, where there are several."""

    @property
    def journal(self) -> Journal | GroupJournal:
        """The log of this rank's events."""

    @property
    def stop_flag(self) -> bool:
        """True where the step's exchange carries a request to stop from this rank to the others."""

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        """Wait until the step can be made, and heal this group where it is behind.

        `restore` loads the newest checkpoint, for the case that no replica group holds the state any more.
        """

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        """Read this rank's part of the first of `steps`: (first position, samples over all replica groups).

        The others are those that most likely follow.
        """

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        """Begin a step's passes: from now on gradients that are final may be exchanged."""

    def abandon_passes(self, state: TrainState) -> None:
        """An error has cut the passes short: the step fails where gradients were exchanged."""

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        """Sum gradients, `loss` and the experts' visits over the replica groups, in place."""

    def commit(self) -> bool:
        """Return whether every replica group has made the step; if not, it is made again."""

    def note_step(self, step: int, step_time_s: float) -> None:
        """Record what the step that made update `step` says of the replica groups."""

    def bring_together(self, progress: TrainProgress) -> None:
        """All steps are made: exchange what is left. A second call does nothing."""

    def merged(self) -> AbstractContextManager[None]:
        """Have the weights in the model, inside, by which the run is judged."""

    def leave(self) -> None:
        """End all exchange: no step follows."""


COORDINATORS: Point[Callable[[RunContext], Coordinator]] = Point("coordinator")
"""The coordinator of runs whose recipe uses the wing."""


class GroupBatches:
    """Takes the samples of this replica group as micro-batches of this rank, on the device."""

    def __init__(self, run: RunContext):
        self.division = even_division_of(run.plan)
        """May be changed between steps."""
        self.rate = 0.0
        """Samples that this replica group computes a second; 0 where that is not known, or nothing follows from it."""
        self._source = run.source
        self._clock = run.state.clock
        self._rank = run.state.mesh.data_rank
        self._reader = BatchReader(run.source.read, run.source.staging)

    def take(self, step: tuple[int, int], *following: tuple[int, int]) -> tuple[OwnSamples, list[MicroBatch]]:
        """Read this rank's part of a step, and start to read what most likely follows.

        A step is given by the position of the group's first sample and their number.
        """
        own, *coming = (self.division.of_rank(self._rank, start, samples) for start, samples in (step, *following))
        with self._clock.part("data_wait"):
            return own, self._reader.take(own, coming)

    def count_targets(self, start: int, samples: int) -> int:
        """Count what the loss of the samples from position `start` on is the mean over."""
        return self._source.counted(np.arange(start, start + samples))

    def adopt(self, run: RunContext) -> None:
        """Go on in another layout: what was read ahead is forgotten."""
        self.division = even_division_of(run.plan)
        self._rank = run.state.mesh.data_rank
        self._reader.forget()

    def close(self) -> None:
        self._reader.close()


class SingleGroup:
    """The only replica group of its run: nobody to wait for, nothing to exchange, nothing that others do."""

    restores_at_start = True
    leads = True
    waits_for_groups = False
    merges_at_end = False
    finished_without = False
    group = None

    def __init__(self, run: RunContext):
        self._run = run
        self._spec = run.plan.spec
        self.journal = Journal(run.run_dir, dist.get_rank(), run.plan.spec)
        self.batches = GroupBatches(run)

    @property
    def stop_flag(self) -> bool:
        return self._run.stop.requested

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        return StepStart(progress)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        (start, samples), *_ = steps
        own, micro_batches = self.batches.take(*steps)
        targets = self.batches.count_targets(start, samples)
        return StepSamples(
            micro_batches, own, self.batches.division, targets, step_samples=samples, group_samples=samples
        )

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        pass

    def abandon_passes(self, state: TrainState) -> None:
        pass

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        pass

    def commit(self) -> bool:
        return True

    def note_step(self, step: int, step_time_s: float) -> None:
        pass

    def bring_together(self, progress: TrainProgress) -> None:
        pass

    def merged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def leave(self) -> None:
        self.batches.close()


def open_coordinator(run: RunContext) -> Coordinator:
    """A wing's coordinator, and that of several replica groups, are imported where a run has them, and not elsewhere:
    they make every start longer."""
    for make in parts_for(COORDINATORS, run.plan.spec):
        return make(run)
    if run.plan.replica_groups == 1:
        return SingleGroup(run)
    from trainspec_cli.engine.run.replica_groups import ReplicaGroups, own_rank

    return ReplicaGroups(run, own_rank())
