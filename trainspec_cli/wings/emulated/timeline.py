"""The work of a rehearsed rank in its last step, in virtual time. The process records it (engine/timeline.py), and a
trace and a page show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

COMPUTE = "compute stream"
WAIT = "wait"
"""Name of the slices that are waits of the compute stream."""
MOST_SLICES = 40_000
"""Maximum number of slices to keep for a rank, which take about 12 MB in a trace. A rank of Llama 3 70B on 256 devices
has 11,600."""


@dataclass(frozen=True)
class Slice:
    """Consecutive operations of a stream, without pauses, from the same line of the engine; or an exchange; or a wait.
    Times are virtual seconds since the beginning of the step."""

    stream: str
    part: str
    """The part of the step that queued it."""
    name: str
    begin_s: float
    end_s: float
    operations: int
    longest: str
    """The longest of its operations, with the shapes of its inputs."""
    waits_for: str = ""
    """The stream that is waited for."""


@dataclass(frozen=True)
class StepPart:
    """Work of the compute stream for a part of the step, such as `forward of micro-batch 3, stage 0`."""

    part: str
    begin_s: float
    end_s: float
    waited_s: float
    """The time in this part during which the stream waited for another stream."""


@dataclass(frozen=True)
class Timeline:
    micro_batches: int
    """The number of micro-batches that were run; later ones repeat them."""
    parts: tuple[StepPart, ...]
    allocated: tuple[tuple[float, int], ...]
    """Points (seconds, bytes). Only some are kept, including the peak."""
    reserved: tuple[tuple[float, int], ...]
    slices: tuple[Slice, ...] = ()
    """The slices of all streams; empty in `--json`, because only a trace needs them."""
    slices_left_out: int = 0
    """Number of short slices that were left out to keep the trace small."""

    @property
    def peak(self) -> tuple[float, int]:
        """The time of the memory peak in seconds, and its size in bytes."""
        return max(self.allocated, key=itemgetter(1))


def keep_longest(slices: Sequence[Slice]) -> list[Slice]:
    """Return the slices, or only the longest ones if there are too many for a viewer, in the same order."""
    if len(slices) <= MOST_SLICES:
        return list(slices)
    by_length = sorted(range(len(slices)), key=lambda place: slices[place].begin_s - slices[place].end_s)
    return [slices[place] for place in sorted(by_length[:MOST_SLICES])]
