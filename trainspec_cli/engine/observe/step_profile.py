"""Torch's profiler over a few steps: which operations take the time, and a trace that is kept small."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch.autograd import profiler

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.engine.accelerators import KINDS
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.results.look import OperationTime

MOST_OPERATIONS = 200_000
"""Operations beyond so many are not looked at."""
NAMED_OPERATIONS = 5
TRACE_BYTES = 2**20
MOST_CHARACTERS = 120


Span = tuple[int, int]
"""(begin, end) in ns, Unix time."""


class Operation(NamedTuple):
    """An operation as torch's profiler saw it; times in ns, Unix time."""

    name: str
    begin_ns: int
    end_ns: int
    thread: int
    on_device: bool


class StepProfile:
    """The profiler, from its start until `end`; both are called by the thread that trains."""

    def __init__(self, device: torch.device):
        # torch.profiler.profile would import all of torch._inductor first, which takes seconds
        use_device = device.type if KINDS[device.type].is_profiled else None
        self._profile = profiler.profile(use_cpu=True, use_device=use_device)
        self._profile.__enter__()

    def end(self) -> None:
        self._profile.__exit__(None, None, None)

    def operations(self) -> list[Operation]:
        """Return the operations that were seen, by the time of their begin. Any thread may ask once it has ended."""
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


def heaviest(operations: Sequence[Operation], steps: int) -> tuple[OperationTime, ...]:
    """Return the operations with most time of their own; those of the device where it has some, else the host's."""
    on_device = any(one.on_device for one in operations)
    own_ns, calls = defaultdict[str, int](int), defaultdict[str, int](int)
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
    """Return each operation with the ns in which none that it calls runs; they come by the time of their begin."""
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


def busy_ns(operations: Iterable[Operation]) -> list[Span]:
    """Return the disjoint times in which the host ran some operation, in order."""
    joined: list[Span] = []
    for one in operations:
        if one.on_device:
            continue
        if joined and one.begin_ns <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], one.end_ns)
        else:
            joined.append((one.begin_ns, one.end_ns))
    return joined


def is_within(at_ns: int, spans: Sequence[Span]) -> bool:
    """Return whether a time lies within one of the spans, which are disjoint and in order."""
    place = bisect_right(spans, at_ns, key=lambda span: span[0]) - 1
    return place >= 0 and at_ns < spans[place][1]


def trace_text(operations: Sequence[Operation], rank: int, about: JsonObject, most_bytes: int = TRACE_BYTES) -> str:
    """Return the trace as Perfetto and chrome://tracing open it: the longest operations, as many as have room."""
    begin_ns = operations[0].begin_ns if operations else 0
    left, drawn = most_bytes - len(json_text(about, indent=None)) - 64, []
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
