"""Measure the parts of a step's time.

At any moment one part is running; entering a part pauses the one around it, so the parts always sum to the whole.
On a GPU the marks are events on the compute stream, read only after the step: nothing waits for them.
There the parts run in the order of the host's marks; collectives run on streams of their own and are not marked,
so exposed communication stays inside forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainspec_cli.engine.marks import Mark, elapsed_s, mark, wait_for
from trainspec_cli.rundir.event_types import PARTS


class StepClock:
    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._running = ["other"]
        self._marks: list[tuple[str, Mark]] = []
        self._last = mark(on_gpu=self.on_gpu)

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
    def collective(self) -> Iterator[None]:
        """Count the time inside as exposed communication, if the host can see it."""
        if self.on_gpu:
            yield
            return
        with self.part("exposed_comm"):
            yield

    def restart(self) -> None:
        """Discard the time since the last `cut`, for example of an evaluation, which belongs to no step."""
        self._marks.clear()
        self._last = mark(on_gpu=self.on_gpu)

    def cut(self) -> Segments:
        """End the step, start the next one, and return its marks."""
        self._close_segment()
        segments = Segments(self._marks, self._last)
        self._marks = []
        return segments


class Segments:
    def __init__(self, marks: list[tuple[str, Mark]], end: Mark):
        self._marks, self._end = marks, end

    def parts_s(self) -> dict[str, float]:
        """Return seconds by part; wait for the device to reach the step's end."""
        wait_for(self._end)
        parts = dict.fromkeys(PARTS, 0.0)
        ends = [start for _, start in self._marks[1:]] + [self._end]
        for (name, start), end in zip(self._marks, ends, strict=True):
            parts[name] += elapsed_s(start, end)
        return parts
