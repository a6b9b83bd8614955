"""A thread that detects a hung step: each rank reports its position, and one of them ends the run.

A report holds the Python stack and the last collectives that the rank entered (torch's flight recorder, if enabled by
TORCH_FR_BUFFER_SIZE). A rank that cannot report (stopped, or stuck in native code that holds the interpreter lock) is
recognised by its silence; in the latter case `faulthandler` still writes its stack to the log.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainspec_cli.engine.observe.journal import GroupJournal, Journal
from trainspec_cli.errors import WorkerError
from trainspec_cli.policy.hang import FIRST_S, Whereabouts, find_late, step_deadline_s
from trainspec_cli.rundir.event_types import HangEvent
from trainspec_cli.rundir.events import tail_events
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import WorkerErrorRecord, write_error

TICK_S = 0.25
STOPPED_S = 2.0
"""A tick later than this means that the process or the whole machine was suspended; that time is not counted."""
REMEMBERED_STEPS = 100
STACK_FRAMES = 30
OTHERS_S = 5.0
"""All ranks report a hang within this time: their deadlines were learned from the same steps."""


class StepWatch(threading.Thread):
    """The watch.

    The main thread calls `beat` at every step's end; the time between calls must stay below the deadline.
    """

    def __init__(
        self,
        run_dir: RunDir,
        journal: Journal | GroupJournal,
        floor_s: float | None,
        end: Callable[[int], Any] = os._exit,
    ):
        """Make a watch; with `floor_s` None a step may take forever."""
        super().__init__(name="watch", daemon=True)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._run_dir, self._journal, self._end = run_dir, journal, end
        self._floor_s = math.inf if floor_s is None else floor_s
        self._main = threading.main_thread().ident or 0
        self._recent_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._step, self._last_beat, self._fresh = 0, time.monotonic(), True
        self._deadline_s = FIRST_S
        self._closed = threading.Event()

    def beat(self, step: int) -> None:
        now = time.monotonic()
        if not self._fresh:
            self._recent_s.append(now - self._last_beat)
        self._step, self._last_beat, self._fresh = step, now, False
        self._deadline_s = step_deadline_s(self._recent_s, self._floor_s)
        if math.isfinite(self._deadline_s):
            faulthandler.dump_traceback_later(self._deadline_s + TICK_S)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Allow the long limit inside, for example for an evaluation, whose length is not learned from steps."""
        self._allow()
        yield
        self._allow()

    def _allow(self) -> None:
        self._fresh, self._last_beat, self._deadline_s = True, time.monotonic(), max(FIRST_S, self._floor_s)
        faulthandler.cancel_dump_traceback_later()

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._closed.set()

    def run(self) -> None:
        last_tick = self._last_beat = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            if now - last_tick > STOPPED_S:
                self._last_beat += now - last_tick
            last_tick = now
            if now - self._last_beat > self._deadline_s:
                self._report(now - self._last_beat)
                return

    def _report(self, waited_s: float) -> None:
        """Report the hang; the first rank that did so ends the run, and so does one that cannot write its report."""
        ends = True
        try:
            began = time.time()
            own = HangEvent(
                step=self._step + 1,
                waited_s=waited_s,
                deadline_s=self._deadline_s,
                host=socket.gethostname(),
                **whereabouts(self._main),
            )
            self._journal.write(own)
            time.sleep(OTHERS_S)
            reports = {self._rank: own} | self._read_reports(began - 2 * OTHERS_S)
            ends = self._rank == min(reports)
            if ends:
                self._write_error(reports, waited_s)
        finally:
            if ends:
                self._end(WorkerError.exit_code)

    def _read_reports(self, since: float) -> dict[int, HangEvent]:
        """Return the newest report of each rank that has left one."""
        reports = {}
        for rank in range(self._world_size):
            for event in tail_events(self._journal.events_of(rank)):
                if isinstance(event, HangEvent) and event.time >= since:
                    reports[rank] = event
        return reports

    def _write_error(self, reports: dict[int, HangEvent], waited_s: float) -> None:
        """Write the hang as this worker's error, for the supervisor to show and act on."""
        message, detail = describe(reports, self._world_size, self._step + 1, waited_s, self._deadline_s)
        record = WorkerErrorRecord(
            rank=self._rank,
            host=socket.gethostname(),
            time=time.time(),
            type="Hang",
            message=message,
            code="hang",
            exit_code=WorkerError.exit_code,
            hint="raise resilience.hang_floor_s if a step may take longer than that",
            step=self._step + 1,
            traceback=detail,
        )
        write_error(self._run_dir.error(self._rank), record)


def whereabouts(thread: int) -> dict[str, Any]:
    """Return stack (text), waiting, waits_in and collectives {group: number} of this process's `thread`."""
    frames = traceback.extract_stack(sys._current_frames()[thread])
    entered = last_collectives()
    unfinished = [entry for entry in entered if entry["on_device"] and entry["state"] != "completed"]
    waiting = bool(unfinished) or any("torch/distributed/" in frame.filename for frame in frames)
    newest = max(unfinished or entered, key=lambda entry: entry["created"], default=None)
    return {
        "waiting": waiting,
        "waits_in": newest["name"] if newest and waiting else None,
        "collectives": {entry["group"]: entry["number"] for entry in entered},
        "stack": "".join(traceback.format_list(frames[-STACK_FRAMES:])),
    }


def last_collectives() -> list[dict[str, Any]]:
    """Return the newest collective of each process group from the flight recorder; none if it is off."""
    if not os.environ.get("TORCH_FR_BUFFER_SIZE"):
        return []
    newest: dict[str, dict[str, Any]] = {}
    for entry in _recorded():
        if not entry["is_p2p"]:
            name = entry["profiling_name"]
            newest["/".join(entry["process_group"])] = {
                "group": "/".join(entry["process_group"]),
                "number": entry["collective_seq_id"],
                "name": f"{name} of {_sizes(entry['input_sizes'])}",
                "on_device": not name.startswith("gloo:"),
                "state": entry["state"],
                "created": entry["time_created_ns"],
            }
    return list(newest.values())


def _recorded() -> list[dict[str, Any]]:
    """Return the collectives of gloo and NCCL, which torch records separately."""
    c10d = torch._C._distributed_c10d  # type: ignore[attr-defined]
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    return [entry for dump in dumps if dump for entry in json.loads(dump(True, False)).get("entries", [])]


def _sizes(sizes: list[list[int]]) -> str:
    return ", ".join("x".join(map(str, size)) or "1" for size in sizes)


def describe(
    reports: dict[int, HangEvent], world_size: int, step: int, waited_s: float, deadline_s: float
) -> tuple[str, str]:
    """-> (what happened, every rank's stack)."""
    places = {rank: Whereabouts(event.waiting, event.collectives) for rank, event in reports.items()}
    late, why = find_late(places, world_size)
    waits_in = next((event.waits_in for rank, event in reports.items() if rank not in late and event.waits_in), None)
    who = f"rank {', '.join(map(str, late))} is late: {why}" if late else why
    others = f"; the others wait in {waits_in}" if late and waits_in else ""
    message = f"step {step} hung: {waited_s:.1f} s, and {deadline_s:.1f} s are allowed; {who}{others}"
    stacks = [f"rank {rank} ({event.host}) was at\n{event.stack}" for rank, event in sorted(reports.items())]
    silent = [f"rank {rank} reported nothing" for rank in range(world_size) if rank not in reports]
    return message, "\n".join([*silent, *stacks])
