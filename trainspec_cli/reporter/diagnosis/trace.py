"""Write the steps of all ranks as a trace for Perfetto and chrome://tracing, on the first node's clock.

The durations of a step's parts are known, but not their order; parts are drawn in the order of `PARTS`. The offset
between nodes' clocks is measured with the exchange that ends each step. No rank leaves it before the last one has
entered, and from then on, all ranks leave within the duration of the exchange. The recorded times at which two ranks
leave therefore differ by the clock offset, to within that duration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from trainspec_cli.balance.decisions.speeds import spread
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.records import Absent, to_plain
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.gather import RunShape, event_paths
from trainspec_cli.run.folder.event_types.events import PARTS, CountersEvent, Event, StallEvent, StepEvent
from trainspec_cli.run.folder.events import read_sound
from trainspec_cli.run.folder.paths import RunDir

NEWEST_STEPS = 2000
"""Maximum number of steps in a trace. Older steps are left out to keep the trace readable."""
US = 1e6


@dataclass(frozen=True)
class ClockOffset:
    """The offset of a node's clock: it is ahead of the first node's clock by `offset_s`, with an uncertainty of
    `error_s`."""

    node: int
    offset_s: float
    error_s: float | None
    """Uncertainty of the offset; None if the offset could not be measured, and is assumed to be 0."""
    exchanges: int
    """Number of exchanges that the offset was measured from."""


def clock_offsets(nodes: Sequence[int], left: Sequence[Mapping[int, tuple[float, float]]]) -> tuple[ClockOffset, ...]:
    """Return the offsets of all nodes. For each rank, `left` maps a step to two values: the time when the rank left the
    exchange that ends the step (Unix seconds on its node's clock), and the duration of the shortest such exchange in
    these steps, including waits."""
    # Use the rank of a node that left first, because others may have been waiting for a processor.
    of_node: dict[int, dict[int, tuple[float, float]]] = {node: {} for node in nodes}
    for node, of_rank in zip(nodes, left, strict=True):
        for step, found in of_rank.items():
            of_node[node][step] = min(of_node[node].get(step, found), found, key=itemgetter(0))
    first = min(nodes, default=0)
    offsets = []
    for node in sorted(of_node):
        here = of_node[node]
        there = of_node[first]
        common = sorted(here.keys() & there.keys())
        if node == first or not common:
            offsets.append(ClockOffset(node, 0.0, 0.0 if node == first else None, 0))
            continue
        middle, deviation = spread([here[step][0] - there[step][0] for step in common])
        transfer_s = median(min(here[step][1], there[step][1]) for step in common)
        # The standard error of a median is 1.2533 standard deviations over the square root of the number of samples.
        error_s = transfer_s + 1.2533 * deviation / len(common) ** 0.5
        offsets.append(ClockOffset(node, middle, error_s, len(common)))
    return tuple(offsets)


def process_names(pid: int, name: str, threads: Mapping[int, str]) -> Iterator[JsonObject]:
    """Yield the events that name a process and its threads."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for thread, name_of_thread in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread, "args": {"name": name_of_thread}}


def trace_run(run: RunDir, shape: RunShape, verdicts: Sequence[RunVerdict]) -> JsonObject:
    """Return the trace (a process for each node, a thread for each rank) and the clock offsets."""
    events = [list(read_sound(path)) for path in event_paths(run, shape)]
    counted = [[event for event in of_rank if isinstance(event, CountersEvent)] for of_rank in events]
    left = [{one.step: (one.left_at, one.agreed_s) for one in of_rank if one.left_at} for of_rank in counted]
    offsets = clock_offsets(shape.nodes, left)
    ahead_s = {one.node: one.offset_s for one in offsets}
    newest = max((one.step for of_rank in events for one in of_rank if isinstance(one, StepEvent)), default=0)
    drawn: list[JsonValue] = []
    for one in offsets:
        # `node 1 (clock +3.1 ms, within 0.4 ms)`; the trace uses the first node's clock.
        clock = f" (clock {one.offset_s * 1e3:+.3g} ms, within {(one.error_s or 0) * 1e3:.3g} ms)" * bool(one.exchanges)
        name = f"node {one.node}{' (clock unknown)' if one.error_s is None else clock}"
        threads = {rank: f"rank {rank}" for rank, node in enumerate(shape.nodes) if node == one.node}
        drawn += process_names(one.node, name, threads)
    for rank, of_rank in enumerate(events):
        node = shape.nodes[rank]
        drawn += _draw_rank(of_rank, rank, node, ahead_s[node], newest - NEWEST_STEPS)
    for verdict in verdicts:
        # Mark a verdict at its start, on its rank or, if it has none, on the first rank.
        rank = verdict.rank if verdict.rank is not None else (verdict.link or (0,))[0]
        steps = (event for event in events[rank] if isinstance(event, StepEvent))
        begin = next((event.time for event in steps if event.step >= verdict.since_step), None)
        if begin is not None:
            about: JsonObject = {"evidence": list(verdict.evidence), "cost_s": verdict.cost_s}
            node = shape.nodes[rank]
            place: JsonObject = {"pid": node, "tid": rank, "ts": (begin - ahead_s[node]) * US}
            drawn.append({**place, "ph": "i", "s": "g", "name": verdict.cause, "args": about})
    return {"traceEvents": drawn, "displayTimeUnit": "ms", "otherData": {"clocks": [to_plain(one) for one in offsets]}}


def _draw_rank(events: Sequence[Event], rank: int, node: int, ahead_s: float, after: int) -> Iterator[JsonObject]:
    """Yield a rank's steps after step `after` with their parts, and the rank's counters and stalls."""
    place: JsonObject = {"pid": node, "tid": rank}
    for event in events:
        at = (event.time - ahead_s) * US
        if isinstance(event, StepEvent) and event.step > after:
            whole = event.step_time_s * US
            begin = at - whole  # the event's time is the end of its step
            queued_s = None if isinstance(event.queued_s, Absent) else event.queued_s
            about: JsonObject = {"loss": event.loss, "without a processor (s)": queued_s}
            yield {**place, "ph": "X", "name": f"step {event.step}", "ts": begin, "dur": whole, "args": about}
            for part in PARTS:
                if seconds := event.time_s.get(part, 0.0):
                    yield {**place, "ph": "X", "name": part, "ts": begin, "dur": seconds * US}
                    begin += seconds * US
        elif isinstance(event, CountersEvent) and event.step > after:
            counted = {"throttled": event.throttled_s, "garbage": event.gc_s, "processor": event.cpu_s}
            shares: JsonObject = {name: seconds / max(event.wall_s, 1e-9) for name, seconds in counted.items()}
            yield {"ph": "C", "name": f"rank {rank}", "ts": at, "pid": node, "args": shares}
        elif isinstance(event, StallEvent):
            yield {**place, "ph": "i", "s": "t", "name": "stall", "ts": at, "args": {"stack": event.stack}}
