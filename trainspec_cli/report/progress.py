"""Where a running run stands, from the events of rank 0 as they come in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from trainspec_cli.report.history import Event
from trainspec_cli.rundir.throughput import WARMUP_STEPS, measure_throughput

RECENT_STEPS = 20
"""Speed is shown over so many steps."""


@dataclass
class Progress:
    """The state of a run that is watched. Figures are None until they mean something."""

    max_steps: int
    begin: Event = field(default_factory=dict)
    """The `start` event of rank 0; empty until the workers stand."""
    step: int = 0
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    time_left_s: float | None = None
    _recent: deque[Event] = field(default_factory=lambda: deque(maxlen=WARMUP_STEPS + RECENT_STEPS))

    @property
    def unit(self) -> str:
        """What speed counts: tokens, or samples."""
        return str(self.begin.get("unit", "tokens"))

    @property
    def has_stepped(self) -> bool:
        return bool(self._recent)

    def take(self, event: Event) -> None:
        if event["type"] == "start":
            self.begin = event
            self.step = event["step"]
        elif event["type"] == "step":
            self._take_step(event)

    def _take_step(self, event: Event) -> None:
        self.step, self.loss = event["step"], event["loss"]
        self._recent.append(event)
        if len(self._recent) > WARMUP_STEPS:
            self._measure()

    def _measure(self) -> None:
        recent = list(self._recent)
        throughput = measure_throughput(
            recent,
            flops_per_token=self.begin["flops_per_token"],
            peak_flops=self.begin["peak_flops"],
            world_size=self.begin["world_size"],
        )
        steady = recent[WARMUP_STEPS:]
        step_time_s = sum(step["step_time_s"] for step in steady) / len(steady)
        self.tokens_per_s, self.mfu = throughput.tokens_per_s, throughput.mfu
        self.time_left_s = (self.max_steps - self.step) * step_time_s
