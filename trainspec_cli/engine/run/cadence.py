"""When a checkpoint is due: every so many steps, or as often as its measured cost and the failure rate ask for."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch.distributed as dist

from trainspec_cli.engine.comm.json_collectives import broadcast_json
from trainspec_cli.policy.cadence import checkpoint_interval_s, checkpoint_interval_steps
from trainspec_cli.policy.reliability import job_mtbf_s, rollback_mtbf_s
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.canonical import from_plain, to_plain
from trainspec_cli.spec.results.plan import Plan

MEASURING_STEPS = 10
"""`auto` writes its first checkpoint after so many steps, to learn what one costs."""
REMEMBERED_STEPS = 50


@dataclass(frozen=True)
class Interval:
    """What `auto` has chosen, and its grounds."""

    interval_steps: int
    blocked_s: float
    drag_s: float
    written_s: float
    step_time_s: float
    mtbf_s: float | None
    """None: no failure throws the run back."""


@dataclass(frozen=True)
class Choice:
    """What rank 0 tells the others."""

    interval: Interval | None
    """None: the checkpoint that was to be measured failed."""


class Cadence:
    """The same on every rank: it goes by steps and by what rank 0 has measured and told."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._is_auto = plan.spec.checkpoint.interval_steps == AUTO
        wanted = plan.spec.checkpoint.interval_steps
        self._interval_steps = MEASURING_STEPS if wanted == AUTO else wanted
        self._last_due = 0
        self._usual_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._beside_s: list[float] = []

    def start_at(self, step: int) -> None:
        self._last_due = step

    def note_step(self, step_time_s: float, *, writing: bool) -> None:
        (self._beside_s if writing else self._usual_s).append(step_time_s)

    def is_due(self, step: int) -> bool:
        """To be asked once a step."""
        if self._interval_steps is None:
            return False
        due = step - self._last_due >= self._interval_steps if self._is_auto else step % self._interval_steps == 0
        if due:
            self._last_due = step
        return due

    def learn(self, cost_s: tuple[float, float] | None) -> dict[str, Any] | None:
        """`auto`, with how long the newest checkpoint held this rank up and took to be whole (None: it failed).

        Called by every rank together; rank 0's figures count. -> the interval and its grounds, where it is a new one.
        """
        if not self._is_auto:
            return None
        own = Choice(self._best(*cost_s) if cost_s and dist.get_rank() == 0 else None)
        chosen = broadcast_json(to_plain(own), partial(from_plain, Choice)).interval
        self._beside_s.clear()
        if chosen is None or chosen.interval_steps == self._interval_steps:
            return None
        self._interval_steps = chosen.interval_steps
        return asdict(chosen)

    def _best(self, blocked_s: float, written_s: float) -> Interval:
        """Daly's, for what training waited and for what the steps beside the writing took longer than others."""
        usual_s = median(self._usual_s or self._beside_s)
        drag_s = max(0.0, sum(self._beside_s) - usual_s * len(self._beside_s))
        mtbf_s = self._rollback_mtbf_s()
        interval_s = checkpoint_interval_s(blocked_s + drag_s, written_s, mtbf_s)
        return Interval(
            interval_steps=checkpoint_interval_steps(interval_s, usual_s),
            blocked_s=blocked_s,
            drag_s=drag_s,
            written_s=written_s,
            step_time_s=usual_s,
            mtbf_s=mtbf_s if math.isfinite(mtbf_s) else None,
        )

    def _rollback_mtbf_s(self) -> float:
        reliability, plan = self._plan.spec.cluster.reliability, self._plan
        mtbf_s = job_mtbf_s(reliability, plan.world_size)
        return rollback_mtbf_s(plan.spec.resilience, reliability, mtbf_s, plan.layout.dp_replicate)
