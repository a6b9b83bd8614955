"""Waiting for what a run does, for as long as pytest's own limit for a test allows: a shared machine may be slow."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

PATIENCE_S = 900.0
"""For those who can say more than pytest can about what they wait for in vain; below its limit."""


def wait_for(
    condition: Callable[[], object], process: subprocess.Popen[str] | None = None, every_s: float = 0.02
) -> None:
    """Wait until a condition holds. Fails if `process`, which should bring it about, ends before."""
    while not condition():
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(every_s)
