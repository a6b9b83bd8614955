"""Render the page of a rehearsal: each rank's memory over a step, its content at the peak, and the parts of the step
compared with those in the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainspec_cli.core.printable import GIB, MIB, format_bytes, format_duration
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    bar_rows,
    heading,
    note,
    origin_line,
    render_page,
    section,
    text_table,
    tiles,
)
from trainspec_cli.reporter.page.svg import LineSeries, Segment, render_bar, render_curves, render_legend
from trainspec_cli.reporter.run_page import PART_KINDS
from trainspec_cli.run.folder.event_types.events import PARTS
from trainspec_cli.wings.emulated.planned import Rehearsal, RehearsedRank

SHOWN = 20
"""Number of tensor groups to list for a rank."""
FOOTER = (
    "Rehearsed by trainspec without GPUs: the engine's own steps on an emulated device, with eager blocks and default "
    "kernels. Times are virtual: kernels take the chip's planned time, and the host takes none."
)


def render_rehearsal_page(done: Rehearsal, title: str, origin: PageOrigin | None = None) -> str:
    """Return the page. `title` describes the model."""
    above = [heading(title, f"Rehearsal of {done.world_size:,} {done.device}; {done.layout}."), origin_line(origin)]
    return render_page(title, "".join([*above, _tiles(done), *_sections(done)]), FOOTER)


def _tiles(done: Rehearsal) -> str:
    fullest = max(done.ranks, key=lambda one: one.rehearsed.peak_bytes)
    free = format_bytes(done.device_bytes - done.outside_bytes)
    figures = [
        ("peak memory", format_bytes(fullest.rehearsed.peak_bytes), f"of {free}, rank {fullest.rehearsed.rank:,}"),
        ("micro-batches", f"{done.micro_batch_size} x {done.micro_batches}", f"recompute {done.recompute}"),
    ]
    if timed := [one.rehearsed for one in done.ranks if one.rehearsed.time_s]:
        slowest = max(timed, key=lambda one: sum(one.time_s.values()))
        step_s = sum(slowest.time_s.values())
        figures.insert(1, ("step, virtual", format_duration(step_s), f"planned {format_duration(done.planned_step_s)}"))
    return tiles(figures)


def _sections(done: Rehearsal) -> Iterator[str]:
    yield _memory_table(done)
    yield _parts(done)
    for rank in done.ranks:
        yield _rank(rank)


def _memory_table(done: Rehearsal) -> str:
    rows = []
    for one in done.ranks:
        found = one.rehearsed
        peak = f"more than {format_bytes(found.peak_bytes)}" if found.failed else format_bytes(found.peak_bytes)
        pairs = ((peak, one.planned_tensors_bytes), (format_bytes(found.reserved_bytes), one.planned_allocator_bytes))
        shown = [text for measured, planned in pairs for text in (measured, format_bytes(planned))]
        rows.append((f"{found.rank:,}", *shown, format_bytes(found.state_bytes), format_bytes(found.checkpoint_bytes)))
    text = (
        f"A device has {format_bytes(done.device_bytes)}; {format_bytes(done.outside_bytes)} of it are for its context "
        "and the buffers of communicators. State: parameters, buffers and optimizer state."
    )
    headings = ("rank", "#tensors", "#planned", "#reserved", "#planned", "#state", "#checkpoint")
    return section("Peak memory", text, text_table(headings, rows))


def _parts(done: Rehearsal) -> str:
    """Draw the parts of each rank's step; empty if there is no virtual time."""
    bars = [(f"rank {one.rehearsed.rank:,}", one.rehearsed.time_s) for one in done.ranks if one.rehearsed.time_s]
    if not bars:
        return ""
    scale = max(sum(parts.values()) for _, parts in bars)
    rows = [(name, render_bar(_segments(parts), scale), format_duration(sum(parts.values()))) for name, parts in bars]
    text = (
        "Virtual time of the rehearsed steps, with eager blocks and default kernels. Planned with the recipe's kernels "
        f"and compilation: {format_duration(done.planned_step_s)}."
    )
    return section("Parts of a step", text, bar_rows(rows) + render_legend(_segments(bars[0][1])))


def _segments(seconds: Mapping[str, float]) -> list[Segment]:
    return [
        Segment(PART_KINDS[part], part.replace("_", " "), seconds[part], format_duration(seconds[part]))
        for part in PARTS
        if seconds.get(part, 0.0) > 0
    ]


def _rank(rank: RehearsedRank) -> str:
    """Draw a rank's memory over the last step, and list its content at the peak."""
    found = rank.rehearsed
    text = f"The peak is reached in {found.peak.part}."
    if found.failed:
        text = (
            f"Memory ran out in {found.peak.part}: {format_bytes(found.failed.bytes)} for {found.failed.shape}, "
            f"allocated by {found.failed.origin}, did not fit."
        )
    chart = _curve(rank)
    if found.timeline is None:
        text += " The rates of this chip are unknown, so that memory over time is not drawn."
    rows = [(format_bytes(one.bytes), f"{one.number:,}", one.shape, one.origin) for one in found.peak.largest[:SHOWN]]
    if rest := found.peak.largest[SHOWN:]:
        rows.append(
            (format_bytes(sum(one.bytes for one in rest)), f"{sum(one.number for one in rest):,}", "others", "")
        )
    tensors = text_table(("#size", "#number", "tensors", "allocated by"), rows)
    return section(f"Memory of rank {found.rank:,}", text, chart + note("Tensors at that moment:") + tensors)


def _curve(rank: RehearsedRank) -> str:
    timeline = rank.rehearsed.timeline
    if timeline is None or not timeline.allocated[-1][0]:
        return ""
    last_s = max(timeline.allocated[-1][0], timeline.reserved[-1][0])
    units = {1.0: "s", 1e3: "ms", 1e6: "µs"}
    scale = next((one for one in units if last_s * one >= 10), 1e6)
    size, size_unit = (GIB, "GiB") if rank.rehearsed.reserved_bytes >= GIB else (MIB, "MiB")
    curves = (
        ("c-ideal", "reserved by the allocator", timeline.reserved, False),
        ("c-measure", "allocated", timeline.allocated, False),
        ("c-heldout", f"peak, {format_bytes(timeline.peak[1])}", (timeline.peak,), True),
    )
    lines = [
        LineSeries(kind, label, [(at_s * scale, nbytes / size) for at_s, nbytes in points], marked)
        for kind, label, points, marked in curves
    ]
    legend = render_legend([Segment(line.kind, line.label, 0.0, "") for line in lines])
    run = timeline.micro_batches
    x_title = f"{units[scale]}, in a step with {run} micro-batch{'es' * (run != 1)}"
    return render_curves(lines, x_title, size_unit) + legend
