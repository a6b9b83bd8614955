"""Profile this rank for a few steps (a "deeper look") when the supervisor requests it because of a new diagnosis. A
thread waits for the request without slowing down the steps. During the profile, torch's profiler runs over complete
steps, and the thread samples the stack. The result is an event, and a trace in the run folder.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import torch
from torch.autograd import profiler

from trainspec_cli.core.errors import WorkerError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.engine.accelerators import KINDS
from trainspec_cli.engine.observe.clock import union
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.observe.stack_samples import (
    PySpy,
    StackSample,
    code_lines,
    is_in_exchange,
    sample_thread,
)
from trainspec_cli.engine.observe.watch import recorder_entries
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.verdict import Look, LookOrder, OperationTime
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.event_types.events import LookEvent, WarningEvent
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.paths import RunDir

# Run torch's profiler over a few steps, find the operations that take the most time, and keep the trace small.


MOST_OPERATIONS = 200_000
"""Maximum number of operations to process; the rest are ignored."""
NAMED_OPERATIONS = 5
TRACE_BYTES = 2**20
TRACE_VERSION = 1
MOST_CHARACTERS = 120


Span = tuple[int, int]
"""(begin, end) in ns, Unix time."""


class Operation(NamedTuple):
    """An operation as recorded by torch's profiler; times in ns, Unix time."""

    name: str
    begin_ns: int
    end_ns: int
    thread: int
    on_device: bool


def heaviest(operations: Sequence[Operation], steps: int) -> tuple[OperationTime, ...]:
    """Return the operations with the most self time: device operations if there are any, otherwise host operations."""
    on_device = any(one.on_device for one in operations)
    own_ns = defaultdict[str, int](int)
    calls = defaultdict[str, int](int)
    for one, self_ns in own_times([one for one in operations if one.on_device == on_device]):
        own_ns[one.name] += self_ns
        calls[one.name] += 1
    ranked = sorted(own_ns, key=lambda name: -own_ns[name])[:NAMED_OPERATIONS]
    return tuple(
        OperationTime(
            name=name[:MOST_CHARACTERS],
            self_s=own_ns[name] / 1e9 / steps,
            calls=calls[name] / steps,
            on_device=on_device,
        )
        for name in ranked
    )


def own_times(operations: Iterable[Operation]) -> list[tuple[Operation, int]]:
    """Return each operation with its self time in ns (without the operations that it calls), ordered by start time."""
    open_of = defaultdict[int, list[int]](list)
    found: list[tuple[Operation, int]] = []
    for one in operations:
        callers = open_of[one.thread]
        while callers and found[callers[-1]][0].end_ns <= one.begin_ns:
            callers.pop()
        if callers:
            caller, own_ns = found[callers[-1]]
            found[callers[-1]] = caller, own_ns - (min(one.end_ns, caller.end_ns) - one.begin_ns)
        callers.append(len(found))
        found.append((one, one.end_ns - one.begin_ns))
    return found


def is_within(at_ns: int, spans: Sequence[Span]) -> bool:
    """Return whether a time lies within one of the spans, which are disjoint and in order."""
    place = bisect_right(spans, at_ns, key=lambda span: span[0]) - 1
    return place >= 0 and at_ns < spans[place][1]


def trace_text(operations: Sequence[Operation], rank: int, about: JsonObject, most_bytes: int = TRACE_BYTES) -> str:
    """Return the trace in the format of Perfetto and chrome://tracing, with as many of the longest operations as fit in
    `most_bytes`."""
    begin_ns = operations[0].begin_ns if operations else 0
    left = most_bytes - len(json_text(about, indent=None)) - 64
    drawn = []
    for one in sorted(operations, key=lambda one: one.begin_ns - one.end_ns):
        place: JsonObject = {"pid": rank, "tid": "GPU" if one.on_device else one.thread}
        length_us = (one.end_ns - one.begin_ns) / 1e3
        text = json_text(
            {
                "ph": "X",
                "name": one.name[:MOST_CHARACTERS],
                "ts": (one.begin_ns - begin_ns) / 1e3,
                "dur": length_us,
                **place,
            },
            indent=None,
        )
        left -= len(text) + 2
        if left < 0:
            break
        drawn.append(text)
    rest = json_text(about, indent=None)[1:]
    return f'{{"traceEvents": [{", ".join(drawn)}], {rest}\n'


POLL_S = 1.0
LOOK_STEPS, LOOK_S = 3, 2.0
"""A profile ends after this number of steps, or at the first step that ends after this many seconds."""
STALLED_S = 1.0
"""A hanging rank does not complete any step, so its stack is sampled for this many seconds."""
HOST_CAUSES = ("host_bound", "slow_loader", "garbage_collection", "recompilation", "hang")
"""Causes inside the program. For these causes, py-spy also samples the stack."""
KEPT_COLLECTIVES = 64
COLLECTIVE_FIELDS = ("profiling_name", "process_group", "collective_seq_id", "state", "time_created_ns", "input_sizes")


class StepsInView:
    """Runs torch's profiler over a few steps. The training thread creates this object and adds the steps; the sampling
    thread waits for the last step."""

    def __init__(self, device: torch.device):
        began_s = time.perf_counter()
        # torch.profiler.profile would first import all of torch._inductor, and that takes seconds
        use_device = device.type if KINDS[device.type].is_profiled else None
        self._profile = profiler.profile(use_cpu=True, use_device=use_device)
        self._profile.__enter__()
        self._began_s = time.perf_counter()
        self.cost_s = self._began_s - began_s
        self.first_step = self.last_step = 0
        self.is_over = threading.Event()

    def add(self, step: int) -> None:
        """Count a step; the last one ends the profile."""
        self.first_step = self.first_step or step
        self.last_step = step
        made = step - self.first_step + 1
        passed_s = time.perf_counter() - self._began_s
        if made >= LOOK_STEPS or passed_s > LOOK_S:
            self.end()

    def end(self) -> None:
        began_s = time.perf_counter()
        self._profile.__exit__(None, None, None)
        self.cost_s += time.perf_counter() - began_s
        self.is_over.set()

    def operations(self) -> list[Operation]:
        """Return the recorded operations, ordered by start time. Any thread may call this after the end."""
        results = self._profile.kineto_results
        events = islice(results.events(), MOST_OPERATIONS) if results is not None else ()
        found = [
            Operation(
                one.name(),
                one.start_ns(),
                one.start_ns() + one.duration_ns(),
                one.start_thread_id(),
                one.device_type() != torch.autograd.DeviceType.CPU,
            )
            for one in events
        ]
        return sorted(found, key=lambda one: one.begin_ns)


class DeeperLook(threading.Thread):
    """Profiles this rank at the supervisor's request. The training thread calls `after_step` before the clock ends the
    step."""

    def __init__(
        self, run_dir: RunDir, journal: Journal, supervisor: SupervisorConnection, rank: int, device: torch.device
    ):
        """`rank`: this rank's number, counted over all replica groups."""
        super().__init__(name="deeper look", daemon=True)
        self._run_dir = run_dir
        self._journal = journal
        self._rank = rank
        self._device = device
        self._supervisor = supervisor
        self._closed = threading.Event()
        self._step = 0
        self._is_wanted, self._has_begun = threading.Event(), threading.Event()
        self._begun: StepsInView | None = None
        """The steps of the current profile, or of the last one."""

    # The training thread

    def after_step(self, step: int) -> None:
        self._step = step
        if self._begun is not None and not self._begun.is_over.is_set():
            self._begun.add(step)
        elif self._is_wanted.is_set():
            self._is_wanted.clear()
            # torch allows only one profiler, and the model's code may be using it.
            is_free = not torch.autograd._profiler_enabled()
            self._begun = StepsInView(self._device) if is_free else None
            self._has_begun.set()

    def was_profiled(self, step: int) -> bool:
        """Return whether this step was profiled and therefore took longer than usual."""
        return self._begun is not None and 0 < self._begun.first_step <= step <= self._begun.last_step

    def close(self) -> None:
        self._closed.set()
        if self._begun is not None and not self._begun.is_over.is_set():
            self._begun.end()

    # The sampling thread

    def run(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                for order in self._supervisor.receive(LookOrder):
                    self._profile(order)
            except (WorkerError, OSError) as error:  # a failed profile does not end the training
                self._warn(str(error))

    def _warn(self, why: str) -> None:
        """Record that there is no profile; do nothing if a newer launch has taken over the run or the disk is full."""
        with suppress(WorkerError, OSError):
            self._journal.write(WarningEvent(step=self._step, message=f"no profile was recorded: {why}"))

    def _profile(self, order: LookOrder) -> None:
        """Profile and record the result; record nothing if the run ends first."""
        view = None
        if order.cause != "hang":  # a hanging rank does not complete any step
            self._has_begun.clear()
            self._is_wanted.set()
            while not self._has_begun.wait(POLL_S / 4):
                if self._closed.is_set():
                    return
            view = self._begun
            if view is None:
                self._warn("torch's profiler is in use")
                return
        thread = threading.main_thread()
        if order.cause == "slow_loader":
            readers = (one for one in threading.enumerate() if one.name.startswith("loader"))
            thread = next(readers, thread)
        notes: list[str] = []
        spy = None
        spied: list[StackSample] = []
        program = PySpy.find() if order.cause in HOST_CAUSES else None
        try:
            spy = PySpy(program, self._run_dir.looks_folder) if program is not None else None
        except OSError as error:
            notes.append(f"py-spy could not be started: {error.strerror}")

        end_s = time.monotonic() + STALLED_S

        def is_over() -> bool:
            if view is None:
                return time.monotonic() > end_s
            return view.is_over.is_set() or self._closed.is_set()

        samples = sample_thread(thread.ident or 0, is_over)
        try:
            spied = spy.samples(thread.native_id or 0) if spy is not None else []
        except OSError as error:
            notes.append(f"py-spy could not sample: {error}")
        if not self._closed.is_set():
            self._report(order, view, samples, spied, notes)

    def _report(
        self,
        order: LookOrder,
        view: StepsInView | None,
        samples: Sequence[StackSample],
        spied: Sequence[StackSample],
        notes: list[str],
    ) -> None:
        operations = view.operations() if view is not None else []
        busy = union((one.begin_ns, one.end_ns) for one in operations if not one.on_device)
        first, last = (view.first_step, view.last_step) if view is not None else (self._step + 1, self._step)
        seen = [one for one in spied or samples if order.cause == "hang" or not is_in_exchange(one.files)]
        outside = [one for one in seen if not one.at_ns or not is_within(one.at_ns, busy)]
        total = sum(one.times for one in seen)
        path = self._run_dir.look_trace(order.number)
        file = None
        newest = sorted(recorder_entries(), key=lambda entry: -entry["time_created_ns"])[:KEPT_COLLECTIVES]
        about: JsonObject = {
            "version": TRACE_VERSION,
            "order": to_plain(order),
            "collectives": [{name: entry.get(name) for name in COLLECTIVE_FIELDS} for entry in newest],
            "displayTimeUnit": "ms",
        }
        try:
            write_text(path, trace_text(operations, self._rank, about))
            file = str(path.relative_to(self._run_dir.root))
        except OSError as error:
            notes.append(f"the trace could not be written: {error.strerror}")
        look = Look(
            order=order,
            first_step=first,
            last_step=last,
            operations=heaviest(operations, max(1, last - first + 1)),
            operations_share=sum(one.times for one in samples if is_within(one.at_ns, busy)) / max(1, len(samples)),
            lines=code_lines(outside, total) if total else (),
            samples=total,
            sampled_by="py-spy" if spied else "trainspec",
            cost_s=view.cost_s if view is not None else 0.0,
            file=file,
            notes=tuple(notes),
        )
        self._journal.write(LookEvent(step=self._step, look=look))
