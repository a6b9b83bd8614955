"""Measure the parts of a step's time.

Exactly one part runs at any moment; entering a part pauses the one around it, so the parts always add up to the total.

On an accelerator, the marks are events on the compute stream, read only after the step, so nothing waits for them. Two
events around each wait of that stream show how long an exchange kept it from computing, as in NVIDIA's straggler
detection (NVRx) and Greyhound (arXiv:2410.12588).

An exchange that overlaps with the computation is not a part: its start and end are recorded, in another thread on a CPU
and in another stream on an accelerator, and compared with the parts (`exchange_time`).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from trainspec_cli.engine.accelerators import host_clock, host_is_emulated, on_chip
from trainspec_cli.engine.digest import Mark, Span, elapsed_s, mark, wait_for
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
    """Return (seconds with at least one exchange in progress, seconds of that time without compute). Intervals may
    overlap and be in any order."""
    going_on_s, both_s, busy_s = (
        sum(end - begin for begin, end in union(intervals))
        for intervals in (exchanges, [*exchanges, *computing], computing)
    )
    return going_on_s, both_s - busy_s


# The main thread's CPU time and the time that it waits for a CPU, as counted by the kernel (`schedstat`).


SCHEDULED = "/proc/self/schedstat"
LINE_BYTES = 80


class ProcessorClock:
    """A process can only measure itself; a forked process needs a new instance. On systems other than Linux, and
    without `counts`, all values are 0."""

    def __init__(self, *, counts: bool = True) -> None:
        self._descriptor = -1
        if not counts:
            return
        with suppress(OSError):
            self._descriptor = os.open(SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> tuple[float, float]:
        """Return (seconds that the main thread has run, seconds that it was runnable but had no CPU)."""
        if self._descriptor < 0:
            return 0.0, 0.0
        ran_ns, queued_ns, _ = os.pread(self._descriptor, LINE_BYTES, 0).split()
        return int(ran_ns) / 1e9, int(queued_ns) / 1e9

    def close(self) -> None:
        if self._descriptor >= 0:
            self._close()
            self._descriptor = -1


COMPUTING = ("forward", "backward", "optimizer")
LEAST_AHEAD_S = 2e-4
"""If the host is ahead of its device by less than this, it is assumed not to keep the device busy, because the two
clocks agree only to within about 50 us."""
LEAST_AHEAD = 0.1
"""The same, as a fraction of the step part's duration. If the host is further ahead, the device itself is the
bottleneck."""


class QueuedTime(NamedTuple):
    """Time in a step during which the main thread was runnable but had no CPU, in seconds."""

    own_s: float
    exposed_s: float
    """The part of that time in exposed communication; `own_s` is the part in the rest of the step. On an accelerator,
    exposed communication does not occupy the thread, so all the time counts as `own_s`."""


BLOCKED_S = 1e-3
"""A host that has waited this long for an event continues within about 50 us after the device reaches it."""


class UnixClock:
    """Converts moments on the device to Unix time, by adding the time since a moment whose Unix time is known. That
    reference is renewed in each step, because clocks drift and CUDA measures the time between events in fp32."""

    def __init__(self, moment: Mark, now: Callable[[], float] = time.time):
        """`now` returns the time on the clock that moments are converted to."""
        wait_for(moment)
        self.now = now
        self._known = moment, now()

    def of(self, moment: Mark) -> float:
        """Return the Unix time of `moment`, which the device must have reached."""
        known, unix_s = self._known
        return unix_s + elapsed_s(known, moment)

    def wait_for(self, moment: Mark) -> None:
        """Wait until the device has reached `moment`."""
        began_s = self.now()
        wait_for(moment)
        if not isinstance(moment, torch.Event):
            late_s = time.perf_counter() - moment
            self._known = moment, self.now() - late_s
        elif self.now() - began_s > BLOCKED_S:
            self._known = moment, self.now()


class StepClock:
    """Measures time on the device's current stream, which is the training compute stream."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = on_chip(device)
        self._stream = torch.accelerator.current_stream(device) if self.on_gpu else None
        self._running = ["other"]
        self._marks: list[tuple[str, Mark]] = []
        self._queued_at: list[float] = []
        """On an accelerator, the host time at which each mark was queued."""
        self._last = self.mark()
        self._beside: list[Span] = []
        self._processor = ProcessorClock(counts=not host_is_emulated(device))
        self._queued_s = self._processor.read()[1]
        self._exposed_queued_s = 0.0
        self._unix = UnixClock(self._last, host_clock(device))
        self._agreed: Span = self._last, self._last

    def mark(self) -> Mark:
        """Return the current moment in the current stream."""
        return mark(on_gpu=self.on_gpu)

    def _close_segment(self) -> None:
        now = self.mark()
        self._marks.append((self._running[-1], self._last))
        self._last = now
        if self.on_gpu:
            self._queued_at.append(self._unix.now())

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
        """Count the block as exposed communication or, outside the compute stream, as an exchange that overlaps with
        other work. Its bandwidth is not measured."""
        if self._stream is not None:
            if torch.accelerator.current_stream(self.device) == self._stream:
                with self.part("exposed_comm"):
                    yield False
            else:
                began = self.mark()
                yield False
                self._beside.append((began, self.mark()))
            return
        began_s = self._processor.read()[1]
        with self.part("exposed_comm"):
            yield False
        self._exposed_queued_s += self._processor.read()[1] - began_s

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """The block is the small exchange that ends a step. Count it as exposed communication, and record it as the
        step's agreement."""
        began = self.mark()
        with self.collective():
            yield
        self._agreed = began, self.mark()

    def note_beside(self, begin_s: float, end_s: float) -> None:
        """Record an exchange that overlapped with the parts, in host time (ignored on an accelerator, whose parts are
        in device time). Any thread may call this."""
        if not self.on_gpu:
            self._beside.append((begin_s, end_s))

    def restart(self) -> None:
        """Discard the time since the last `cut`, for example an evaluation's, which does not belong to any step."""
        self._marks.clear()
        self._queued_at.clear()
        self._beside.clear()
        self._last = self.mark()
        self._cut_queued()

    def cut(self) -> Segments:
        """End the step, return its marks, and start the next one."""
        self._close_segment()
        segments = Segments(
            self._marks, self._last, self._beside, self._cut_queued(), self._agreed, self._unix, self._queued_at
        )
        self._marks = []
        self._queued_at = []
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
    """The marks of a step, whose times are read from the device later."""

    marks: list[tuple[str, Mark]]
    """Each mark, with the part that started at it."""
    end: Mark
    beside: Sequence[Span]
    queued: QueuedTime
    agreed: Span
    unix: UnixClock
    queued_at: Sequence[float] = ()
    """On an accelerator, the host time at which each part had been queued."""

    def wait(self) -> None:
        """Wait for the device to reach the step's end. Only then are values that the step copies to the host valid."""
        self.unix.wait_for(self.end)

    def exchange_time(self) -> tuple[float, float] | None:
        """Return the total duration of the step's exchanges and its exposed part; None if no exchange overlapped with
        compute, in which case all of it was exposed."""
        if not self.beside:
            return None
        origin = self.marks[0][1]
        waiting = list[Interval]()
        computing = list[Interval]()
        for name, begin, end in self._parts():
            if name == "exposed_comm" or name in COMPUTING:
                interval = elapsed_s(origin, begin), elapsed_s(origin, end)
                (computing if name in COMPUTING else waiting).append(interval)
        for begin, end in self.beside:
            wait_for(end)
            waiting.append((elapsed_s(origin, begin), elapsed_s(origin, end)))
        return exchange_time(waiting, computing)

    def agreement(self) -> tuple[float, float]:
        """Return the duration of the small exchange that ended the step, and the Unix time when this rank left it."""
        began, ended = self.agreed
        self.wait()
        return elapsed_s(began, ended), self.unix.of(ended)

    def starved_s(self) -> float | None:
        """Return how long the device waited, during the passes and the optimizer step, because the host had not queued
        enough work. A part is treated as such a wait if the device has nothing left to do at its end. None on a CPU."""
        if not self.queued_at:
            return None
        self.wait()
        starved_s = 0.0
        for (name, begin, end), queued_at in zip(self._parts(), self.queued_at, strict=True):
            lasted_s = elapsed_s(begin, end)
            ahead_s = self.unix.of(end) - queued_at
            if name in COMPUTING and ahead_s < max(LEAST_AHEAD_S, LEAST_AHEAD * lasted_s):
                starved_s += lasted_s
        return starved_s

    def parts_s(self) -> dict[str, float]:
        """Return the time of each part in seconds; wait for the device to reach the step's end."""
        self.wait()
        parts = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._parts():
            parts[name] += elapsed_s(start, end)
        return parts

    def _parts(self) -> Iterator[tuple[str, Mark, Mark]]:
        """Yield (part, begin, end)."""
        ends = [start for _, start in self.marks[1:]] + [self.end]
        for (name, start), end in zip(self.marks, ends, strict=True):
            yield name, start, end
