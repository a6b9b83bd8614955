"""Moments of the computation: of the host's clock on a CPU, events on the compute stream on a GPU."""

from __future__ import annotations

import time

import torch

Mark = float | torch.cuda.Event


def mark(*, on_gpu: bool) -> Mark:
    """Now; on a GPU, when the device reaches it on the compute stream."""
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Until the device has reached it."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def elapsed_s(start: Mark, end: Mark) -> float:
    """On a GPU the device must have reached both."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    return float(end) - float(start)  # type: ignore[arg-type]
