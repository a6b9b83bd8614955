"""Moments of the computation: of the host's clock on a CPU, events on the compute stream on a GPU."""

from __future__ import annotations

import time

import torch

Mark = float | torch.Event


def mark(*, on_gpu: bool) -> Mark:
    """Mark now; on a GPU, the moment at which the compute stream gets here."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.Event(enable_timing=True)
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Wait until the device has reached `moment`."""
    if isinstance(moment, torch.Event):
        moment.synchronize()


def elapsed_s(start: Mark, end: Mark) -> float:
    """Return the seconds between two moments; on a GPU the device must have reached both."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        return start.elapsed_time(end) / 1e3
    return float(end) - float(start)  # type: ignore[arg-type]
