"""Tell a process that works from one that hangs, by what is seen of it from outside while it makes no step.

A program evaluates, compiles and saves between steps, and says nothing of it. What works shows that: its stack changes,
it reads or writes, its children compute. A process whose stack stays the same may still compute in native code; where
another one stands still meanwhile, and it has a GPU, it spins: it waits for that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOVED_BYTES = 2**16
"""A process that reads and writes less between two looks does not work: connections are kept alive by less."""
BUSY_CORES = 0.2
"""A process that computes, or waits for a processor, for a smaller part of the time is asleep."""


@dataclass(frozen=True)
class Reading:
    """What was seen of a process since the look before."""

    stopped: bool = False
    """It was stopped by a signal, and its stack cannot be read."""
    stack_changed: bool = False
    has_stack: bool = True
    """False for a process that does not answer the signal that asks for its stack."""
    in_library: bool = False
    """Its innermost Python frame is one of torch or of another library that trains."""
    busy_cores: float = 0.0
    """Threads that computed, or waited for a processor, on average."""
    child_cores: float = 0.0
    """Likewise, of what it has started and is no rank itself."""
    moved_bytes: int = 0
    """Bytes read and written."""
    on_gpu: bool = False


def working(readings: Mapping[int, Reading]) -> tuple[int, ...]:
    """Return the ranks that show a sign of work."""
    asleep = [rank for rank, reading in readings.items() if _stands_still(reading)]
    return tuple(rank for rank, reading in readings.items() if _works(reading, waits_for=bool(set(asleep) - {rank})))


def _stands_still(reading: Reading) -> bool:
    if reading.stopped:
        return True
    moves = reading.stack_changed or reading.moved_bytes > MOVED_BYTES
    return not moves and max(reading.busy_cores, reading.child_cores) < BUSY_CORES


def _works(reading: Reading, *, waits_for: bool) -> bool:
    """`waits_for`: another rank stands still, for which this one may wait."""
    if _stands_still(reading):
        return False
    if reading.stack_changed or reading.moved_bytes > MOVED_BYTES or reading.child_cores >= BUSY_CORES:
        return True
    spins = reading.has_stack and waits_for and (reading.in_library or reading.on_gpu)
    return not spins
