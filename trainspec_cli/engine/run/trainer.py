"""The run: steps from where the last checkpoint ends to the last step, and what is left behind on the way."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from trainspec_cli.corpus.samples import step_positions
from trainspec_cli.engine.batch import MicroBatch
from trainspec_cli.engine.build.train_state import DTYPES, Machinery
from trainspec_cli.engine.observe.clock import Segments
from trainspec_cli.engine.observe.device import Peak, device_allocations, device_name, measure_peak
from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.engine.observe.memory import MemoryWatch
from trainspec_cli.engine.observe.watch import StepWatch
from trainspec_cli.engine.optim.build import set_learning_rate
from trainspec_cli.engine.run.checkpoints import Checkpoints
from trainspec_cli.engine.run.divergence import Divergence
from trainspec_cli.engine.run.faults import Faults
from trainspec_cli.engine.run.result import RunTally, write_result
from trainspec_cli.engine.run.signals import StopRequest
from trainspec_cli.engine.run.sources import Source
from trainspec_cli.engine.run.step import StepOutcome, train_step
from trainspec_cli.policy.schedule import learning_rate
from trainspec_cli.rundir.event_types import EndEvent, EvalEvent, SampleEvent, StartEvent, StepEvent, WarningEvent
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import ABSENT
from trainspec_cli.spec.results.plan import Plan


@dataclass(frozen=True)
class DoneStep:
    """A step whose figures have not been read from the device yet."""

    step: int
    outcome: StepOutcome
    lr: float
    segments: Segments
    samples: int
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else its event says."""


class Trainer:
    """Runs a plan on built machinery; every rank runs the same code in lockstep."""

    def __init__(
        self,
        plan: Plan,
        run_dir: RunDir,
        source: Source,
        recipe_digest: str,
        machinery: Machinery,
        stop: StopRequest,
    ):
        self.plan, self.spec = plan, plan.spec
        self.run_dir, self.source = run_dir, source
        self.built, self.clock, self.stop_request = machinery, machinery.clock, stop
        self.journal: Journal | GroupJournal = self._open_journal()
        self.faults = Faults(plan, run_dir)
        self.watch = StepWatch(run_dir, self.journal, self.spec.resilience.hang_floor_s)
        self.tally = RunTally()
        self.checkpoints = Checkpoints(plan, run_dir, machinery, recipe_digest, self.journal)
        self.step = 0
        self.samples = 0
        """Taken so far, by all ranks: the position of the next one."""
        self.unread: DoneStep | None = None
        self.allocated = device_allocations(machinery.device)
        """How often the device was asked for memory before this step."""
        self.divergence = Divergence(run_dir, self.spec.train.max_skipped_steps)
        self.stopping = False

    def _open_journal(self) -> Journal | GroupJournal:
        return Journal(self.run_dir, dist.get_rank(), self.spec)

    def run(self) -> None:
        """Train to the last step or to a request to stop; a checkpoint is written either way."""
        self._announce(self._restore())
        self._run_to_end()

    def _run_to_end(self) -> None:
        self.memory = MemoryWatch(self.built.device, self.step, self.spec.train.max_steps)
        self.watch.start()
        while self.step < self.spec.train.max_steps and not self.stopping:
            self._train_until_look()
            with self.watch.between_steps():
                if not self.stopping:
                    self._look_if_due()
        if self.step == self.spec.train.max_steps:
            self._end_done()
        else:
            self._checkpoint_last()
            self._finish("stopped")
        self.watch.close()

    def _restore(self) -> str | None:
        """Go on from the newest whole checkpoint; -> its folder."""
        restored = self.checkpoints.resume()
        if restored is None:
            return None
        self.step, self.samples = restored.manifest.step, restored.manifest.about.samples
        return str(restored.folder)

    def _announce(self, restored_from: str | None) -> None:
        if self.plan.peak_flops is None:
            self.tally.peak = measure_peak(self.built.device, DTYPES[self.plan.compute])
        else:
            self.tally.peak = Peak(self.plan.peak_flops, self.plan.peak_source)
        self.journal.write(
            StartEvent(
                step=self.step,
                world_size=self.plan.world_size,
                device_name=device_name(self.built.device),
                peak_flops=self.tally.peak.flops,
                peak_source=self.tally.peak.source,
                params=self.plan.params,
                flops_per_token=self.plan.flops_per_token,
                unit=self.spec.data.unit,
                restored_from=restored_from,
                pid=os.getpid(),
                host=socket.gethostname(),
            )
        )

    # One step after another

    def _train_until_look(self) -> None:
        """Steps up to the next look at the held-out data, or to a request to stop."""
        self.clock.restart()
        coming = self.source.batches(self.step, self._next_look())
        for _ in range(self.step, self._next_look()):
            self._read_late(self._one_step(coming))
            if self.stopping:
                break
        self._read_late(None)

    def _one_step(self, coming: Iterator[list[MicroBatch]]) -> DoneStep:
        lr = learning_rate(self.spec.optim.schedule, self.spec.optim.lr, self.step, self.spec.train.max_steps)
        set_learning_rate(self.built.optimizer, lr)
        self.faults.strike(self.step, self.built)
        with self.clock.part("data_wait"):
            micro_batches = next(coming)
        outcome = train_step(
            self.built,
            micro_batches,
            global_tokens=self.source.counted(step_positions(self.step, self.spec.batching.global_batch_size)),
            clip_norm=self.spec.optim.grad_clip_norm,
            stop_requested=self.stop_request.requested,
            writing=self.checkpoints.writing,
        )
        return self._count(outcome, lr, self.spec.batching.global_batch_size)

    def _count(self, outcome: StepOutcome, lr: float, samples: int, **about: Any) -> DoneStep:
        """The update is made; the checkpoint that may be due belongs to its step."""
        if self.clock.on_gpu:
            outcome = outcome.on_host()
        self.step += 1
        self.samples += samples
        with self.clock.part("checkpoint"):
            self._checkpoint()
        self.watch.beat(self.step)
        return DoneStep(self.step, outcome, lr, self.clock.cut(), samples, {**about, **self._data_flow()})

    def _data_flow(self) -> dict[str, int]:
        """What bringing the step's batch took, and how often new memory was asked for: never, once all is warm."""
        traffic, before = self.source.staging.cut(), self.allocated
        self.allocated = device_allocations(self.built.device)
        return {**asdict(traffic), "allocations": traffic.allocations + self.allocated - before}

    def _read_late(self, done: DoneStep | None) -> None:
        """Record a step: on a GPU when the next one has been started, so that reading its figures waits for nothing.

        Every rank reads the same figures at the same step, so all of them stop together.
        """
        if self.clock.on_gpu:
            done, self.unread = self.unread, done
        if done:
            self._record(done)

    def _record(self, done: DoneStep) -> None:
        parts_s = done.segments.parts_s()
        skipped = bool(done.outcome.skipped.item())
        event = StepEvent(
            step=done.step,
            loss=done.outcome.loss.item(),
            grad_norm=done.outcome.grad_norm.item(),
            lr=done.lr,
            tokens=done.samples * self.spec.data.seq_len if self.spec.data.unit == "tokens" else ABSENT,
            samples=done.samples,
            step_time_s=sum(parts_s.values()),
            time_s=parts_s,
            skipped=skipped,
            **done.about,
        )
        self.journal.write(event)
        self.tally.steps.append(event)
        self.checkpoints.note_step(done.step, sum(parts_s.values()), writing=done.outcome.writing.item() > 0)
        self.stopping = self.stopping or done.outcome.stop.item() > 0
        if skipped:
            self.journal.write(WarningEvent(step=done.step, message="loss or gradient not finite: update skipped"))
        self.divergence.note_step(done.step, skipped=skipped)
        if leak := self.memory.look(done.step):
            self.journal.write(WarningEvent(step=done.step, message=leak))

    # When what is due

    def _next_look(self) -> int:
        """The next step after which the held-out data or a sample is due, or the last."""
        intervals = (self.spec.train.eval_interval_steps, self.spec.train.sample_interval_steps)
        due = [(self.step // interval + 1) * interval for interval in intervals if interval is not None]
        return min([self.spec.train.max_steps, *due])

    def _look_if_due(self) -> None:
        last = self.step == self.spec.train.max_steps
        if last or _falls_on(self.spec.train.eval_interval_steps, self.step):
            self._look()
        if not last and _falls_on(self.spec.train.sample_interval_steps, self.step):
            self._write_sample()

    # What is left behind

    def _checkpoint(self) -> None:
        self.checkpoints.after_step(self.step, self.samples)

    def _checkpoint_last(self) -> None:
        self.checkpoints.save_last(self.step, self.samples)

    def _look(self) -> None:
        """How the model does on what was held out."""
        started = time.perf_counter()
        heldout = self.source.evaluate()
        if heldout is None:
            return
        self.tally.heldout = heldout
        self.journal.write(EvalEvent(step=self.step, **heldout, seconds=time.perf_counter() - started))

    def _write_sample(self) -> None:
        sample = self.source.write_sample()
        if sample is not None:
            self.journal.write(SampleEvent(step=self.step, prompt=sample["prompt"], text=sample["text"]))

    def _end_done(self) -> None:
        """All steps are made. Raises WorkerError where the model came to nothing, and leaves no checkpoint of it."""
        if self.tally.heldout is None:
            self._look()
        self.divergence.check_end(self.step, self.tally, self.built.held)
        self._checkpoint_last()
        self._write_sample()
        self._finish("done")

    def _finish(self, status: str) -> None:
        summary = self.source.summarise(self.tally.heldout)
        sha256 = write_result(
            self.run_dir, self.built, self.plan, self.tally, status=status, step=self.step, heldout=summary
        )
        self.journal.write(EndEvent(step=self.step, status=status, weights_sha256=sha256))
        self.journal.close()


def _falls_on(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0
