"""Measure the parts of a step's time.

At any moment one part is running; entering a part pauses the one around it, so the parts always sum to the whole.
On a GPU the marks are events on the compute stream, read only after the step: nothing waits for them.
There the parts run in the order of the host's marks; collectives run on streams of their own and are not marked,
so exposed communication stays inside forward and backward.

An exchange that another thread makes beside the computation is no part: its begin and end are noted, on a CPU, and held
against the parts (`intervals.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.marks import Mark, elapsed_s, mark, wait_for
from trainspec_cli.engine.observe.intervals import ExchangeTime, Interval, exchange_time
from trainspec_cli.engine.observe.processor import ProcessorClock
from trainspec_cli.run.folder.event_types.event import PARTS

COMPUTING = ("forward", "backward", "optimizer")


class QueuedTime(NamedTuple):
    """Time of a step in which the main thread could run and had no processor."""

    own_s: float
    exposed_s: float
    """In exposed communication; `own_s` in all other parts."""


class StepClock:
    def __init__(self, device: torch.device):
        self.on_gpu = on_chip(device)
        self._running = ["other"]
        self._marks: list[tuple[str, Mark]] = []
        self._last = mark(on_gpu=self.on_gpu)
        self._beside: list[Interval] = []
        self._processor = ProcessorClock()
        self._queued_s, self._exposed_queued_s = self._processor.read()[1], 0.0
        self.agreement = (0.0, 0.0)
        """The duration of the small exchange that ends a step, and the Unix time when this rank left it."""

    def _close_segment(self) -> None:
        now = mark(on_gpu=self.on_gpu)
        self._marks.append((self._running[-1], self._last))
        self._last = now

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`, one of `PARTS`."""
        self._close_segment()
        self._running.append(name)
        try:
            yield
        finally:
            self._close_segment()
            self._running.pop()

    @contextmanager
    def collective(self, _sent_bytes: float | None = None) -> Iterator[bool]:
        """Count the time inside as exposed communication, if the host can see it; how fast it is is not looked at."""
        if self.on_gpu:
            yield False
            return
        began_s = self._processor.read()[1]
        with self.part("exposed_comm"):
            yield False
        self._exposed_queued_s += self._processor.read()[1] - began_s

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Count the time inside as exposed communication, and remember it as the `agreement`; what a GPU is only asked
        for takes no time here."""
        began_s = time.perf_counter()
        with self.collective():
            yield
        if not self.on_gpu:
            self.agreement = time.perf_counter() - began_s, time.time()

    def note_beside(self, begin_s: float, end_s: float) -> None:
        """Note an exchange that went on beside the parts, on the host's clock. Any thread may call it."""
        self._beside.append((begin_s, end_s))

    def restart(self) -> None:
        """Discard the time since the last `cut`, for example of an evaluation, which belongs to no step."""
        self._marks.clear()
        self._beside.clear()
        self._last = mark(on_gpu=self.on_gpu)
        self._cut_queued()

    def cut(self) -> Segments:
        """End the step, start the next one, and return its marks."""
        self._close_segment()
        beside, queued = () if self.on_gpu else self._beside, self._cut_queued()
        segments = Segments(self._marks, self._last, beside, queued)
        self._marks, self._beside = [], []
        return segments

    def _cut_queued(self) -> QueuedTime:
        now_s, exposed_s = self._processor.read()[1], self._exposed_queued_s
        whole_s, self._queued_s, self._exposed_queued_s = now_s - self._queued_s, now_s, 0.0
        return QueuedTime(max(0.0, whole_s - exposed_s), exposed_s)


class Segments:
    def __init__(
        self,
        marks: list[tuple[str, Mark]],
        end: Mark,
        beside: Sequence[Interval] = (),
        queued: QueuedTime = QueuedTime(0.0, 0.0),  # noqa: B008 - it is immutable
    ):
        self._marks, self._end, self._beside, self.queued = marks, end, beside, queued

    def exchange_time(self) -> ExchangeTime | None:
        """Return how long the step's exchanges took and how much of that was exposed; None where none went on beside
        the computation, so that all of it was."""
        if not self._beside:
            return None
        parts = [(name, float(begin), float(end)) for name, begin, end in self._segments()]  # type: ignore[arg-type]
        waiting = [(begin, end) for name, begin, end in parts if name == "exposed_comm"]
        computing = [(begin, end) for name, begin, end in parts if name in COMPUTING]
        return exchange_time([*self._beside, *waiting], computing)

    def parts_s(self) -> dict[str, float]:
        """Return seconds by part; wait for the device to reach the step's end."""
        wait_for(self._end)
        parts = dict.fromkeys(PARTS, 0.0)
        for name, start, end in self._segments():
            parts[name] += elapsed_s(start, end)
        return parts

    def _segments(self) -> Iterator[tuple[str, Mark, Mark]]:
        """Yield (part, begin, end)."""
        ends = [start for _, start in self._marks[1:]] + [self._end]
        for (name, start), end in zip(self._marks, ends, strict=True):
            yield name, start, end
