"""The work of a rehearsed rank in its last step, in virtual time. The rehearsing process records it
(engine/timeline.py); a trace and a page show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

COMPUTE = "compute stream"
WAIT = "wait"
"""Name of the slices where the compute stream waits."""
MOST_SLICES = 40_000
"""Maximum number of slices to keep per rank. Together they take about 12 MB in a trace. A rank of Llama 3 70B on 256
devices has 11,600 slices."""


@dataclass(frozen=True)
class Slice:
    """An exchange, a wait, or consecutive operations of a stream from the same engine line, without pauses. Times are
    virtual seconds since the start of the step."""

    stream: str
    part: str
    """The part of the step that queued the work."""
    name: str
    begin_s: float
    end_s: float
    operations: int
    longest: str
    """The longest operation in the slice, with the shapes of its inputs."""
    waits_for: str = ""
    """For a wait: the stream that is waited for."""


@dataclass(frozen=True)
class StepPart:
    """The compute stream's work for one part of the step, such as `forward of micro-batch 3, stage 0`."""

    part: str
    begin_s: float
    end_s: float
    waited_s: float
    """The time in this part during which the compute stream waited for another stream."""


@dataclass(frozen=True)
class Timeline:
    micro_batches: int
    """The number of micro-batches that were rehearsed. Later micro-batches repeat them."""
    parts: tuple[StepPart, ...]
    allocated: tuple[tuple[float, int], ...]
    """Points (seconds, bytes) of the allocated memory. Only some are kept, always including the peak."""
    reserved: tuple[tuple[float, int], ...]
    slices: tuple[Slice, ...] = ()
    """The slices of all streams; empty in `--json`, because only a trace needs them."""
    slices_left_out: int = 0
    """Number of short slices that were omitted to keep the trace small."""

    @property
    def peak(self) -> tuple[float, int]:
        """The time of the memory peak in seconds, and its size in bytes."""
        return max(self.allocated, key=itemgetter(1))


def keep_longest(slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices in their order. If there are too many for a viewer, return only the longest ones."""
    if len(slices) <= MOST_SLICES:
        return list(slices)
    by_length = sorted(range(len(slices)), key=lambda place: slices[place].begin_s - slices[place].end_s)
    return [slices[place] for place in sorted(by_length[:MOST_SLICES])]
