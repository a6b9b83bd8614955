"""The prediction of a run on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LocalPrediction:
    time_s: dict[str, float]
    """A step's parts, named as in the step events."""
    memory: dict[str, float]
    """Bytes of one process at its peak, by cause: what a run measures."""
    beside: dict[str, float] = field(default_factory=dict)
    """Bytes that a GPU needs beside what its allocator hands out, and a run does not measure."""

    @property
    def step_time_s(self) -> float:
        return sum(self.time_s.values())

    @property
    def peak_memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def needed_bytes(self) -> float:
        return self.peak_memory_bytes + sum(self.beside.values())
