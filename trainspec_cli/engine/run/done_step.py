"""A step that was made, and the event that is written of it once its figures have come from the device."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.engine.data.staging import Traffic
from trainspec_cli.engine.observe.clock import Segments
from trainspec_cli.engine.run.coordinator import StepSamples
from trainspec_cli.engine.run.step import StepOutcome
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.recipe.keys.data import DataSpec
from trainspec_cli.run.folder.event_types.training import StepEvent


@dataclass(frozen=True)
class DoneStep:
    """A step whose figures have not been read from the device yet."""

    step: int
    outcome: StepOutcome
    lr: float
    segments: Segments
    samples: StepSamples
    traffic: Traffic
    """Copies of its batch to the device, and allocations: there are none once all is warm."""
    noise_scale: float | None
    """The noise scale of the gradients up to this step, where the next batch hangs on it."""
    agreement: tuple[float, float]
    """The duration of the exchange that ended it, and the Unix time when this rank left that."""
    garbage_s: float
    """It collected garbage for so long; 0 on a GPU, which computes meanwhile."""

    def event(self, data: DataSpec, noise_scale: float | None) -> StepEvent:
        """Return the event of the step, whose figures are read from the device. `noise_scale`: that of the gradients up
        to this step."""
        parts_s, exchanged, outcome = self.segments.parts_s(), self.segments.exchange_time(), self.outcome
        samples = self.samples.step_samples
        return StepEvent(
            step=self.step,
            loss=outcome.loss.item(),
            grad_norm=outcome.grad_norm.item(),
            lr=self.lr,
            tokens=samples * data.seq_len if data.unit == "tokens" else ABSENT,
            samples=samples,
            step_time_s=sum(parts_s.values()),
            time_s=parts_s,
            exchange_s=exchanged.seconds if exchanged else ABSENT,
            exposed_s=exchanged.exposed_s if exchanged else ABSENT,
            queued_s=self.segments.queued.own_s,
            skipped=bool(outcome.skipped.item()),
            noise_scale=ABSENT if noise_scale is None else noise_scale,
            group=self.samples.group,
            groups=self.samples.groups,
            took=self.samples.took,
            h2d_copies=self.traffic.h2d_copies,
            h2d_bytes=self.traffic.h2d_bytes,
            allocations=self.traffic.allocations,
        )
