"""The steps of all ranks as a trace that Perfetto and chrome://tracing open, on the first node's clock.

Of a step the seconds of each part are known, not their order: they are drawn one after another in the order of `PARTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.canonical import Absent, to_plain
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.report.diagnosis.clocks import ClockOffset, Leaving, clock_offsets
from trainspec_cli.report.diagnosis.gather import RunShape, event_paths
from trainspec_cli.run.folder.event_types.event import PARTS, Event
from trainspec_cli.run.folder.event_types.observed import CountersEvent, StallEvent
from trainspec_cli.run.folder.event_types.training import StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.paths import RunDir

NEWEST_STEPS = 2000
"""Older steps are left out: a trace is to be looked at."""
US = 1e6


def trace_run(run: RunDir, shape: RunShape, verdicts: Sequence[RunVerdict]) -> JsonObject:
    """Return the trace: a process for each node, a thread for each rank, and the clocks' offsets beside it."""
    events = [list(read_sound(path)) for path in event_paths(run, shape)]
    offsets = clock_offsets(shape.nodes, [_left(of_rank) for of_rank in events])
    ahead_s = {one.node: one.offset_s for one in offsets}
    newest = max((one.step for of_rank in events for one in of_rank if isinstance(one, StepEvent)), default=0)
    drawn: list[JsonValue] = [
        *_names(shape, offsets),
        *(
            piece
            for rank, of_rank in enumerate(events)
            for piece in _rank(of_rank, rank, shape.nodes[rank], ahead_s[shape.nodes[rank]], newest - NEWEST_STEPS)
        ),
        *_verdicts(events, shape, ahead_s, verdicts),
    ]
    return {"traceEvents": drawn, "displayTimeUnit": "ms", "otherData": {"clocks": [to_plain(one) for one in offsets]}}


def _left(events: Sequence[Event]) -> dict[int, Leaving]:
    return {
        event.step: Leaving(event.left_at, event.agreed_s)
        for event in events
        if isinstance(event, CountersEvent) and event.left_at
    }


def _names(shape: RunShape, offsets: Sequence[ClockOffset]) -> Iterator[JsonObject]:
    for one in offsets:
        yield {"ph": "M", "name": "process_name", "pid": one.node, "args": {"name": f"node {one.node}{_clock(one)}"}}
    for rank, node in enumerate(shape.nodes):
        yield {"ph": "M", "name": "thread_name", "pid": node, "tid": rank, "args": {"name": f"rank {rank}"}}


def _clock(one: ClockOffset) -> str:
    """Return ` (clock +3.1 ms, within 0.4 ms)`; nothing for the first node, whose clock is the trace's."""
    if one.error_s is None:
        return " (clock unknown)"
    return f" (clock {one.offset_s * 1e3:+.3g} ms, within {one.error_s * 1e3:.3g} ms)" if one.exchanges else ""


def _rank(events: Sequence[Event], rank: int, node: int, ahead_s: float, after: int) -> Iterator[JsonObject]:
    place: JsonObject = {"pid": node, "tid": rank}
    for event in events:
        at = (event.time - ahead_s) * US
        if isinstance(event, StepEvent) and event.step > after:
            yield from _step(event, place, at)
        elif isinstance(event, CountersEvent) and event.step > after:
            counted = {"throttled": event.throttled_s, "garbage": event.gc_s, "processor": event.cpu_s}
            shares: JsonObject = {name: seconds / max(event.wall_s, 1e-9) for name, seconds in counted.items()}
            yield {"ph": "C", "name": f"rank {rank}", "ts": at, "pid": node, "args": shares}
        elif isinstance(event, StallEvent):
            yield {**place, "ph": "i", "s": "t", "name": "stall", "ts": at, "args": {"stack": event.stack}}


def _step(event: StepEvent, place: JsonObject, end_us: float) -> Iterator[JsonObject]:
    begin_us = end_us - event.step_time_s * US
    queued_s = None if isinstance(event.queued_s, Absent) else event.queued_s
    about: JsonObject = {"loss": event.loss, "without a processor (s)": queued_s}
    whole = event.step_time_s * US
    yield {**place, "ph": "X", "name": f"step {event.step}", "ts": begin_us, "dur": whole, "args": about}
    for part in PARTS:
        if seconds := event.time_s.get(part, 0.0):
            yield {**place, "ph": "X", "name": part, "ts": begin_us, "dur": seconds * US}
            begin_us += seconds * US


def _verdicts(
    events: Sequence[Sequence[Event]], shape: RunShape, ahead_s: Mapping[int, float], verdicts: Sequence[RunVerdict]
) -> Iterator[JsonObject]:
    """Mark each verdict where it begins, on its rank, or on the first one."""
    for verdict in verdicts:
        rank = verdict.rank if verdict.rank is not None else (verdict.link or (0,))[0]
        steps = (event for event in events[rank] if isinstance(event, StepEvent))
        begin = next((event.time for event in steps if event.step >= verdict.since_step), None)
        if begin is not None:
            about: JsonObject = {"evidence": list(verdict.evidence), "cost_s": verdict.cost_s}
            node = shape.nodes[rank]
            place: JsonObject = {"pid": node, "tid": rank, "ts": (begin - ahead_s[node]) * US}
            yield {**place, "ph": "i", "s": "g", "name": verdict.cause, "args": about}
