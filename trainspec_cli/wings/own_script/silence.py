"""Watches a command of which no step is counted: whether its processes work, and for how long they have.

What is seen from outside is the processor time of each process, what it reads and writes, and the log. A process that
spins while it waits looks as if it worked, so that such a run is found to hang by its stopped or sleeping processes.
"""

from __future__ import annotations

import shlex
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainspec_cli.run.channel.messages import ProcessSilent
from trainspec_cli.run.recovery.watch import Reading, working
from trainspec_cli.wings.own_script.usage import moved_bytes, wanted_s

FIRST_INTERVAL_S, LONGEST_INTERVAL_S = 1.0, 10.0
"""Looks come as often as a twentieth of the time that has passed, within these bounds."""
LONGEST_COMMAND = 60
NAMED = 8
"""No more processes are named."""


Silence = tuple[float, tuple[ProcessSilent, ...]]
"""How long no process has worked, and those to be named."""


@dataclass
class _Spent:
    wanted_s: float
    moved_bytes: int


class SilenceWatch:
    """Watches one start; `look` is to be called again and again. `limit_s`: how long it may show no sign of work; None
    for ever."""

    def __init__(self, limit_s: float | None, log: Path):
        self._limit_s = limit_s
        self._log = log
        self._began_s = self._looked_s = self._seen_working_s = time.monotonic()
        self._seen: dict[int, _Spent] = {}
        self._log_bytes = 0
        self.worked_s = 0.0
        """The time in which it showed that it works."""

    @property
    def quiet_s(self) -> float:
        """The time since the last sign of work."""
        return time.monotonic() - self._seen_working_s

    def look(self, members: Callable[[], Sequence[psutil.Process]]) -> Silence | None:
        """Return what is silent, where no process has worked for longer than they may. `members` are the command's
        processes that live."""
        now_s = time.monotonic()
        passed_s = now_s - self._looked_s
        if passed_s < min(LONGEST_INTERVAL_S, max(FIRST_INTERVAL_S, (now_s - self._began_s) / 20)):
            return None
        self._looked_s = now_s
        found = members()
        readings = self._read(found, passed_s)
        if self._log_has_grown() or working(readings):
            self.worked_s += passed_s
            self._seen_working_s = now_s
        elif not readings:  # the node waits for others before it starts, or all has ended
            self._seen_working_s = now_s
        quiet_s = now_s - self._seen_working_s
        if self._limit_s is None or quiet_s < self._limit_s or not readings:
            return None
        return quiet_s, _describe(found, readings)

    def _read(self, members: Sequence[psutil.Process], passed_s: float) -> dict[int, Reading]:
        readings = {}
        seen = {}
        for process in members:
            try:
                state = process.status()
                sighting = _Spent(wanted_s(process), moved_bytes(process))
            except (psutil.Error, OSError):
                continue
            was = self._seen.get(process.pid, _Spent(0.0, 0))
            seen[process.pid] = sighting
            readings[process.pid] = Reading(
                stopped=state == psutil.STATUS_STOPPED,
                has_stack=False,
                busy_cores=max(0.0, sighting.wanted_s - was.wanted_s) / passed_s,
                moved_bytes=sighting.moved_bytes - was.moved_bytes,
            )
        self._seen = seen
        return _without_waiting(readings)

    def _log_has_grown(self) -> bool:
        size = self._log.stat().st_size if self._log.is_file() else 0
        grown = size > self._log_bytes
        self._log_bytes = size
        return grown


def _without_waiting(readings: dict[int, Reading]) -> dict[int, Reading]:
    """Where a process is stopped, others may spin while they wait for it: that they compute is no sign of work."""
    if not any(reading.stopped for reading in readings.values()):
        return readings
    return {
        pid: Reading(stopped=reading.stopped, has_stack=False, moved_bytes=reading.moved_bytes)
        for pid, reading in readings.items()
    }


def _describe(members: Sequence[psutil.Process], readings: dict[int, Reading]) -> tuple[ProcessSilent, ...]:
    stopped = [process for process in members if readings.get(process.pid, Reading()).stopped]
    host = socket.gethostname()
    return tuple(
        ProcessSilent(_rank_of(process), host, process.pid, _command_of(process), stopped=bool(stopped))
        for process in (stopped or members)[:NAMED]
    )


def _command_of(process: psutil.Process) -> str:
    try:
        command = shlex.join(process.cmdline())
    except psutil.Error:
        return "ended"
    return f"...{command[-LONGEST_COMMAND:]}" if len(command) > LONGEST_COMMAND else command


def _rank_of(process: psutil.Process) -> int | None:
    try:
        rank = process.environ().get("RANK", "")
    except (psutil.Error, OSError):
        return None
    return int(rank) if rank.isdigit() else None


def name_silent(processes: Sequence[ProcessSilent]) -> tuple[list[ProcessSilent], str]:
    """Return the processes of all nodes that are to be named, and why: the stopped ones, or all where none is."""
    if stopped := [process for process in processes if process.stopped]:
        return stopped[:NAMED], "is stopped" if len(stopped) == 1 else "are stopped"
    if len(processes) == 1:
        return list(processes), "sleeps"
    return list(processes[:NAMED]), "sleep; without counted steps nobody can say who waits for whom"
