"""Live bytes of a rank by cause, and what they were at the fullest moment."""

from __future__ import annotations

CAUSES = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporaries")
"""Gradients: the sharded ones, that the optimizer sees. Unsharded ones and collectives' buffers are temporaries."""


class Account:
    def __init__(self) -> None:
        self.live = dict.fromkeys(CAUSES, 0.0)
        self.at_peak = dict(self.live)
        self._total = self._peak = 0.0

    def add(self, cause: str, size: float) -> None:
        self.live[cause] += size
        self._total += size
        self.touch(0.0)

    def touch(self, temporaries: float) -> None:
        """`temporaries` more are live for a moment."""
        if self._total + temporaries > self._peak:
            self._peak = self._total + temporaries
            self.at_peak = {**self.live, "temporaries": self.live["temporaries"] + temporaries}
