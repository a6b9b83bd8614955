"""Processor time taken from ranks: a share of it withheld, a core shared with others, bursts of other tenants' work."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil

BUSY = ("sh", "-c", "while :; do :; done")
PAUSE_BOUNDS_S = (1.0, 2.5)


def pin(process: psutil.Process, cores: Iterable[int]) -> None:
    """Keep all threads of a process on `cores`."""
    wanted = set(cores)
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), wanted)
        except ProcessLookupError:
            continue


class Competitors:
    """Processes that compute and do nothing else, on `cores`, so much nicer than the bench, and than what it runs.

    Each has a session of its own: a kernel with autogroup shares cores among sessions first, and all of one would count
    for one process.
    """

    def __init__(self, count: int, cores: Iterable[int], niceness: int = 0):
        niceness = max(-20, os.getpriority(os.PRIO_PROCESS, 0) + niceness)
        self._processes = [subprocess.Popen(BUSY, start_new_session=True) for _ in range(count)]
        for process in self._processes:
            os.sched_setaffinity(process.pid, set(cores))
            os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
            group = Path(f"/proc/{process.pid}/autogroup")
            if group.exists():
                group.write_text(str(niceness))

    def remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Bursts:
    """Competitors on all cores that come for `burst_s` and go, again and again."""

    def __init__(self, burst_s: float, seed: int):
        self._burst_s, self._draw = burst_s, random.Random(seed)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        cores = os.sched_getaffinity(0)
        while not self._ended.is_set():
            busy = Competitors(3 * len(cores), cores)
            self._ended.wait(self._burst_s)
            busy.remove()
            self._ended.wait(self._draw.uniform(*PAUSE_BOUNDS_S))

    def remove(self) -> None:
        self._ended.set()
        self._thread.join()
