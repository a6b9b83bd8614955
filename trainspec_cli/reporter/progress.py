"""Tracks the progress of a run from rank 0's events as they arrive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainspec_cli.run.folder.accounting import WARMUP_STEPS, measure_throughput
from trainspec_cli.run.folder.event_types.events import (
    CheckpointEvent,
    EndEvent,
    EvalEvent,
    Event,
    StartEvent,
    StepEvent,
    UsageEvent,
)

RECENT_STEPS = 20
"""Number of steps over which the displayed speed is averaged."""


@dataclass
class Progress:
    """The state of a run in progress. Values are None until they are known."""

    max_steps: int | None
    """Number of steps of the run; None if unknown."""
    begin: StartEvent | None = None
    """The start event of rank 0; None until the workers are ready."""
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    time_left_s: float | None = None
    usage: UsageEvent | None = None
    """For a user command: the newest event with counters."""
    evaluated_step: int = -1
    saved_step: int = -1
    """The steps of the newest evaluation and of the newest checkpoint."""
    has_ended: bool = False
    _recent: deque[StepEvent] = field(default_factory=lambda: deque(maxlen=WARMUP_STEPS + RECENT_STEPS))

    @property
    def unit(self) -> str:
        """Return the unit of the speed: tokens or samples."""
        return self.begin.unit if self.begin else "tokens"

    @property
    def has_stepped(self) -> bool:
        return bool(self._recent)

    @property
    def after_last_step(self) -> str:
        """Return what the workers are doing after the last step; empty until then."""
        if not self.has_stepped or self.max_steps is None or self.step < self.max_steps:
            return ""
        if self.has_ended:
            return "ending the workers"
        if self.evaluated_step < self.step:
            return "evaluating"
        return "writing the checkpoint" if self.saved_step < self.step else "writing the result"

    def add(self, event: Event) -> None:
        if isinstance(event, StartEvent):
            self.begin = event
            self.has_ended = False
            self.step = event.step
        elif isinstance(event, UsageEvent):
            self.usage = event
        elif isinstance(event, EvalEvent):
            self.evaluated_step = event.step
        elif isinstance(event, CheckpointEvent):
            self.saved_step = event.step
        elif isinstance(event, EndEvent):
            self.has_ended = True
        elif isinstance(event, StepEvent):
            self.step = event.step
            self.loss = event.loss
            self._recent.append(event)
            # The first steps include compilation and allocation. If they were counted, the displayed speed would be too
            # low for a long time.
            if self.begin and len(self._recent) > WARMUP_STEPS:
                recent = list(self._recent)
                throughput = measure_throughput(
                    recent,
                    flops_per_token=self.begin.flops_per_token,
                    peak_flops=self.begin.peak_flops,
                    world_size=self.begin.world_size,
                )
                steady = recent[WARMUP_STEPS:]
                step_time_s = sum(step.step_time_s for step in steady) / len(steady)
                self.tokens_per_s = throughput.tokens_per_s
                self.mfu = throughput.mfu
                if self.max_steps is not None:
                    self.time_left_s = max(0, self.max_steps - self.step) * step_time_s
