"""Requests to stop: Ctrl-C, SIGTERM (a scheduler, `kill`), SIGHUP (the terminal was closed)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_stop_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` for each stop signal while the block runs. `nohup`'s ignored SIGHUP stays ignored."""
    before = {
        number: signal.signal(number, lambda *_: act())
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt() -> None:
    """Interrupt work that may be dropped at any point."""
    raise KeyboardInterrupt


class StopRequests:
    """Counts the requests, for work that has to be ended in order."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class PatientRequests(StopRequests):
    """Counts one request at most: a scheduler repeats its signal without asking for a quicker end."""

    def add(self) -> None:
        self.count = 1
