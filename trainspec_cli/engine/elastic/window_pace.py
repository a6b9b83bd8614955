"""How fast a site computes, from one exchange to the next."""

from __future__ import annotations

import time


class WindowPace:
    """Measures without the site's waits for others."""

    def __init__(self, *, follows: bool):
        self._follows = follows
        self._busy_s, self._samples = 0.0, 0
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

    def cut(self) -> float:
        """Return the samples a second since the last call; 0 where nothing is to follow from that."""
        busy_s = self._busy_s
        samples = self._samples
        self._busy_s = 0.0
        self._samples = 0
        return samples / busy_s if self._follows and busy_s else 0.0
