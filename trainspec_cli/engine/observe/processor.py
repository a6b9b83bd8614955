"""The main thread's time on a processor, and its time of waiting for one, as the kernel counts them (`schedstat`)."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

SCHEDULED = "/proc/self/schedstat"
LINE_BYTES = 80


class ProcessorClock:
    """Opened by the process that it is about: a forked one opens its own. Elsewhere than on Linux all is 0."""

    def __init__(self) -> None:
        self._descriptor = -1
        with suppress(OSError):
            self._descriptor = os.open(SCHEDULED, os.O_RDONLY | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> tuple[float, float]:
        """Return (seconds that the main thread has run, seconds that it could run and had no processor)."""
        if self._descriptor < 0:
            return 0.0, 0.0
        ran_ns, queued_ns, _ = os.pread(self._descriptor, LINE_BYTES, 0).split()
        return int(ran_ns) / 1e9, int(queued_ns) / 1e9

    def close(self) -> None:
        if self._descriptor >= 0:
            self._close()
            self._descriptor = -1
