"""A request to stop: SIGTERM, SIGINT or SIGUSR2 sets a flag that the next step carries to every rank."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""SIGUSR2 is the warning of a batch system; NCCL keeps SIGUSR1 for itself."""


class StopRequest:
    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> StopRequest:
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
