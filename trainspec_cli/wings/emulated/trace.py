"""Write a rehearsal as a trace in virtual time for Perfetto and chrome://tracing. Each rank is a process of the
trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.reporter.diagnosis.trace import process_names
from trainspec_cli.wings.emulated.planned import Rehearsal
from trainspec_cli.wings.emulated.rehearsal import RankRehearsal
from trainspec_cli.wings.emulated.timeline import COMPUTE, Slice, Timeline

US = 1e6
PARTS_THREAD = 0


def trace_rehearsal(done: Rehearsal) -> tuple[JsonObject, int, int]:
    """Return the trace of each rank's last step, the number of slices in it, and the number of omitted slices. `ts` and
    `dur` are in microseconds, rounded to nanoseconds. Raises RecipeError if there is no virtual time."""
    timelines = [(one.rehearsed, one.rehearsed.timeline) for one in done.ranks if one.rehearsed.timeline is not None]
    if not timelines:
        message = "a trace needs virtual time, and the rates of this device are unknown"
        raise RecipeError(
            Problem("unsupported", message, "--trace", "choose a cluster with a known chip, such as cluster=h100")
        )
    drawn: list[JsonValue] = []
    for rank, timeline in timelines:
        drawn += _draw_rank(rank, timeline)
    left_out = sum(timeline.slices_left_out for _, timeline in timelines)
    about: JsonObject = {
        "layout": done.layout,
        "devices": f"{done.world_size:,} {done.device}",
        "micro_batches": done.micro_batches,
        "micro_batches_drawn": max(timeline.micro_batches for _, timeline in timelines),
        "slices": "consecutive operations from the same engine line are shown as one slice",
        "slices_left_out": left_out,
        "time": "virtual: kernels take the chip's planned time, and the host takes no time",
    }
    trace: JsonObject = {"traceEvents": drawn, "displayTimeUnit": "ms", "otherData": about}
    return trace, sum(len(timeline.slices) for _, timeline in timelines), left_out


def without_slices(done: Rehearsal) -> Rehearsal:
    """Return a rehearsal without its slices: there are tens of thousands, and only a trace needs them."""
    ranks = []
    for one in done.ranks:
        found = one.rehearsed
        if found.timeline is not None:
            found = replace(found, timeline=replace(found.timeline, slices=()))
        ranks.append(replace(one, rehearsed=found))
    return replace(done, ranks=tuple(ranks))


def _draw_rank(found: RankRehearsal, timeline: Timeline) -> Iterator[JsonObject]:
    streams = [COMPUTE, *sorted({one.stream for one in timeline.slices} - {COMPUTE})]
    threads = {stream: number for number, stream in enumerate(streams, PARTS_THREAD + 1)}
    names = {PARTS_THREAD: "parts of the step", **{number: stream for stream, number in threads.items()}}
    yield from process_names(found.rank, f"rank {found.rank}", names)
    for part in timeline.parts:
        about: JsonObject = {"waited (s)": part.waited_s}
        yield _slice(found.rank, PARTS_THREAD, part.part, part.begin_s, part.end_s, about)
    # In Chrome's format, both ends of an arrow have the same number.
    arrow = found.rank << 32
    for one in timeline.slices:
        yield _slice(found.rank, threads[one.stream], one.name, one.begin_s, one.end_s, _about(one))
        if one.waits_for in threads:
            # An arrow starts just before the end of the last slice that the compute stream waited for.
            arrow += 1
            end = round(one.end_s * US, 3) - 0.001
            ends: JsonObject = {"pid": found.rank, "cat": "wait", "name": "wait", "id": arrow, "ts": end}
            yield {**ends, "ph": "s", "tid": threads[one.waits_for]}
            yield {**ends, "ph": "f", "bp": "e", "tid": threads[one.stream]}
    for name, curve in (("allocated bytes", timeline.allocated), ("reserved bytes", timeline.reserved)):
        for at_s, nbytes in curve:
            yield {"ph": "C", "name": name, "pid": found.rank, "ts": round(at_s * US, 3), "args": {"bytes": nbytes}}
    at_s, nbytes = timeline.peak
    text = f"peak of {format_bytes(nbytes)}: {found.peak.part}"
    if found.failed is not None:
        at_s = timeline.allocated[-1][0]
        text = f"out of memory: {format_bytes(found.failed.bytes)} for {found.failed.shape} did not fit"
    yield {"ph": "i", "s": "p", "name": text, "pid": found.rank, "tid": PARTS_THREAD, "ts": round(at_s * US, 3)}


def _about(one: Slice) -> JsonObject:
    if one.waits_for:
        return {"for": one.waits_for, "part": one.part}
    return {"part": one.part, "operations": one.operations, "longest": one.longest}


def _slice(pid: int, tid: int, name: str, begin_s: float, end_s: float, about: JsonObject) -> JsonObject:
    begin = round(begin_s * US, 3)
    # Viewers require that slices of a thread do not overlap, so round both ends in the same way.
    length = round(round(end_s * US, 3) - begin, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length, "args": about}
