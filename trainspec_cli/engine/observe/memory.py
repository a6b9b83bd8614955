"""Watch this rank's memory from step to step, and report a leak once, while the run is still alive."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import psutil
import torch

from trainspec_cli.core.units import format_bytes
from trainspec_cli.engine.accelerators import device_memory, on_chip
from trainspec_cli.run.recovery.leak import WINDOW, slope_per_step, steps_until_full

SETTLING_STEPS = 10
"""The first steps, which allocate memory that later ones reuse."""


@dataclass
class Readings:
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    used_bytes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))


class MemoryWatch:
    """Takes a reading every few steps, so that a window spans a fraction of the run, whatever its length."""

    def __init__(self, device: torch.device, first_step: int, last_step: int):
        self._device, self._last_step = device, last_step
        self._first_step = first_step + SETTLING_STEPS
        self._every_steps = max(1, (last_step - first_step) // (4 * WINDOW))
        self._readings: dict[str, Readings] = {}
        self._sizes = set[int]()
        self._process = psutil.Process()

    def check(self, step: int, micro_batch_size: int = 0) -> str | None:
        """Return a warning if one kind of memory grows so fast that it will run out before the last step. A step whose
        largest micro-batch has another size than any before it allocates anew, as the first ones do."""
        if micro_batch_size not in self._sizes:
            if self._sizes and self._first_step <= self._last_step:
                self._first_step = max(self._first_step, step + SETTLING_STEPS)
                self._readings.clear()
            self._sizes.add(micro_batch_size)
        if step < self._first_step or step % self._every_steps:
            return None
        for kind, (used_bytes, free_bytes) in self._usage().items():
            readings = self._readings.setdefault(kind, Readings())
            readings.steps.append(step)
            readings.used_bytes.append(used_bytes)
            left = steps_until_full(list(readings.steps), list(readings.used_bytes), free_bytes)
            if left is not None and step + left < self._last_step:
                self._first_step = self._last_step + 1
                slope = slope_per_step(list(readings.steps), list(readings.used_bytes))
                return (
                    f"{kind} memory grows by {format_bytes(slope)} a step and will be full at about step "
                    f"{step + left:.0f}, before the last one ({self._last_step}): something keeps what it should free"
                )
        return None

    def _usage(self) -> dict[str, tuple[float, float]]:
        """Map each kind of memory to (bytes this process uses, bytes left)."""
        host = (float(self._process.memory_info().rss), float(psutil.virtual_memory().available))
        if not on_chip(self._device):
            return {"host": host}
        memory = device_memory(self._device)
        return {"host": host, "device": (float(memory.used), float(memory.available))}
