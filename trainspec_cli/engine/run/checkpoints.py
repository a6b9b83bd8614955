"""Write a run's checkpoints. They are started when due, postponed while another one is being written, and awaited at
the end."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import median

import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.batch import BatchPace
from trainspec_cli.core.errors import MachineError
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.memory import CopyLocation, clear
from trainspec_cli.engine.checkpoint.saver import Restored, Saved, Saver, load_newest
from trainspec_cli.engine.comm.json_collectives import broadcast_json, raise_together
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.records import ABSENT, convert, read_record, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.events import (
    CadenceEvent,
    CheckpointEvent,
    EndedMark,
    Event,
    FailureMark,
    LaunchMark,
    WarningEvent,
)
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.memory import make_memory_folder
from trainspec_cli.run.recovery.reliability import (
    AUTO_SHORTEST_S,
    auto_interval_s,
    checkpoint_interval_steps,
    job_mtbf_s,
    rollback_mtbf_s,
    updated_mtbf_s,
)

MEASURING_STEPS = 3
"""With interval `auto`, the step time is measured over this number of steps."""
REMEMBERED_STEPS = 50


class Checkpoints:
    """One rank's checkpoints. Every rank makes the same calls at the same steps, and bases its decisions on values that
    all ranks have agreed on."""

    def __init__(self, run: TrainingRun, pace: Callable[[], BatchPace | None] = lambda: None):
        """`pace` returns the state of a batch-size schedule that follows the gradient noise; None for any other
        schedule."""
        self._run = run
        self._spec = run.plan.spec.checkpoint
        self._pace = pace
        self._memory: CopyLocation | None = None
        if self._spec.memory_interval_steps:
            world_size = dist.get_world_size()
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # set by torchrun
            folder = make_memory_folder(run.run_dir)
            self._memory = CopyLocation(folder, dist.get_rank(), world_size, ranks_per_node)
        self._made: tuple[TrainState, Saver] | None = None
        self._cadence = Cadence(run.plan, read_sound(run.run_dir.supervisor_events))
        self._saved_step = -1
        self._kept_before: int | None = None
        """The previously kept step. It is kept again if the current one cannot be written."""
        self._due_since: int | None = None
        self._put_off = False
        self._begun: int | None = None
        """The step whose checkpoint may still be in progress, as far as all ranks know."""
        self._newest: Saved | None = None

    @property
    def _saver(self) -> Saver:
        """The saver of the current state. A change of layout waits until no checkpoint is being written and then
        replaces the saver; the ranks agree again on which rank writes which parts."""
        state = self._run.state
        if self._made is None or self._made[0] is not state:
            before = self._made
            keep_last = self._spec.keep_last
            saver = Saver(self._run.run_dir, state.held, state.device, keep_last, self._memory, self._run.disks)
            self._made = state, saver
            if before is not None:
                saver.slot = before[1].slot
                saver.kept_step = before[1].kept_step
                before[1].close()
        return self._made[1]

    def resume(self) -> Restored | None:
        """Restore the newest complete checkpoint; None if no checkpoint exists."""
        state = self._run.state
        restored = load_newest(self._run.run_dir, state.held, state.device, self._memory, self._run.disks)
        if restored:
            if len(state.compression.feedbacks) > restored.feedback:
                lost = "the checkpoint has no compression errors for this layout: error feedback starts from zero"
                self._warn(restored.manifest.step, lost)
            self._cadence.start_at(restored.manifest.step)
            if restored.slot is None:
                self._saved_step = restored.manifest.step
            else:
                self._saver.slot = 1 - restored.slot
        if self._spec.interval_steps not in (None, AUTO):
            self._prepare()
        return restored

    def _prepare(self) -> None:
        if self._spec.mode == "async":
            self._saver.prepare()

    def agree(self) -> None:
        """Agree on which parts each rank writes in `save_independently`."""
        self._saver.agree()

    def save_independently(self, step: int, samples: int, kept: Mapping[str, Tensor]) -> None:
        """Write this rank's part of the state after `step`, unless a checkpoint of this step has started, and wait
        until the part is written. Each rank does so independently. `kept`: see `Saver.save_alone`."""
        if self._saved_step == step:
            self._saver.wait()
        else:
            self._saver.save_alone(self._about(step, samples), kept)

    def finish_writing(self) -> None:
        """Wait until no checkpoint is being written. Called collectively by all ranks."""
        finished = self._saver.wait()
        if self._begun is not None and finished is not None:
            self._begun = None
            self._end(finished)

    @property
    def writing(self) -> bool:
        """True while this rank is writing a checkpoint; each step sends this to the other ranks."""
        return self._saver.busy

    def note_step(self, step: int, step_time_s: float, *, writing: bool) -> None:
        """Record a step's results, which are the same on every rank. `writing`: whether any rank was writing when the
        step ended."""
        first = self._cadence.note_step(step_time_s, writing=writing)
        if first is not None and first <= self._run.plan.total_steps:
            self._prepare()
        if self._begun is not None and step > self._begun and not writing:
            # No rank was writing in that step. So all ranks know that the checkpoint has finished, and handle this at
            # the same step, without another exchange.
            self._begun = None
            finished = self._saver.take_finished()
            assert finished is not None, "no rank is writing"
            self._end(finished)

    def after_step(self, step: int, samples: int, *, writes: bool = True) -> None:
        """Start a checkpoint if one is due and none is being written. `samples`: number of samples that all ranks have
        read so far. If `writes` is false, another replica group writes it."""
        if self._cadence.is_due(step) and self._due_since is None:
            self._due_since = step
        if not writes:
            self._due_since = None
        if self._begun is not None or not writes:
            return
        if self._due_since is None:
            interval = self._spec.memory_interval_steps
            if interval and step % interval == 0:
                # A copy that is only in memory is skipped, not postponed, if another one is being written: the next one
                # is due soon, and the previous copy is still valid.
                self._begun = step
                self._saver.begin(self._about(step, samples), to_disk=False)
            return
        if self._due_since < step and not self._put_off:
            self._put_off = True
            message = (
                f"the checkpoint due at step {self._due_since} was postponed to step {step}: the previous one was "
            )
            message += "still being written; a longer checkpoint.interval_steps avoids that"
            self._warn(step, message)
        self._write(step, samples)

    def keep(self, step: int) -> None:
        """Keep the checkpoint of `step` in addition to the most recent ones. It replaces the previously kept one."""
        self._saver.kept_step = step

    def save_kept(self, step: int, samples: int) -> None:
        """Keep the checkpoint of `step`; start it now if it has not started yet. Called collectively by all ranks."""
        if self._saved_step == step:
            self.keep(step)
        else:
            self.finish_writing()  # otherwise the current save would remove the previously kept checkpoint
            self._kept_before = self._saver.kept_step
            self.keep(step)
            self._cadence.start_at(step)
            self._write(step, samples)

    def _write(self, step: int, samples: int) -> None:
        self._due_since = None
        self._saved_step = step
        if self._spec.mode == "async":
            self._begun = step
            self._saver.begin(self._about(step, samples))
        else:
            self._end(self._saver.save(self._about(step, samples)))

    def save_last(self, step: int, samples: int) -> None:
        """Write the state of the last step, and return once it is complete on disk. Raises MachineError if that
        fails."""
        started = time.perf_counter()
        finished = self._saver.wait()
        waited_s = time.perf_counter() - started
        if finished and not finished.in_memory:
            self._report(finished, waited_s)
        if self._saved_step != step:
            saved = self._saver.save(self._about(step, samples))
            self._report(saved, saved.written_s)
        raise_together(self._newest.error if self._newest else None)
        self._saver.close()
        if self._memory:
            clear(self._memory)

    def collect_last(self) -> None:
        """After a finished run on nodes that share no disk: copy the last checkpoint to the first node. It is complete
        without this, so a failure is only a warning."""
        if self._run.disks:
            try:
                self._run.disks.collect()
            except MachineError as error:
                self._warn(self._saved_step, f"the last checkpoint is not complete on the first node: {error}")

    def _about(self, step: int, samples: int) -> About:
        return About(step, samples, self._run.plan.spec.train.seed, self._run.recipe_digest, self._pace())

    def _end(self, saved: Saved) -> None:
        if saved.in_memory:
            return
        self._report(saved)
        if chosen := self._cadence.learn(saved):
            self._run.journal.write(chosen)

    def _report(self, saved: Saved, waited_s: float = 0.0) -> None:
        """Record a checkpoint's result. A failure is only a warning, and training continues. `waited_s`: time spent
        waiting outside of steps."""
        self._newest = saved
        step = saved.about.step
        if saved.error:
            if self._saver.kept_step == step:
                self._saver.kept_step = self._kept_before
            self._warn(step, f"{saved.error}; earlier checkpoints are complete")
            return
        self._run.journal.write(
            CheckpointEvent(
                step=step,
                path=str(self._run.run_dir.checkpoint(step)),
                bytes=saved.bytes,
                seconds=saved.blocked_s,
                written_s=saved.written_s,
                waited_s=waited_s or ABSENT,
            )
        )

    def _warn(self, step: int, message: str) -> None:
        self._run.journal.write(WarningEvent(step=step, message=message))


class Cadence:
    """Decides when a checkpoint is due: every `interval_steps` steps, or as often as its measured cost and the failure
    rate require. All ranks make the same decision, because it depends only on steps and on rank 0's measurements."""

    def __init__(self, plan: Plan, marks: Iterable[Event] = ()):
        """`marks`: the supervisor's events, which show the failures of earlier starts."""
        self._plan = plan
        self._failures = 0
        self._earlier_s = 0.0
        """Running time of the earlier starts, in seconds."""
        self._launched_at: float | None = None
        for mark in marks:
            if isinstance(mark, LaunchMark):
                self._launched_at = mark.time
            elif isinstance(mark, FailureMark | EndedMark) and self._launched_at is not None:
                self._failures += isinstance(mark, FailureMark)
                self._earlier_s += max(0.0, mark.time - self._launched_at)
                self._launched_at = None
        self._is_auto = plan.spec.checkpoint.interval_steps == AUTO
        wanted = plan.spec.checkpoint.interval_steps
        self._interval_steps = None if wanted == AUTO else wanted
        self._last_due = 0
        self._usual_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._beside_s: list[float] = []

    def start_at(self, step: int) -> None:
        self._last_due = step

    def note_step(self, step_time_s: float, *, writing: bool) -> int | None:
        """Record the time of a step. For `auto`, once the step time is known, return the step of the first checkpoint,
        based on rank 0's measurements. Called collectively by all ranks."""
        if not self._is_auto:
            return None
        (self._beside_s if writing else self._usual_s).append(step_time_s)
        noted_s = [*self._usual_s, *self._beside_s]
        if self._interval_steps is not None or len(noted_s) < MEASURING_STEPS:
            return None
        own = max(MEASURING_STEPS, checkpoint_interval_steps(AUTO_SHORTEST_S, median(noted_s)))
        self._interval_steps = broadcast_json(own, lambda steps: convert(int, steps))
        return self._last_due + self._interval_steps

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after `step`. Called once per step."""
        if self._interval_steps is None:
            return False
        due = step - self._last_due >= self._interval_steps if self._is_auto else step % self._interval_steps == 0
        if due:
            self._last_due = step
        return due

    def learn(self, saved: Saved) -> CadenceEvent | None:
        """Choose the interval for `auto`, based on how long the newest checkpoint, unless it failed, blocked training
        and how long it took to write. If it has changed, return the interval and the reasons for it. Called
        collectively by all ranks; it is based on rank 0's measurements."""
        if not self._is_auto:
            return None
        own = None if saved.error or dist.get_rank() else to_plain(self._best(saved))
        chosen = broadcast_json(own, lambda plain: plain and read_record(CadenceEvent, plain))
        self._beside_s.clear()
        if chosen is None or chosen.interval_steps == self._interval_steps:
            return None
        self._interval_steps = chosen.interval_steps
        return chosen

    def _best(self, saved: Saved) -> CadenceEvent:
        """Return Daly's interval. The cost of a checkpoint is the time that training waited plus the time by which
        writing slowed down steps."""
        usual_s = median(self._usual_s or self._beside_s)
        drag_s = max(0.0, sum(self._beside_s) - usual_s * len(self._beside_s))
        plan = self._plan
        reliability = self._plan.spec.cluster.reliability
        any_s = job_mtbf_s(reliability, plan.world_size)
        mtbf_s = rollback_mtbf_s(plan.spec.resilience, reliability, any_s, plan.replica_groups)
        running_s = 0.0 if self._launched_at is None else max(0.0, time.time() - self._launched_at)
        observed_s = self._earlier_s + running_s
        # With replica groups, only a failure of all of them at once causes a rollback, and the marks do not show such
        # failures.
        counts = bool(self._failures) and mtbf_s == any_s
        if counts:
            mtbf_s = updated_mtbf_s(mtbf_s, self._failures, observed_s)
        interval_s = auto_interval_s(saved.blocked_s + drag_s, saved.written_s, mtbf_s)
        return CadenceEvent(
            step=saved.about.step,
            interval_steps=checkpoint_interval_steps(interval_s, usual_s),
            blocked_s=saved.blocked_s,
            drag_s=drag_s,
            written_s=saved.written_s,
            step_time_s=usual_s,
            mtbf_s=mtbf_s if math.isfinite(mtbf_s) else None,
            failures=self._failures if counts else ABSENT,
            observed_s=observed_s if counts else ABSENT,
        )
