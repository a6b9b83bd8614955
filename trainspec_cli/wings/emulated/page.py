"""Render the page of a rehearsal: the memory of each rank over a step, the memory's content at the peak, and the parts
of the step compared with the plan."""

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
from trainspec_cli.wings.emulated.planned import PART_NAMES, Rehearsal, RehearsedRank, RehearsedStep

PART_KINDS = {
    "compute": "c-matmul_s",
    "exposed_comm": "c-exposed_comm",
    "hand_over": "c-cp_comm_s",
    "bubble": "c-bubble_s",
    "optimizer": "c-optimizer",
    "other": "c-other",
}
"""Part of a step -> CSS class."""
SHOWN = 20
"""Number of tensor groups to list per rank."""
FOOTER = (
    "Rehearsed by trainspec without GPUs: the engine's own steps on an emulated device, with eager blocks and default "
    "kernels. Times are virtual: kernels take the chip's planned time, and the host takes no time."
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
    if done.step is not None:
        planned = f"planned {format_duration(done.step.planned_s)}"
        figures.insert(1, ("step, virtual", format_duration(done.step.step_s), planned))
    return tiles(figures)


def _sections(done: Rehearsal) -> Iterator[str]:
    yield _memory_table(done)
    if done.step is not None:
        yield _parts(done.step)
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
        f"A device has {format_bytes(done.device_bytes)}; of this, {format_bytes(done.outside_bytes)} is for its "
        "context and the communicators' buffers. State: parameters, buffers and optimizer state."
    )
    headings = ("rank", "#tensors", "#planned", "#reserved", "#planned", "#state", "#checkpoint")
    return section("Peak memory", text, text_table(headings, rows))


def _parts(step: RehearsedStep) -> str:
    """Draw the parts of a step, rehearsed and planned."""
    scale = max(step.step_s, step.planned_s)
    steps = (("rehearsed", step.parts_s, step.step_s), ("planned", step.planned_parts_s, step.planned_s))
    rows = [(name, render_bar(_segments(parts_s), scale), format_duration(total_s)) for name, parts_s, total_s in steps]
    text = (
        f"Virtual time of rank {step.rank:,}, which has the most work, with eager blocks and default kernels, and "
        "the planned time."
    )
    shown = [
        (PART_NAMES[part], format_duration(seconds), format_duration(step.planned_parts_s[part]))
        for part, seconds in step.parts_s.items()
    ]
    table = text_table(("", "#rehearsed", "#planned"), shown)
    legend = render_legend(_segments(step.parts_s), with_values=False)
    return section("Parts of a step", text, bar_rows(rows) + legend + table)


def _segments(parts_s: Mapping[str, float]) -> list[Segment]:
    return [
        Segment(PART_KINDS[part], PART_NAMES[part], seconds, format_duration(seconds))
        for part, seconds in parts_s.items()
        if seconds > 0
    ]


def _rank(rank: RehearsedRank) -> str:
    """Draw a rank's memory over the last step, and list the content of the memory at the peak."""
    found = rank.rehearsed
    text = f"The peak is reached in {found.peak.part}."
    if found.failed:
        text = (
            f"Memory ran out in {found.peak.part}: {format_bytes(found.failed.bytes)} for {found.failed.shape}, "
            f"allocated by {found.failed.origin}, did not fit."
        )
    chart = _curve(rank)
    if found.timeline is None:
        text += " The rates of this chip are unknown, so the memory over time cannot be drawn."
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
