"""What is predicted of a run on this machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalPrediction:
    time_s: dict[str, float]
    """A step's parts, named as in the step events."""
    memory: dict[str, float]
    """Bytes of one process at its peak, by cause."""

    @property
    def step_time_s(self) -> float:
        return sum(self.time_s.values())

    @property
    def peak_memory_bytes(self) -> float:
        return sum(self.memory.values())
