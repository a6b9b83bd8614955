"""How fast a site computes, from one exchange to the next."""

from __future__ import annotations

import time
from typing import NamedTuple


class Pace(NamedTuple):
    rate: float
    """Samples a second."""
    step_s: float


UNKNOWN = Pace(0.0, 0.0)
"""Nothing is to follow from it."""


class WindowPace:
    """Measures without the site's waits for others."""

    def __init__(self, *, follows: bool):
        self._follows = follows
        self._busy_s, self._samples, self._steps = 0.0, 0, 0
        self._since_s: float | None = None

    def go_on(self) -> None:
        self._since_s = time.perf_counter()

    def pause(self) -> None:
        if self._since_s is not None:
            self._busy_s += time.perf_counter() - self._since_s
        self._since_s = None

    def note(self, samples: int) -> None:
        """Note a step that was made."""
        self._samples += samples
        self._steps += 1

    def cut(self) -> Pace:
        """Return the pace since the last call."""
        busy_s, samples, steps = self._busy_s, self._samples, self._steps
        self._busy_s, self._samples, self._steps = 0.0, 0, 0
        return Pace(samples / busy_s, busy_s / steps) if self._follows and busy_s and steps else UNKNOWN
