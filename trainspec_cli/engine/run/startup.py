"""Measure how long the parts of a worker's start take, so that a slow restart can be explained."""

from __future__ import annotations

import time


class Startup:
    def __init__(self) -> None:
        self._part_began_s = time.perf_counter()
        self.parts_s: dict[str, float] = {}
        """Seconds of each part so far (`run.folder.event_types.events.STARTUP`)."""

    def end(self, part: str) -> None:
        """Record that a part has ended, and that the next one begins."""
        now_s = time.perf_counter()
        self.parts_s[part] = now_s - self._part_began_s
        self._part_began_s = now_s
