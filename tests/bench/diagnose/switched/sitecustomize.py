"""A rank that counts for a diagnosis in every other block of steps. Python's `site` imports this file where its folder
is on PYTHONPATH.

Writes a line of JSON to $SWITCHED_OUT after every step: see `Step` in `tests/bench/diagnose/overhead.py`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

COUNTERS = "trainspec_cli.engine.observe.counters"
POLL_S = 0.05


def switch(counters: Any, block: int, out: Path) -> None:
    """Have `StepCounters.note_step` do nothing in odd blocks of steps."""
    note_step = counters.StepCounters.note_step

    def note_in_even_blocks(self: Any, step: int, *rest: Any) -> Any:
        began_s, counts = time.perf_counter(), step // block % 2 == 0
        if step % block == 0:
            self._window = counters.Window(self._counts(), began_s)  # nothing of a block without is in a window
        noted_s, event = time.perf_counter(), None
        if counts:
            event = note_step(self, step, *rest)
        ended_s = time.perf_counter()
        line = {"step": step, "counts": counts, "note_s": ended_s - noted_s, "at_s": began_s}
        with out.open("a") as lines:
            print(json.dumps(line | {"processor_s": time.process_time()}), file=lines)
        return event

    counters.StepCounters.note_step = note_in_even_blocks


def switch_when_imported() -> None:
    while not hasattr(sys.modules.get(COUNTERS), "StepCounters"):
        time.sleep(POLL_S)
    switch(sys.modules[COUNTERS], int(os.environ["SWITCHED_BLOCK"]), Path(os.environ["SWITCHED_OUT"]))


def _begin() -> None:
    threading.Thread(target=switch_when_imported, daemon=True).start()


os.register_at_fork(after_in_child=_begin)
