"""Determine how a run ended: done with finite results, stopped on request, or diverged.

Steps whose loss or gradients are not finite update nothing; a few of them are harmless. A run is done if its last loss,
held-out loss and weights are finite, and the steps that were skipped in a row at its end are fewer than half of all
steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import EXIT_DONE, Stopped, WorkerError
from trainspec_cli.engine.checkpoint.files import Held
from trainspec_cli.engine.comm.codec import OTHER
from trainspec_cli.engine.comm.json_collectives import raise_together
from trainspec_cli.engine.digest import REMEDY, is_finite, weights_sha256
from trainspec_cli.engine.observe.counters import Peak, peak_memory_bytes
from trainspec_cli.engine.run.sources import DataSource
from trainspec_cli.engine.run.training_run import TrainingRun
from trainspec_cli.recipe.records import ABSENT, Absent
from trainspec_cli.run.folder import record
from trainspec_cli.run.folder.accounting import account_run, measure_throughput
from trainspec_cli.run.folder.event_types.events import EvalEvent, StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.generations import Fence, may_stop
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult

WIRE_PURPOSES = ("gradients", "parameters", OTHER)
EXIT_CODES = {"done": EXIT_DONE, "stopped": Stopped.exit_code}
Steps = Sequence[StepEvent]
"""The `step` events, in order."""


@dataclass
class RunTally:
    """Values for result.json, collected during the run."""

    peak: Peak
    steps: list[StepEvent] = field(default_factory=list)
    """This start's step events."""
    heldout: EvalEvent | None = None
    """The last evaluation."""


class Divergence:
    """Ends a run that has diverged. All ranks make the same calls at the same steps, and raise the same WorkerError."""

    def __init__(self, run_dir: RunDir, max_skipped_steps: int):
        self._run_dir = run_dir
        self._max_skipped_steps = max_skipped_steps
        self._skipped_in_a_row = 0

    def note_step(self, step: int, *, skipped: bool) -> None:
        """Raise the error if the allowed number of consecutive skipped updates has been reached."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == self._max_skipped_steps:
            what = "the loss or the gradients were not finite"
            self._raise([f"{what} for {self._max_skipped_steps} steps in a row, up to step {step}"], step)

    def check_end(self, step: int, tally: RunTally, held: Held) -> None:
        """Raise the error if the run has taken all its steps, up to `step`, but the model is not usable."""
        events = tally.steps
        if all(
            event.skipped for event in events
        ):  # no step of this start updated anything, so earlier starts' steps also count
            logged = read_sound(self._run_dir.events(0))
            events = [*(event for event in logged if isinstance(event, StepEvent)), *events]
        faults: list[str] = []
        if events and not _is_finite(events[-1].loss):
            faults.append(f"the loss of the last step, {step}, is not finite")
        skipped = sum(1 for _ in takewhile(lambda event: event.skipped, reversed(events)))
        if skipped and 2 * skipped >= step:
            faults.append(
                f"the loss or the gradients were not finite in the last {skipped} of {step} steps, at least half"
            )
        if tally.heldout and not _is_finite(tally.heldout.heldout_loss):
            faults.append("the held-out loss after the last step is not finite")
        if not faults:  # check the weights last, because that takes time
            parts = (part for part in held.parts() if part.name.startswith("model.") and not is_finite(part.tensor))
            faults += [f"{part.name.removeprefix('model.')} is not finite after the last step" for part in parts]
        self._raise(faults[:1], step)

    def _raise(self, faults: Sequence[str], step: int) -> None:
        """Raise an error for the first fault, if any. It names the newest checkpoint that was followed by a finite
        step."""
        if not faults:
            raise_together(None)
            return
        last_finite = step - self._skipped_in_a_row
        steps = self._run_dir.checkpoint_steps()
        good = max((kept for kept in steps if kept < last_finite), default=None)
        if good is None:
            known = "there is no checkpoint from before that"
            hint = f"start again: {REMEDY}"
        else:
            known = f"the newest checkpoint from before that is {self._run_dir.checkpoint(good)}"
            newer = ", ".join(self._run_dir.checkpoint(kept).name for kept in steps if kept > good)
            hint = f"{f'remove {newer} next to it, and ' if newer else ''}continue from step {good}: {REMEDY}"
        raise_together(WorkerError(f"{faults[0]}; {known}", code="not_finite", hint=hint))


def _is_finite(value: float | None) -> bool:
    """Return whether an event's value is finite; non-finite values are stored as null."""
    return value is not None and math.isfinite(value)


def write_result(
    run: TrainingRun, tally: RunTally, source: DataSource, *, status: Literal["done", "stopped"], step: int
) -> str:
    """Write result.json and return the weights' SHA-256. Called collectively by all ranks.

    If the run stopped without a request, result.json is not written, because the supervisor may restart the run.
    """
    plan = run.plan
    state = run.state
    run_dir = run.run_dir
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    memory = torch.tensor(peak_memory_bytes(state.device), dtype=torch.int64, device=state.device)
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    wire_bytes: dict[str, int] | Absent = ABSENT
    if not state.clock.on_gpu:  # bytes sent by NCCL cannot be counted
        own = state.wire.totals()
        summed = torch.tensor([own.get(purpose, 0) for purpose in WIRE_PURPOSES], dtype=torch.int64)
        dist.all_reduce(summed)
        wire_bytes = dict(zip(WIRE_PURPOSES, summed.tolist(), strict=True))
    throughput = measure_throughput(
        tally.steps, flops_per_token=plan.flops_per_token, peak_flops=tally.peak.flops, world_size=plan.world_size
    )
    time_s = account_run(run_dir, now=time.time())
    if dist.get_rank() == 0 and (status == "done" or may_stop(run_dir)):
        Fence.of_worker(run_dir).check()
        is_text = plan.spec.data.unit == "tokens"
        result = RunResult(
            status=status,
            exit_code=EXIT_CODES[status],
            steps=step,
            final_loss=tally.steps[-1].loss if tally.steps else None,
            tokens_per_s=throughput.tokens_per_s if is_text else ABSENT,
            samples_per_s=ABSENT if is_text else throughput.tokens_per_s,
            mfu=throughput.mfu,
            peak_memory_bytes=int(memory),
            wire_bytes=wire_bytes,
            weights_sha256=sha256,
            goodput=time_s.goodput,
            time_s=time_s,
        )
        record.write_result(run_dir, source.summarise(result, tally.heldout))
    return sha256
