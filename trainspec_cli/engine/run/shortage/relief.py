"""Steps that go on where memory runs out: made again with smaller micro-batches, or saved for another start.

A rank that exchanges nothing with others makes the step again in place. Elsewhere the other ranks are inside
collectives that this one has left: they save the state of the step's beginning (`emergency.py`), all processes end, and
the supervisor starts them with the next setting of the plan's ladder (`policy/recovery/memory.py`). Each replica group
is healed by the others instead.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from trainspec_cli.engine.accelerators import release_unused
from trainspec_cli.engine.comm.json_collectives import broadcast_json, errors_together
from trainspec_cli.engine.observe.journal import DirectiveLog
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.optim.optimizer import clear_gradients
from trainspec_cli.engine.parallel.balance import forget_visits
from trainspec_cli.engine.parallel.data_parallel import abandon_passes
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.coordinator import Coordinator, RunContext, TrainProgress
from trainspec_cli.engine.run.shortage.emergency import Emergency
from trainspec_cli.engine.run.shortage.out_of_memory import (
    OutOfMemory,
    PassesOutOfMemory,
    describe_cause,
    is_out_of_memory,
    measure_shortage,
    out_of_memory,
)
from trainspec_cli.recipe.canonical import ABSENT, to_plain
from trainspec_cli.recipe.records import read_record
from trainspec_cli.recipe.results.memory import MemorySetting, Relief, Shortage
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.decisions import MemoryEvent
from trainspec_cli.run.folder.event_types.training import WarningEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.shortages import read_reliefs
from trainspec_cli.run.recovery.memory import next_setting, with_reliefs

Made = TypeVar("Made")
NOT_SAVED = "memory ran out, and the state could not be saved: the run goes on from an earlier checkpoint"


def recall_reliefs(plan: Plan, run_dir: RunDir) -> list[Relief]:
    """Return what the run has changed so far for want of memory. Rank 0 reads for all, since another replica group may
    be writing. Raises MachineError, on every rank, where that cannot be followed."""
    found: list[Relief] = []
    if not plan.memory_ladder:
        return found
    with errors_together():
        if dist.get_rank() == 0:
            found = read_reliefs(run_dir, plan.layout.describe())
    return broadcast_json(
        [to_plain(relief) for relief in found], lambda lines: [read_record(Relief, line) for line in lines]
    )


class MemoryRelief:
    """Called by every rank of the replica group together."""

    def __init__(
        self,
        run: RunContext,
        coordinator: Coordinator,
        checkpoints: Checkpoints,
        watch: StepWatch,
        limit: Callable[[int], None],
    ):
        """`limit` lets no rank process more than this number of samples together from now on."""
        self._run_dir, self._checkpoints, self._watch = run.run_dir, checkpoints, watch
        self._group, self._limit = coordinator.group, limit
        self._journal = coordinator.journal
        self._log = DirectiveLog(run.run_dir, self._journal)
        self._emergency: Emergency | None = None
        self.adopt(run)

    def adopt(self, run: RunContext) -> None:
        """Begin with the layout and the setting of the run's plan."""
        self._plan, self._state, self._setting = run.plan, run.state, run.plan.memory_setting
        if self._emergency:
            self._emergency.close()
            self._emergency = None
        if run.plan.memory_ladder and self._group is None:
            self._checkpoints.agree()
            self._emergency = Emergency(run.run_dir, run.state, self._checkpoints, self._watch)

    def relieved(self, plan: Plan) -> Plan:
        """Return `plan`, of another layout, with what the run has changed in that layout before."""
        return with_reliefs(plan, recall_reliefs(plan, self._run_dir))

    def make_step(self, progress: TrainProgress, attempt: Callable[[], Made]) -> Made:
        """Return what `attempt` does, which makes the step after `progress` and may be called several times.

        Raises OutOfMemory where memory ran out and these processes cannot go on.
        """
        while True:
            if self._emergency:
                self._emergency.begin_step(progress)
            try:
                made = attempt()
            except PassesOutOfMemory as error:
                failure = error  # what its frames hold is freed below, when it is handled no more
            else:
                if self._emergency:
                    self._emergency.end_step()
                return made
            self._relieve(progress, failure)

    def explain(self, error: Exception) -> OutOfMemory | None:
        """Return the error that says so, with figures, where memory ran out elsewhere than in a step's passes."""
        if not is_out_of_memory(error):
            return None
        return out_of_memory(self._plan, measure_shortage(self._plan, self._setting, self._state.device), error)

    def close(self) -> None:
        self._log.close()
        if self._emergency:
            self._emergency.close()

    def _relieve(self, progress: TrainProgress, failure: PassesOutOfMemory) -> None:
        """Prepare the step for another attempt, or save the state and raise OutOfMemory."""
        cause = failure.__cause__ or failure
        failed = replace(self._setting, micro_batch_size=failure.samples)
        shortage = measure_shortage(self._plan, failed, self._state.device)
        traceback.clear_frames(cause.__traceback__)
        traceback.clear_frames(failure.__traceback__)
        clear_gradients(self._state.shares)
        if taken := self._in_place(failed):
            self._begin_anew()
            self._take(progress, shortage, taken, cause)
            return
        if self._emergency and not self._emergency.save():
            self._journal.write(WarningEvent(step=progress.step, message=NOT_SAVED))
        raise out_of_memory(self._plan, shortage, cause)

    def _in_place(self, failed: MemorySetting) -> MemorySetting | None:
        """Return the setting with which these processes can make the step again; None where others wait for this rank,
        or nothing less than another start takes less memory."""
        taken = next_setting(self._plan.memory_ladder, failed)
        alone = dist.get_world_size() == 1 and hasattr(FSDPModule, "reset_iter_state")  # torch 2.13 has it
        same_model = taken and (taken.recompute, taken.offload) == (failed.recompute, failed.offload)
        return taken if alone and same_model else None

    def _begin_anew(self) -> None:
        """Take back what the passes have changed."""
        for part in self._state.parts:
            abandon_passes(part)
        clear_gradients(self._state.shares)
        forget_visits(self._state.routers)
        self._state.stages.noise.begin(None)
        if self._emergency:
            self._emergency.restore_kept()
        gc.collect()
        release_unused(self._state.device)

    def _take(self, progress: TrainProgress, shortage: Shortage, taken: MemorySetting, cause: BaseException) -> None:
        self._log.write(
            MemoryEvent(
                step=progress.step,
                layout=shortage.layout,
                failed=shortage.failed,
                taken=taken,
                restarts=False,
                reason=f"memory ran out: {describe_cause(cause)}",
                used_bytes=shortage.used_bytes,
                limit_bytes=shortage.limit_bytes,
                group=ABSENT if self._group is None else self._group,
            )
        )
        self._setting = taken
        self._limit(taken.micro_batch_size)
