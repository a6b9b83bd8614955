"""A traced step beside the planner's estimate of it."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.table import Table

from trainspec_cli.spec.prediction import Candidate, CapacityPlan
from trainspec_cli.units import format_bytes, format_duration, format_si


def trace_as_json(candidate: Candidate, capacity: CapacityPlan, traced: dict[str, Any]) -> dict[str, Any]:
    """`estimated` is the planner's, of what the trace counts: tensors, without the allocator's holes, the collectives'
    own buffers and the device's context."""
    memory = max(candidate.memory, key=lambda stage: stage.total_bytes)
    tensors = memory.total_bytes - memory.comm_buffers_bytes - memory.fragmentation_bytes - memory.context_bytes
    model_flops = capacity.flops_per_token * capacity.tokens_per_step / capacity.world_size
    executed = model_flops * candidate.hfu / candidate.mfu if candidate.mfu else model_flops
    return {
        "layout": candidate.layout.describe(),
        "micro_batch_size": candidate.micro_batch_size,
        "recompute": candidate.recompute,
        **traced,
        "estimated": {"peak_memory_bytes": tensors, "flops": executed},
    }


def render_trace(trace: dict[str, Any]) -> RenderableType:
    title = f"traced in {format_duration(trace['seconds'])}: rank {trace['rank']} of {trace['layout']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, justify in (
        ("a step of one device", "left"),
        ("traced", "right"),
        ("planned", "right"),
        ("", "right"),
    ):
        table.add_column(heading, justify=justify, header_style="dim")  # type: ignore[arg-type]
    for name, key, show in (("peak of tensors", "peak_memory_bytes", format_bytes), ("executed", "flops", _flops)):
        traced, planned = trace[key], trace["estimated"][key]
        table.add_row(name, show(traced), show(planned), f"{planned / traced - 1:+.1%}" if traced else "")
    for kind, size in sorted(trace["comm_bytes"].items()):
        table.add_row(kind.replace("_", "-"), format_bytes(size), "", "")
    return table


def _flops(flops: float) -> str:
    return format_si(flops, "FLOP")
