"""Runs checks in order of worth, each in a process of its own with a limit, for as long as this call may take."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .record import last_lines, read_json, write_json

GOES_ON_ANEW = 75
"""The exit code of a check that has recorded an item's failure, and is to go on in another process."""
OUT_OF_TIME = 76
MOST_STARTS = 30
"""Of one check in a call: each start but the last records an item at least."""
REPEATED = ("cut", "interrupted")
"""States that the next call takes up."""
MOST_INTERRUPTIONS = 2
"""Calls that are killed in one check: then the item that ran counts as failed."""
ENDING_S = 3.0
"""Left for writing down what the last check has found."""


@dataclass(frozen=True)
class Check:
    name: str
    about: str
    find: Callable[..., None]
    """Takes the `Items` and the options of the call."""
    limit_s: float
    least_s: float = 20.0
    """It is not started with less."""


class Schedule:
    def __init__(self, checks: Sequence[Check], folder: Path, command: Callable[[Check, float], list[str]]):
        """`command` starts the process of a check, which has so many seconds."""
        self._checks, self._folder, self._command = checks, folder, command
        folder.mkdir(parents=True, exist_ok=True)
        self._results, self._running = folder / "results.json", folder / "running.json"
        self.records: dict[str, Any] = read_json(self._results).get("checks", {})
        self._take_up()

    def run(self, budget_s: float) -> bool:
        """Run what is missing; return True if nothing is any more."""
        ends_at_s = time.monotonic() + budget_s - ENDING_S
        for check in self._checks:
            if self._is_settled(check):
                continue
            left_s = ends_at_s - time.monotonic()
            if left_s < check.least_s:
                print(f"{check.name:22} later: {max(0.0, left_s):.0f} s are left of this call", flush=True)
                continue
            self._run(check, ends_at_s)
        return all(map(self._is_settled, self._checks))

    def _is_settled(self, check: Check) -> bool:
        return check.name in self.records and self.records[check.name]["state"] not in REPEATED

    def _take_up(self) -> None:
        """What a call that was killed has left."""
        left = read_json(self._running)
        if left:
            record = self.records.setdefault(left["check"], {"found": {}})
            times = record.get("interruptions", 0) + 1
            record |= {"state": "interrupted", "found": left["found"], "interruptions": times}
            if times >= MOST_INTERRUPTIONS and left["item"]:
                record["found"][left["item"]] = {"error": "calls were killed while this ran"}
                record |= {"state": "cut", "interruptions": 0}
            self._write()
            self._running.unlink()

    def _run(self, check: Check, ends_at_s: float) -> None:
        started = time.monotonic()
        limit_ends_at_s = min(ends_at_s, started + check.limit_s)
        before = self.records.get(check.name, {})
        found, state, error = before.get("found", {}), "cut", ""
        for _ in range(MOST_STARTS):
            write_json(self._running, {"check": check.name, "item": None, "found": found})
            code, said = self._start(check, limit_ends_at_s)
            left = read_json(self._running)
            found = left["found"]
            if code not in (0, None, GOES_ON_ANEW, OUT_OF_TIME) and left["item"]:
                found[left["item"]] = {"error": f"the process ended with {code}: {last_lines(said)}"}
                continue
            if code == GOES_ON_ANEW:
                continue
            state, error = self._state(code, said, limit_ends_at_s < ends_at_s)
            break
        taken_s = before.get("seconds", 0.0) + time.monotonic() - started
        about = {"state": state, "seconds": round(taken_s, 1), "about": check.about, "found": found}
        self.records[check.name] = about | ({"error": error} if error else {})
        self._write()
        self._running.unlink()
        print(f"{check.name:22} {state:7} {summary_of(found)} in {taken_s:.0f} s {error[-200:]}", flush=True)

    def _state(self, code: int | None, said: str, own_limit: bool) -> tuple[str, str]:
        if code == 0:
            return "done", ""
        if code in (None, OUT_OF_TIME):
            return ("limit", "its own time limit") if own_limit else ("cut", "")
        return "failed", f"the process ended with {code}: {last_lines(said)}"

    def _start(self, check: Check, ends_at_s: float) -> tuple[int | None, str]:
        """Return the exit code, None where the time was over, and what the process said."""
        with (self._folder / "log.txt").open("a+", encoding="utf-8", errors="replace") as log:
            log.write(f"\n== {check.name}\n")
            log.flush()
            begin = log.tell()
            command = self._command(check, ends_at_s - time.monotonic())
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            try:
                code = process.wait(max(0.1, ends_at_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                kill_all(process.pid)
                process.wait()
            log.seek(begin)
            return code, log.read()

    def _write(self) -> None:
        write_json(self._results, {"checks": self.records})


def kill_all(pid: int) -> None:
    """Kill a process with all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(pid)
        for process in [*own.children(recursive=True), own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def summary_of(found: dict[str, Any]) -> str:
    failed = sum(isinstance(value, dict) and "error" in value for value in found.values())
    return f"{len(found)} items" + (f", {failed} failed" if failed else "")
