"""Measure the parts of a step's time.

Exactly one part runs at any moment; entering a part pauses the one around it, so the parts always add up to the total.

On a GPU, the marks are events on the compute stream, read only after the step, so nothing waits for them. The parts run
in the order of the host's marks; collectives run on other streams and are not marked, so exposed communication stays
inside forward and backward.

An exchange that another thread runs during the computation is not a part: on a CPU, its begin and end are recorded and
compared with the parts (`exchange_time`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.digest import Mark, elapsed_s, mark, wait_for
from trainspec_cli.run.folder.event_types.events import PARTS

Interval = tuple[float, float]
"""(begin, end) in seconds, on the same clock."""
Bounds = TypeVar("Bounds", int, float)


def union(intervals: Iterable[tuple[Bounds, Bounds]]) -> list[tuple[Bounds, Bounds]]:
    """Return disjoint intervals that cover the same time, in order."""
    joined: list[tuple[Bounds, Bounds]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def exchange_time(exchanges: Sequence[Interval], computing: Sequence[Interval]) -> tuple[float, float]:
    """Return (seconds with at least one exchange in progress, seconds of these without compute); intervals may overlap
    and be in any order."""
    going_on_s, both_s, busy_s = (
        sum(end - begin for begin, end in union(intervals))
        for intervals in (exchanges, [*exchanges, *computing], computing)
    )
    return going_on_s, both_s - busy_s


# The main thread's time on a processor and its time waiting for one, as counted by the kernel (`schedstat`).


SCHEDULED = "/proc/self/schedstat"
LINE_BYTES = 80


class ProcessorClock:
    """Opened by the process that it measures; a forked process opens its own. On systems other than Linux, all values
    are 0."""

    def __init__(self) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> tuple[float, float]:
        """Return (seconds that the main thread has run, seconds that it was runnable but had no processor)."""
        if self._descriptor < 0:
            return 0.0, 0.0
        ran_ns, queued_ns, _ = os.pread(self._descriptor, LINE_BYTES, 0).split()
        return int(ran_ns) / 1e9, int(queued_ns) / 1e9

    def close(self) -> None:
        if self._descriptor >= 0:
            self._close()
            self._descriptor = -1


COMPUTING = ("forward", "backward", "optimizer")


class QueuedTime(NamedTuple):
    """Time in a step while the main thread was runnable but had no processor."""

    own_s: float
    exposed_s: float
    """The time in exposed communication; `own_s` is that in all other parts."""


class StepClock:
    def __init__(self, device: torch.device):
        self.on_gpu = on_chip(device)
        self._running = ["other"]
        self._marks: list[tuple[str, Mark]] = []
        self._last = mark(on_gpu=self.on_gpu)
        self._beside: list[Interval] = []
        self._processor = ProcessorClock()
        self._queued_s = self._processor.read()[1]
        self._exposed_queued_s = 0.0
        self.agreement = (0.0, 0.0)
        """The duration of the small exchange that ends a step, and the Unix time when this rank left it."""

    def _close_segment(self) -> None:
        now = mark(on_gpu=self.on_gpu)
        self._marks.append((self._running[-1], self._last))
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time in the block as `name`, one of `PARTS`."""
        self._close_segment()
        self._running.append(name)
        try:
            yield
        finally:
            self._close_segment()
            self._running.pop()

    @contextmanager
    def collective(self, _sent_bytes: float | None = None) -> Iterator[bool]:
        """Count the block as exposed communication, if the host can see it; its bandwidth is not measured."""
        if self.on_gpu:
            yield False
            return
        began_s = self._processor.read()[1]
        with self.part("exposed_comm"):
            yield False
        self._exposed_queued_s += self._processor.read()[1] - began_s

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Count the block as exposed communication, and record it as the `agreement`; the launch of GPU work takes no
        time here."""
        began_s = time.perf_counter()
        with self.collective():
            yield
        if not self.on_gpu:
            self.agreement = time.perf_counter() - began_s, time.time()

    def note_beside(self, begin_s: float, end_s: float) -> None:
        """Record an exchange that overlapped with the parts, on the host's clock. Any thread may call it."""
        self._beside.append((begin_s, end_s))

    def restart(self) -> None:
        """Discard the time since the last `cut`, for example that of an evaluation, which does not belong to any
        step."""
        self._marks.clear()
        self._beside.clear()
        self._last = mark(on_gpu=self.on_gpu)
        self._cut_queued()

    def cut(self) -> Segments:
        """End the step, start the next one, and return its marks."""
        self._close_segment()
        beside = () if self.on_gpu else self._beside
        queued = self._cut_queued()
        segments = Segments(self._marks, self._last, beside, queued)
        self._marks = []
        self._beside = []
        return segments

    def _cut_queued(self) -> QueuedTime:
        now_s = self._processor.read()[1]
        exposed_s = self._exposed_queued_s
        whole_s = now_s - self._queued_s
        self._queued_s = now_s
        self._exposed_queued_s = 0.0
        return QueuedTime(max(0.0, whole_s - exposed_s), exposed_s)


@dataclass(frozen=True)
class Segments:
    """The marks of a step; their times are read from the device later."""

    marks: list[tuple[str, Mark]]
    """Each mark, with the part that started there."""
    end: Mark
    beside: Sequence[Interval]
    queued: QueuedTime

    def exchange_time(self) -> tuple[float, float] | None:
        """Return the total duration of the step's exchanges and its exposed part; None if none overlapped with compute,
        so that all of it was exposed."""
        if not self.beside:
            return None
        waiting = list[Interval]()
        computing = list[Interval]()
        for name, begin, end in self._parts():
            if name == "exposed_comm" or name in COMPUTING:
                (computing if name in COMPUTING else waiting).append((float(begin), float(end)))  # type: ignore[arg-type]
        return exchange_time([*self.beside, *waiting], computing)

    def parts_s(self) -> dict[str, float]:
        """Return seconds by part; wait for the device to reach the step's end."""
        wait_for(self.end)
        parts = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._parts():
            parts[name] += elapsed_s(start, end)
        return parts

    def _parts(self) -> Iterator[tuple[str, Mark, Mark]]:
        """Yield (part, begin, end)."""
        ends = [start for _, start in self.marks[1:]] + [self.end]
        for (name, start), end in zip(self.marks, ends, strict=True):
            yield name, start, end
