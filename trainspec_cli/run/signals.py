"""Stop requests: Ctrl-C, SIGTERM (from a scheduler or `kill`), SIGHUP (the terminal was closed)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def on_stop_signal(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` for each stop signal during the block. If `nohup` ignores SIGHUP, it stays ignored.

    When a terminal closes, its shell, its multiplexer and the kernel each send a SIGHUP. All but the first are ignored,
    even after the block, because a second request would mean an immediate end. Only the main thread gets signals; in
    any other thread, `act` is never called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)
        act()

    before = {
        number: signal.signal(number, hear) for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is hear:
                signal.signal(number, handler)


def interrupt() -> None:
    """Interrupt work that may be abandoned at any point."""
    raise KeyboardInterrupt


class StopRequests:
    """Counts stop requests, for work that must shut down cleanly."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class PatientRequests(StopRequests):
    """Counts at most one request, because a scheduler repeats its signal without asking for a faster end."""

    def add(self) -> None:
        self.count = 1
