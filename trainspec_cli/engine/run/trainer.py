"""The training loop: all steps from the last checkpoint to the end, and everything that they write."""

from __future__ import annotations

import os
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Literal

import torch.distributed as dist

from trainspec_cli.balance.batch.batch import PartSquares
from trainspec_cli.engine.accelerators import emulated_peak_flops
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.data.loader import PREFETCHED_STEPS
from trainspec_cli.engine.observe.counters import (
    MemoryWatch,
    Peak,
    StepCounters,
    device_allocations,
    device_name,
    measure_peak,
    measured_before,
)
from trainspec_cli.engine.observe.deeper_look import DeeperLook
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.optim.optimizer import set_learning_rate
from trainspec_cli.engine.parallel.noise import SampleParts, parts_of
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples
from trainspec_cli.engine.run.evaluate import HeldoutWatch
from trainspec_cli.engine.run.faults import Faults
from trainspec_cli.engine.run.result import Divergence, RunTally, write_result
from trainspec_cli.engine.run.scheduling.directives import Directives, follows_earlier
from trainspec_cli.engine.run.scheduling.links import StepLinks
from trainspec_cli.engine.run.scheduling.relayout import DROPS_LOST, LayoutChanges
from trainspec_cli.engine.run.scheduling.step_scheduler import StepBuckets, StepPace, StepScheduler
from trainspec_cli.engine.run.shortage import MemoryRelief, recall_reliefs
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.step import DoneStep, StepOutcome, train_step
from trainspec_cli.engine.run.step_report import StepReport
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.recipe.rules.run import noise_hindrance
from trainspec_cli.run.folder.event_types.events import EndEvent, SampleEvent, StartEvent, WarningEvent


class Trainer:
    """Trains according to a plan. Every rank runs the same code in lockstep.

    The coordinator handles the differences between one replica group and several.
    """

    def __init__(self, run: TrainingRun, source: DataSource, coordinator: Coordinator):
        """Restore the newest checkpoint, unless the coordinator restores or heals the state."""
        self.run = run
        self.source = source
        self.coordinator = coordinator
        self.spec = run.plan.spec
        self.clock = run.state.clock
        self.journal = run.journal
        device = run.state.device
        self.faults = Faults(run.plan, run.run_dir)
        limits = self.spec.resilience
        self.watch = StepWatch(run.run_dir, self.journal, limits.hang_floor_s, limits.first_step_s)
        self.pace = StepPace(self.spec)
        self.checkpoints = Checkpoints(run, lambda: self.pace.kept)
        self.directives = Directives(run, recalls=follows_earlier(run.plan, run.group))
        self.link = SupervisorLink(run.supervisor)
        self.layouts = LayoutChanges(run, self.directives)
        self.restored_from: str | None = None
        self.heldout = HeldoutWatch(self.spec, run.run_dir, self.journal, self.checkpoints)
        self.progress = TrainProgress()
        if coordinator.restores_at_start:
            self.progress = self._restore()
        run.startup.end("restore")
        self._begin_layout()
        dtype = DTYPES[run.plan.compute]
        if (emulated := emulated_peak_flops(device, dtype)) is not None:
            peak = Peak(emulated, "peak of the emulated chip according to its data sheet")
        elif run.plan.peak_flops is None:
            peak = measured_before(run.run_dir, device, dtype) or measure_peak(device, dtype)
        else:
            peak = Peak(run.plan.peak_flops, run.plan.peak_source)
        self.tally = RunTally(peak)
        self.counters = StepCounters(device)
        rank = (run.group or 0) * run.plan.group_size + dist.get_rank()
        self.deeper_look = DeeperLook(run.run_dir, self.journal, run.supervisor, rank, device)
        self.divergence = Divergence(run.run_dir, self.spec.train.max_skipped_steps)
        self.unread: DoneStep | None = None
        self.stopping = False

    def _begin_layout(self) -> None:
        """Create the objects that depend on the layout: speeds, links, buckets and memory use differ between
        layouts."""
        run = self.run
        self.scheduler = StepScheduler(run, self.directives, self.link)
        self.links = StepLinks(run, self.link)
        self.buckets = StepBuckets(run, self.directives)
        self.relief = MemoryRelief(run, self.checkpoints, self.watch, self.scheduler.limit)
        self.memory = MemoryWatch(run.state.device, self.progress.step, run.plan.total_steps)
        self.allocated = device_allocations(run.state.device)
        """Number of device allocations before this step."""

    def _restore(self) -> TrainProgress:
        """Load the newest complete checkpoint. If there is none, keep the state as it is."""
        if restored := self.checkpoints.resume():
            self.restored_from = str(restored.folder)
            self.pace.state = restored.manifest.about.pace or self.pace.state
            progress = TrainProgress(restored.manifest.step, restored.manifest.about.samples)
            self.heldout.recall(progress.step, is_last=self.pace.batch(progress) is None)
            return progress
        return self.progress

    def train(self) -> None:
        """Train until the last step or a request to stop. A checkpoint is written in both cases."""
        plan = self.run.plan
        self.run.startup.end("prepare")
        self.journal.write(
            StartEvent(
                step=self.progress.step,
                world_size=plan.world_size,
                device_name=device_name(self.run.state.device),
                is_accelerator=self.clock.on_gpu,
                peak_flops=self.tally.peak.flops,
                peak_source=self.tally.peak.source,
                params=plan.params,
                adapter_params=plan.adapter_params,
                flops_per_token=plan.flops_per_token,
                unit=self.spec.data.unit,
                restored_from=self.restored_from,
                pid=os.getpid(),
                host=socket.gethostname(),
                startup_s=self.run.startup.parts_s,
            )
        )
        is_new = self.progress.step == 0 and dist.get_rank() == 0
        if is_new and (text := self.source.first_text(self.progress.samples)):
            self.journal.write(text)
        self.watch.start()
        if self.spec.observe.deeper_look:
            self.deeper_look.start()
        try:
            self._make_steps()
            if not self.coordinator.finished_without:
                self._end()
        except Exception as error:
            if explained := self.relief.explain(error):
                raise explained from error
            raise
        finally:
            self.deeper_look.close()
            self.relief.close()
            self.coordinator.leave()
        self.watch.close()

    # The loop over steps

    def _make_steps(self) -> None:
        self.clock.restart()
        # Evaluate here if the run was killed or stopped between the checkpoint and the evaluation of the same step.
        lacks_evaluation = self._is_evaluation_due and self.heldout.last_step != self.progress.step
        if self.restored_from is not None and lacks_evaluation and not self._is_last_step:
            self._evaluate_between_steps()
        self._bring_together()
        while not self._is_last_step and not self.stopping:
            done = self._step()
            if done is None:
                self._bring_together()
                continue
            # On a GPU, a step is recorded when the passes of the next step have been queued (`_make_report`), so that
            # the device has work while the host waits for the results. Every rank reads the same results at the same
            # step, so all ranks stop together.
            self.unread = done
            if not self.clock.on_gpu or self.coordinator.waits_for_groups:
                self._record_unread()
            self._bring_together()
            if self._is_evaluation_due or self._is_sample_due:
                self._record_unread()
                self._evaluate_between_steps()
        self._record_unread()

    def _bring_together(self) -> None:
        if self._is_last_step:
            with self._waiting_for_groups():
                self.coordinator.bring_together(self.progress)

    def _step(self) -> DoneStep | None:
        """Take one step. Return None if the run stops before it, if the replica groups did not agree on it, or if other
        runs that train together with this one have meanwhile taken all steps."""
        with self._waiting_for_groups():
            start = self.coordinator.begin(self.progress, self._restore)
        self.progress = start.progress
        if start.stop:
            self.stopping = True
            return None
        if self._is_last_step:
            return None
        step = self.progress.step
        self._follow_layout(step)
        self.faults.inject(step, self.run.state)
        batch = self.pace.batch(self.progress)
        assert batch is not None, "the run has not ended"
        lr, samples, outcome = self.relief.make_step(self.progress, partial(self._attempt, step, batch.lr))
        return None if outcome is None else self._count(outcome, lr, samples)

    def _attempt(self, step: int, lr: float) -> tuple[float, StepSamples, StepOutcome | None]:
        """Take the step after update `step`; return (its learning rate, samples, outcome)."""
        self.coordinator.division = self.scheduler.divide(step)
        samples = self.coordinator.take(self.pace.coming(self.progress, 1 + PREFETCHED_STEPS))
        lr *= samples.lr_factor
        set_learning_rate(self.run.state.optimizer, lr)
        self.links.begin(step)
        self.buckets.begin()
        outcome = train_step(
            self.run.state,
            samples.micro_batches,
            global_tokens=samples.global_tokens,
            clip_norm=self.spec.optim.grad_clip_norm,
            groups=self.coordinator,
            make_report=partial(self._make_report, step),
            parts=self._parts(samples),
        )
        if outcome is not None:
            self.links.finish(samples.micro_batches)
        return lr, samples, outcome

    def _make_report(self, step: int) -> StepReport:
        """Return this rank's report for the step after update `step`, once the previous step has been recorded."""
        self._record_unread()
        return StepReport(
            stop=self.coordinator.stop_flag,
            writing=self.checkpoints.writing,
            steps_to_sample=self.links.steps_to_sample,
            speed=self.scheduler.report(step),
            links=self.links.report,
            buckets=self.buckets.report,
        )

    def _follow_layout(self, step: int) -> None:
        """Change the layout if a change is due. The change is not included in any step's time."""
        decided = self.scheduler.decided_layers
        self.scheduler.decided_layers = None
        proposed = self.scheduler.is_proposed
        self.scheduler.is_proposed = False
        due = self.layouts.due(step, decided, self.link.receive() if proposed else None)
        if due is None:
            return
        self._record_unread()
        with self.watch.between_steps():
            self.checkpoints.finish_writing()
            after = recall_reliefs(self.run.plan.with_layout(due.planned), self.run.run_dir)
            done = self.layouts.change(step, due, after, self.faults.during_move(step))
            if done is not None:
                changed, directive = done
                self.relief.close()
                self.run.plan = after
                self.run.state = changed.state
                self._begin_layout()
                if changed.drops_lost:
                    self.journal.write(WarningEvent(step=step, message=DROPS_LOST))
                if due.followed is None and directive.before_s:
                    self.scheduler.watch(directive)
        self.clock.restart()

    def _parts(self, samples: StepSamples) -> SampleParts | None:
        """Return the parts of the step whose gradient norms yield the noise; None if the noise is not measured."""
        if not self.measures_noise:
            return None
        return parts_of(samples.division, self.run.state.mesh, samples.group_samples, samples.step_samples)

    def _waiting_for_groups(self) -> AbstractContextManager[None]:
        """Do not report a hang while this group waits for other replica groups. Waiting for other runs may take any
        amount of time."""
        for_ever = self.coordinator.merges_at_end
        return self.watch.between_steps(for_ever=for_ever) if self.coordinator.waits_for_groups else nullcontext()

    def _count(self, outcome: StepOutcome, lr: float, samples: StepSamples) -> DoneStep:
        """Count the update, so that any checkpoint that is due now belongs to this step."""
        self.progress = TrainProgress(self.progress.step + 1, self.progress.samples + samples.step_samples)
        step = self.progress.step
        noise_scale = None
        if self.pace.follows_noise:  # the host waits, because the next batch and the checkpoint depend on the noise
            noise_scale = self._note_noise(step, outcome, samples)
        if self.clock.on_gpu:
            outcome = outcome.on_host()
        writes = self.coordinator.leads and not (self.coordinator.merges_at_end and self._is_last_step)
        with self.clock.part("checkpoint"):
            self.checkpoints.after_step(step, self.progress.samples, writes=writes)
        self.watch.beat(step)
        self.deeper_look.after_step(step)
        segments = self.clock.cut()
        traffic = self.source.staging.cut()
        before = self.allocated
        self.allocated = device_allocations(self.run.state.device)
        traffic = replace(traffic, allocations=traffic.allocations + self.allocated - before)
        garbage_s = 0.0 if self.clock.on_gpu else self.counters.garbage.cut()
        return DoneStep(step, outcome, lr, segments, samples, traffic, noise_scale, garbage_s)

    @property
    def measures_noise(self) -> bool:
        """True if the noise is measured. With cp, measuring takes an exchange of all gradients, so it is skipped if
        nothing depends on the noise."""
        plan = self.run.plan
        hindrance = noise_hindrance(self.spec.model, plan.layout, plan.replica_groups, plan.grad_accum_steps)
        return not hindrance and (self.pace.follows_noise or plan.layout.cp == 1)

    def _note_noise(self, step: int, outcome: StepOutcome, samples: StepSamples) -> float | None:
        """Return the gradient noise scale up to this step; None if it is not measured or not known yet."""
        if not self.measures_noise:
            return None
        weighted, of_experts, parts, expert_parts, experts_square = outcome.noise.tolist()
        square = outcome.grad_norm.item() ** 2 - experts_square
        squares = [PartSquares(weighted, square, round(parts))]
        if self.run.plan.layout.ep > 1:
            squares.append(PartSquares(of_experts, experts_square, round(expert_parts)))
        return self.pace.note_step(step, samples.step_samples, squares)

    def _record_unread(self) -> None:
        done = self.unread
        self.unread = None
        if done:
            self._record(done)

    def _record(self, done: DoneStep) -> None:
        done.segments.wait()
        noise_scale = done.noise_scale
        taken = done.samples
        if not self.pace.follows_noise:
            noise_scale = self._note_noise(done.step, done.outcome, taken)
        event = done.event(self.spec.data, noise_scale)
        parts_s = event.time_s
        step_time_s = event.step_time_s
        skipped = event.skipped
        self.journal.write(event)
        self.tally.steps.append(event)
        if counted := self.counters.note_step(
            done.step,
            parts_s,
            done.segments.queued,
            taken.micro_batches,
            done.segments.agreement(),
            done.segments.starved_s(),
            done.traffic.attended,
        ):
            self.journal.write(counted)
        self.checkpoints.note_step(done.step, step_time_s, writing=done.outcome.writing.item() > 0)
        self.stopping = self.stopping or done.outcome.stop.item() > 0
        if skipped:
            self.journal.write(WarningEvent(step=done.step, message="loss or gradient not finite: update skipped"))
        self.divergence.note_step(done.step, skipped=skipped)
        largest = max(taken.own.sizes, default=0)
        for message in filter(None, (self.memory.check(done.step, largest), self.pace.warning(taken.step_samples))):
            self.journal.write(WarningEvent(step=done.step, message=message))
        reports = done.outcome.reports()
        self.scheduler.note_step(
            done.step,
            taken.own,
            parts_s,
            taken.group_samples,
            [one.speed for one in reports if one.speed is not None],
            shows_speed=not self.deeper_look.was_profiled(done.step),
            garbage_s=done.garbage_s,
        )
        of_links = [one.links for one in reports if one.links is not None]
        self.links.note_step(done.step, step_time_s, of_links, int(done.outcome.steps_to_sample.item()))
        of_buckets = [one.buckets for one in reports if one.buckets is not None]
        self.buckets.note_step(done.step, step_time_s, of_buckets)
        self.coordinator.rate = self.scheduler.rate
        self.coordinator.note_step(done.step, step_time_s)

    # Work between steps, and at the end

    @property
    def _is_last_step(self) -> bool:
        return self.heldout.ends_run or self.pace.batch(self.progress) is None

    @property
    def _is_evaluation_due(self) -> bool:
        return self._is_last_step or _falls_on(self.spec.train.eval_interval_steps, self.progress.step)

    @property
    def _is_sample_due(self) -> bool:
        return not self._is_last_step and _falls_on(self.spec.train.sample_interval_steps, self.progress.step)

    def _evaluate_between_steps(self) -> None:
        with self.watch.between_steps():
            if self.stopping:
                return
            if self._is_evaluation_due:
                self._evaluate()
            if self._is_sample_due:
                self._write_sample()
        self.clock.restart()

    def _evaluate(self) -> None:
        """Evaluate the model on the held-out data."""
        started = time.perf_counter()
        with self.coordinator.merged():
            evaluated = self.source.evaluate(self.progress.step)
        if evaluated is None:
            return
        self.tally.heldout = evaluated
        self.journal.write(replace(evaluated, seconds=time.perf_counter() - started))
        progress = self.progress
        loss = evaluated.heldout_loss
        self.heldout.note(progress.step, progress.samples, loss, is_last=self._is_last_step)

    def _write_sample(self) -> None:
        sample = self.source.write_sample()
        if sample is not None:
            self.journal.write(SampleEvent(step=self.progress.step, prompt=sample.prompt, text=sample.text))

    def _end(self) -> None:
        """Raise WorkerError, without writing a checkpoint, if all steps have been taken but the model is not usable."""
        if not self._is_last_step:
            self._checkpoint_last()
            self._finish("stopped")
            return
        if self.tally.heldout is None:
            self._evaluate()
        self.divergence.check_end(self.progress.step, self.tally, self.run.state.held)
        self._checkpoint_last()
        if self.coordinator.leads:
            self.checkpoints.collect_last()
        self._write_sample()
        self._finish("done")

    def _checkpoint_last(self) -> None:
        if self.coordinator.leads:
            self.checkpoints.save_last(self.progress.step, self.progress.samples)

    def _finish(self, status: Literal["done", "stopped"]) -> None:
        step = self.progress.step
        sha256 = write_result(self.run, self.tally, self.source, status=status, step=step)
        self.directives.close()
        self.links.write_speeds(step)
        self.journal.write(EndEvent(step=step, status=status, weights_sha256=sha256))
        self.journal.close()


def _falls_on(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0
