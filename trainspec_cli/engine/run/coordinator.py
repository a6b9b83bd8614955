"""The coordinator determines which replica groups take part in each step, and exchanges gradients between the groups.

An ordinary run is one replica group (`Coordinator`); `replica_groups.py` contains the coordinator of several. A plug-in
can provide another coordinator for its kind of run (`COORDINATORS`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainspec_cli.balance.batch.division import Division, OwnSamples, even_division_of
from trainspec_cli.core.wings import Point
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.data.loader import BatchReader
from trainspec_cli.engine.digest import MicroBatch
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.recipe.rules.check import parts_for


@dataclass(frozen=True)
class StepStart:
    progress: TrainProgress
    """The run's progress at the start of the step. It has jumped ahead if the state was healed or restored."""
    stop: bool = False
    """True if the run ends here, without another step."""


@dataclass(frozen=True)
class StepSamples:
    micro_batches: list[MicroBatch]
    """This rank's samples, on the device."""
    own: OwnSamples
    """The positions of these samples in the run."""
    division: Division
    """The division of the replica group's samples over its ranks."""
    global_tokens: int
    """Number of targets with a loss, over all replica groups. The step's loss is the mean over them."""
    step_samples: int
    """Number of samples in the step, over all replica groups."""
    group_samples: int
    """Number of samples in the step, in this replica group."""
    lr_factor: float = 1.0
    """Factor by which the learning rate is multiplied."""
    group: int | Absent = ABSENT
    """The number of this replica group, if there are several."""
    groups: tuple[int, ...] | Absent = ABSENT
    """The replica groups that take part in the step."""
    took: tuple[int, int] | Absent = ABSENT
    """The position of this replica group's first sample, and the number of its samples."""


class Coordinator:
    """The coordinator of a run with one replica group, which does not wait for or communicate with other groups.
    Coordinators of other runs override methods. All ranks of the replica group call the methods collectively, for each
    step in the order below.
    """

    restores_at_start = True
    """True if the trainer restores the state from a checkpoint before the first step; otherwise `begin` heals or
    restores it."""
    waits_for_groups = False
    """True if each step waits for other replica groups, so its results are on the host when it ends."""
    merges_at_end = False
    """True if only `bring_together` produces the weights of the last step, so they cannot be saved earlier."""
    leads = True
    """True if this replica group writes the run's log and its checkpoints."""
    finished_without = False
    """True if the other replica groups finished the run before this group returned. This group then does not change the
    result."""

    def __init__(self, run: TrainingRun, source: DataSource):
        self._run = run
        self._source = source
        self._spec = run.plan.spec
        self.division = even_division_of(run.plan)
        """The division of the group's samples over its ranks; the trainer sets it before each step."""
        self.rate = 0.0
        """Speed of this replica group in samples per second; 0 if unknown or not used."""
        self._reader = BatchReader(source.read, source.staging)
        self._read_in = run.plan.layout
        """The layout that batches are prefetched for."""

    @property
    def stop_flag(self) -> bool:
        """True if this rank reports a request to stop in the step's exchange."""
        return self._run.stop.requested

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        """Wait until the step can start, and heal this group if it is behind. `restore` loads the newest checkpoint;
        called if no replica group holds the state any more.
        """
        return StepStart(progress)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        """Read this rank's part of the first of `steps`, which are pairs (first position, samples over all replica
        groups). The remaining steps are those that will most likely follow."""
        (start, samples), *_ = steps
        own, micro_batches = self.read(*steps)
        targets = self.count_targets(start, samples)
        return StepSamples(micro_batches, own, self.division, targets, step_samples=samples, group_samples=samples)

    def read(self, step: tuple[int, int], *following: tuple[int, int]) -> tuple[OwnSamples, list[MicroBatch]]:
        """Read this rank's part of a step, and start prefetching the steps that will most likely follow. A step is
        specified by the position of the group's first sample and the number of samples.
        """
        if self._read_in != self._run.plan.layout:
            # After a change of layout, a rank may have the same samples but a different part of each sequence.
            self._reader.forget()
            self._read_in = self._run.plan.layout
        state = self._run.state
        rank = state.mesh.data_rank
        own, *coming = (self.division.of_rank(rank, start, samples) for start, samples in (step, *following))
        with state.clock.part("data_wait"):
            return own, self._reader.take(own, coming)

    def count_targets(self, start: int, samples: int) -> int:
        """Return the number of targets in the samples from position `start` on. The loss is the mean over them."""
        return self._source.counted(np.arange(start, start + samples))

    def begin_passes(self, state: TrainState, micro_batches: int) -> None:
        """Begin a step's passes. From now on, gradients may be exchanged as soon as they are final."""

    def abandon_passes(self, state: TrainState) -> None:
        """Abandon passes that an error has interrupted. The step fails if any gradients were already exchanged."""

    def reduce(self, state: TrainState, loss: Tensor) -> None:
        """Sum the gradients, `loss` and the experts' token counts over the replica groups, in place."""

    def commit(self) -> bool:
        """Return whether the step succeeded in every replica group. If not, it is repeated."""
        return True

    def note_step(self, step: int, step_time_s: float) -> None:
        """Record the results of the step that made update `step`."""

    def bring_together(self, progress: TrainProgress) -> None:
        """After all steps, exchange the data that remains to be exchanged. A second call does nothing."""

    def merged(self) -> AbstractContextManager[None]:
        """Return a context that puts the run's final weights into the model for evaluation."""
        return nullcontext()

    def leave(self) -> None:
        """End all exchanges, because no further step follows."""
        self._reader.close()


COORDINATORS: Point[Callable[[TrainingRun, DataSource], Coordinator]] = Point("coordinator")
"""Coordinators from plug-ins; a plug-in's coordinator serves the runs whose recipe uses the plug-in."""


def open_coordinator(run: TrainingRun, source: DataSource) -> Coordinator:
    """Create the run's coordinator. The coordinators of plug-ins and of several replica groups are imported only by
    runs that use them, because importing them would slow down every start."""
    for make in parts_for(COORDINATORS, run.plan.spec):
        return make(run, source)
    if run.group is None:
        return Coordinator(run, source)
    from trainspec_cli.engine.run.replica_groups import ReplicaGroups

    return ReplicaGroups(run, source)
