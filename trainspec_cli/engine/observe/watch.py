"""Detect hung steps, from a separate thread. Each rank reports where it hangs, and one rank ends the run.

A report holds the Python stack and the last collectives that the rank entered (torch's flight recorder, if enabled by
TORCH_FR_BUFFER_SIZE). A rank cannot report if it is stopped, or stuck in native code that holds the interpreter lock;
its silence identifies it. If it is stuck, `faulthandler` still writes its stack to the log.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.engine.accelerators import device_collectives
from trainspec_cli.engine.comm import forking as background
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.observe.stack_samples import is_in_exchange, is_library
from trainspec_cli.recipe.results.verdict import Collective
from trainspec_cli.run.folder.event_types.events import HangEvent, LateStepEvent, StallEvent, WarningEvent
from trainspec_cli.run.folder.events import tail_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import WorkerErrorRecord, write_error
from trainspec_cli.run.recovery.collectives import read_recorder, with_line
from trainspec_cli.run.recovery.watch import (
    CHECKPOINT,
    NOTE_S,
    READING_THREAD,
    STANDING_S,
    Whereabouts,
    find_late,
    innermost_line,
    short_line,
    stall_after_s,
    step_deadline_s,
)

Late = TypeVar("Late", bound=LateStepEvent)

TICK_S = 0.25
LOOKS_EVERY_S = 1.0
"""How often a rank looks for collectives that do not end, which takes about a millisecond. Quick steps never do."""
STOPPED_S = 2.0
"""If a tick is more than this many seconds late, the process or the entire machine was suspended; that time is not
counted."""
REMEMBERED_STEPS = 100
STACK_FRAMES = 30
OTHERS_S = 5.0
"""All ranks report a hang within this many seconds of one another, because they learned their deadlines from the same
steps."""


class StepWatch(threading.Thread):
    """Watches the steps. The main thread calls `beat` at the end of every step; the time between calls must stay below
    the deadline."""

    def __init__(
        self,
        run_dir: RunDir,
        journal: Journal,
        floor_s: float | None,
        first_s: float | None,
        end: Callable[[int], Any] = os._exit,
    ):
        """`floor_s`: the shortest deadline; None if a step may take any amount of time. `first_s`: the deadline of the
        first steps; None for no limit."""
        super().__init__(name="watch", daemon=True)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        self._run_dir = run_dir
        self._journal = journal
        self._end = end
        self._floor_s = math.inf if floor_s is None else floor_s
        self._first_s = math.inf if first_s is None else first_s
        self._main = threading.main_thread().ident or 0
        self._recent_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._step = 0
        self._last_beat = time.monotonic()
        self._fresh = True
        """True if the time since `_last_beat` is not a step's duration, so the deadline must not be derived from it."""
        self._deadline_s = self._first_s
        self._stall_s = math.inf
        self._is_late = False
        """True once this step has been reported as stalled."""
        self._note_s = NOTE_S
        self._standing_since: dict[tuple[str, int], float] = {}
        """Collectives that have not ended, and when each was first seen."""
        self._shown: set[tuple[str, int]] = set()
        """Those that were reported because they had not ended for `STANDING_S`."""
        self._looks_at = 0.0
        self._closed = threading.Event()

    def beat(self, step: int) -> None:
        now = time.monotonic()
        if not self._fresh:
            self._recent_s.append(now - self._last_beat)
        self._step = step
        self._last_beat = now
        self._fresh = False
        self._deadline_s = step_deadline_s(self._recent_s, self._floor_s, self._first_s)
        self._note_s = math.inf
        self._is_late = False
        self._stall_s = stall_after_s(self._recent_s, self._deadline_s)
        if math.isfinite(self._deadline_s):
            faulthandler.dump_traceback_later(self._deadline_s + TICK_S)

    @contextmanager
    def between_steps(self, *, for_ever: bool = False) -> Iterator[None]:
        """Apply the deadline of the first steps during the block, for example for an evaluation, which may take much
        longer than a step. With `for_ever` there is no limit, because the duration depends on other groups or runs."""
        self._allow(for_ever=for_ever)
        yield
        self._allow()

    def _allow(self, *, for_ever: bool = False) -> None:
        self._fresh = True
        self._last_beat = time.monotonic()
        self._deadline_s = math.inf if for_ever else max(self._first_s, self._floor_s)
        self._note_s = math.inf
        self._stall_s = math.inf
        self._is_late = False
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
            waited_s = now - self._last_beat
            is_late = waited_s > self._stall_s
            if is_late:
                self._stall_s = math.inf
                self._is_late = True
            if is_late or (waited_s > LOOKS_EVERY_S and self._stands_still(now)):
                usual_s = max(self._recent_s, default=0.0)
                event = self._late_step(StallEvent, waited_s, usual_s=usual_s, early=not self._is_late)
                # On a full disk, or after a newer launch, this cannot be reported. Neither can the hang, but the run
                # ends nevertheless.
                with suppress(OSError, WorkerError):
                    self._journal.write(event)
            if waited_s > self._note_s:
                self._note(waited_s)
            if waited_s > self._deadline_s:
                self._report(waited_s)
                return

    def _stands_still(self, now: float) -> bool:
        """Return whether a collective that was not reported before has not ended for `STANDING_S`."""
        if now < self._looks_at:
            return False
        self._looks_at = now + LOOKS_EVERY_S
        unfinished = unfinished_collectives()
        self._standing_since = {one: self._standing_since.get(one, now) for one in unfinished}
        standing = {one for one, since in self._standing_since.items() if now - since >= STANDING_S}
        is_new = bool(standing - self._shown)
        self._shown = standing
        return is_new

    def _note(self, waited_s: float) -> None:
        """Record what is holding up the first step: on rank 0, whose events are shown, and on each rank that is not
        waiting for another rank."""
        self._note_s = math.inf
        place = whereabouts(self._main)
        if place.waiting and self._rank:
            return
        limit = "never" if math.isinf(self._deadline_s) else f"after {self._deadline_s:.0f} s (resilience.first_step_s)"
        waits = (
            f"waits in {place.waits_in}"
            if place.waiting
            else f"is at {innermost_line(place.stack) or 'no Python frame'}"
        )
        message = f"step {self._step + 1} has taken {waited_s:.0f} s so far: rank {self._rank} "
        message += f"{'waits for its data' if place.waits_in == DATA else waits}; the run ends {limit}"
        with suppress(OSError, WorkerError):
            self._journal.write(WarningEvent(step=self._step, message=message))

    def _report(self, waited_s: float) -> None:
        """Report the hang. The first rank to report it ends the run; so does a rank that cannot write its report."""
        ends = True
        try:
            began = time.time()
            own = self._late_step(HangEvent, waited_s, deadline_s=self._deadline_s)
            self._journal.write(own)
            time.sleep(OTHERS_S)
            reports = {self._rank: own}
            for rank in range(self._world_size):
                for event in tail_events(self._journal.events_of(rank)):
                    if isinstance(event, HangEvent) and event.time >= began - 2 * OTHERS_S:
                        reports[rank] = event
            ends = self._rank == min(reports)
            if ends:  # report the hang as this worker's error, which the supervisor shows and handles
                message, detail = describe(reports, self._world_size, self._step + 1, waited_s, self._deadline_s)
                key = "first_step_s" if self._deadline_s == self._first_s else "hang_floor_s"
                record = WorkerErrorRecord(
                    rank=self._rank,
                    host=socket.gethostname(),
                    time=time.time(),
                    type="Hang",
                    message=message,
                    code="hang",
                    exit_code=WorkerError.exit_code,
                    hint=f"raise resilience.{key} if a step may take longer than that",
                    step=self._step + 1,
                    traceback=detail,
                )
                write_error(self._run_dir.error(self._rank), record)
        finally:
            if ends:
                self._end(WorkerError.exit_code)

    def _late_step(self, kind: Callable[..., Late], waited_s: float, **own: float) -> Late:
        """Return an event that states where this rank is hanging."""
        place = vars(whereabouts(self._main))
        return kind(step=self._step + 1, waited_s=waited_s, host=socket.gethostname(), **place, **own)


@dataclass(frozen=True)
class StackPosition:
    """Where a thread is, in its code and in its sequence of collectives."""

    waiting: bool
    """True while the thread is in a collective, or waits for the device to finish one."""
    waits_in: str | None
    collectives: dict[str, int]
    """Sequence number of the last collective entered, by process group."""
    stack: str
    entered: tuple[Collective, ...] = ()


def whereabouts(thread: int) -> StackPosition:
    """Return where a thread of this process is."""
    stacks = sys._current_frames()
    frames = traceback.extract_stack(stacks[thread])
    own = [frame for frame in frames if not is_library(frame.filename)]
    entered = recorded_collectives(f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "")
    of_device = [one for one in entered if not one.kind.startswith("gloo:")]
    unfinished = [one for one in of_device if not one.done]
    # The outer frames of a forked worker are in the same file.
    for_sums = any(frame.filename == background.__file__ and frame.name == WAITS_FOR_SUMS for frame in frames)
    waiting = bool(unfinished) or for_sums or is_in_exchange([frame.filename for frame in frames])
    stack = "".join(traceback.format_list(frames[-STACK_FRAMES:]))
    waits_in = None
    if any(frame.filename == _LOADER and frame.name == "take" for frame in frames):
        readers = [one for one in threading.enumerate() if one.name.startswith(READING_THREAD) and one.ident in stacks]
        if readers:
            reading = traceback.extract_stack(stacks[readers[-1].ident or 0])[-STACK_FRAMES:]
            stack += "the thread that reads its data was at\n" + "".join(traceback.format_list(reading))
            waits_in = None if waiting else DATA
    if waiting and entered:
        waits_in = (unfinished or [one for one in entered if not one.done] or entered)[-1].text
    if for_sums:
        waits_in = "sums of gradients"
    if any(frame.filename == _CHECKPOINTS for frame in frames):
        waits_in = CHECKPOINT
    return StackPosition(waiting, waits_in, {one.group: one.number for one in entered}, stack, tuple(entered))


NCCL_DUMP = "_dump_nccl_trace"
"""A function of torch's builds for GPUs."""
WAITS_FOR_SUMS = background.Background.wait.__name__
DATA = "its data"
"""The value of `waits_in` while a rank waits for its next batch."""
_CHECKPOINTS = str(Path(background.__file__).parents[1] / "run" / "checkpoints.py")
_LOADER = str(Path(background.__file__).parents[1] / "data" / "loader.py")
"""The file whose function `take` waits for the thread that reads batches."""


def unfinished_collectives() -> set[tuple[str, int]]:
    """Return the group and number of each collective that this rank has called and that has not ended."""
    found = read_recorder({"entries": list(recorder_entries(only_unfinished=True))})
    return {(one.group, one.number) for one in found + device_collectives() if not one.done}


def recorder_entries(only_unfinished: bool = False) -> Iterator[Any]:
    """Yield the entries of torch's flight recorders for gloo and NCCL, without lines; nothing if these are off."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE"):
        c10d = torch._C._distributed_c10d  # type: ignore[attr-defined]
        for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
            if dump := getattr(c10d, name, None):
                yield from json.loads(dump(True, only_unfinished)).get("entries", [])


def recorded_collectives(line: str = "") -> list[Collective]:
    """Return this rank's newest collectives, with the lines that called them if known. `line`: the main thread's line.

    The host waits for gloo, so the main thread is still at the line that called the only unfinished collective. It may
    be far beyond the line that called one of NCCL's, and the flight recorder has to look up the line, which takes more
    than a second of processor time at first."""
    found = read_recorder({"entries": list(recorder_entries())})
    if any(not one.kind.startswith("gloo:") for one in found):
        dump = getattr(torch._C._distributed_c10d, NCCL_DUMP)  # type: ignore[attr-defined]
        found = [one for one in found if one.kind.startswith("gloo:")]
        found += read_recorder(pickle.loads(dump(True, True, False)), is_library)  # pickled in this process
    return with_line(found, line) + device_collectives()


def describe(
    reports: dict[int, HangEvent], world_size: int, step: int, waited_s: float, deadline_s: float
) -> tuple[str, str]:
    """Return (a description of what happened, every rank's stack)."""
    places = {
        rank: Whereabouts(event.waiting, event.collectives, event.entered, short_line(event.stack))
        for rank, event in reports.items()
    }
    late, why = find_late(places, world_size)
    waits_in = next((event.waits_in for rank, event in reports.items() if rank not in late and event.waits_in), None)
    who = f"rank {', '.join(map(str, late))} is late: {why}" if late else why
    at_data = [rank for rank, event in reports.items() if event.waits_in == DATA and not event.waiting]
    if at_data:
        line = innermost_line(reports[at_data[0]].stack) or "no Python frame"
        who += f"; rank {', '.join(map(str, at_data))} waits for its data; the thread that reads the data is at {line}"
    others = f"; the other ranks wait in {waits_in}" if late and waits_in else ""
    message = f"step {step} hung: it has taken {waited_s:.1f} s (limit: {deadline_s:.1f} s); {who}{others}"
    stacks = [f"rank {rank} ({event.host}) was at\n{event.stack}" for rank, event in sorted(reports.items())]
    silent = [f"rank {rank} reported nothing" for rank in range(world_size) if rank not in reports]
    return message, "\n".join([*silent, *stacks])
