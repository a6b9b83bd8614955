"""Learning-rate schedules: pure functions of the step, so a resume needs no state."""

from __future__ import annotations

import math

from trainspec_cli.recipe.keys.optim import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, peak_lr: float, step: float, max_steps: int) -> float:
    """Return the rate of update `step` (0 is the first) of a run of `max_steps`.

    `step` may lie between two updates, where one update stands for several (see `balance/batch/batch_schedule.py`).
    """
    if step < schedule.warmup_steps:
        return min(peak_lr, peak_lr * (step + 1) / schedule.warmup_steps)
    return peak_lr * _DECAYS[schedule.kind](schedule, step, max_steps)


def _constant(schedule: ScheduleSpec, step: float, max_steps: int) -> float:
    return 1.0


def _cosine(schedule: ScheduleSpec, step: float, max_steps: int) -> float:
    """Return half a cosine from 1 to `final_lr_ratio` (SGDR, arXiv:1608.03983, eq. 5)."""
    progress = _part_done(step, schedule.warmup_steps, max_steps)
    return schedule.final_lr_ratio + (1 - schedule.final_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2


def _wsd(schedule: ScheduleSpec, step: float, max_steps: int) -> float:
    """Stay at 1, then fall linearly over the last `decay_fraction` (WSD; MiniCPM, arXiv:2404.06395)."""
    decay_start = max(schedule.warmup_steps, round(max_steps * (1 - schedule.decay_fraction)))
    if step < decay_start:
        return 1.0
    return 1 - (1 - schedule.final_lr_ratio) * _part_done(step, decay_start, max_steps)


def _part_done(step: float, start: int, end: int) -> float:
    """Return the progress: 0 at `start`, 1 at the last update, `end` - 1."""
    return min(1.0, (step - start) / max(1, end - 1 - start))


_DECAYS = {"constant": _constant, "cosine": _cosine, "wsd": _wsd}
