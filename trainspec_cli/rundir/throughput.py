"""Tokens (or samples) a second and MFU from step events: one definition, for result.json, report and live view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WARMUP_STEPS = 3
"""The first steps after a start compile and allocate; they are left out where more than these were made."""


@dataclass(frozen=True)
class Throughput:
    tokens_per_s: float
    """Samples a second, where the steps count no tokens."""
    mfu: float
    """Model FLOPs a second, as a part of all devices' peak; recomputed work does not count."""
    steps: int
    """Steps it is taken over."""
    left_out: int
    """Steps before them that were left out."""


def measure_throughput(
    steps: Sequence[dict[str, Any]], *, flops_per_token: float, peak_flops: float, world_size: int
) -> Throughput:
    """Over the `step` events since one start, in order. `peak_flops` is one device's."""
    left_out = WARMUP_STEPS if len(steps) > WARMUP_STEPS else 0
    steady = steps[left_out:]
    seconds = sum(step["step_time_s"] for step in steady)
    tokens_per_s = sum(units(step) for step in steady) / seconds if seconds else 0.0
    mfu = tokens_per_s * flops_per_token / (world_size * peak_flops) if peak_flops else 0.0
    return Throughput(tokens_per_s, mfu, len(steady), left_out)


def units(step: dict[str, Any]) -> int:
    """Tokens of a `step` event; its samples, where it counts no tokens (images, volumes)."""
    return int(step["tokens"] if "tokens" in step else step["samples"])
