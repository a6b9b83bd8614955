"""A traced step beside the planner's estimate of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.results.prediction import Candidate, CapacityPlan, MemoryBreakdown
from trainspec_cli.spec.results.tools import TraceResult
from trainspec_cli.units import format_bytes, format_duration, format_si


def trace_as_json(
    candidate: Candidate, capacity: CapacityPlan, traced: TraceResult, counted: dict[str, float] | None
) -> dict[str, Any]:
    """`estimated` is the planner's, of what the trace counts: tensors, without the allocator's holes, the collectives'
    own buffers and the device's context. `counted`: the engine's, by cause, where the planner counts it."""
    memory = max(candidate.memory, key=lambda stage: stage.total_bytes)
    by_cause = _by_cause(memory)
    if counted is not None:
        by_cause = {cause: sum(counted.get(part, 0.0) for part in parts) for cause, parts in GROUPS.items()}
    model_flops = capacity.flops_per_token * capacity.tokens_per_step / capacity.world_size
    executed = model_flops * candidate.hfu / candidate.mfu if candidate.mfu else model_flops
    return {
        "layout": candidate.layout.describe(),
        "micro_batch_size": candidate.micro_batch_size,
        "recompute": candidate.recompute,
        **to_plain(traced),
        "estimated": {"peak_memory_bytes": sum(by_cause.values()), "peak_by_cause": by_cause, "flops": executed},
    }


GROUPS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries"),
}
"""The planner's causes -> the trace's."""


def _by_cause(memory: MemoryBreakdown) -> dict[str, float]:
    return {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes + memory.logits_bytes,
    }


def render_trace(trace: dict[str, Any]) -> RenderableType:
    title = f"traced in {format_duration(trace['seconds'])}: rank {trace['rank']} of {trace['layout']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("a step of one device", header_style="dim")
    for heading in ("traced", "planned", ""):
        table.add_column(heading, justify="right", header_style="dim")
    estimated = trace["estimated"]
    _add_row(table, "peak of tensors", trace["peak_memory_bytes"], estimated["peak_memory_bytes"], format_bytes)
    for cause, parts in GROUPS.items():
        traced = sum(trace["peak_by_cause"].get(part, 0) for part in parts)
        _add_row(table, f"  {cause}", traced, estimated["peak_by_cause"][cause], format_bytes)
    _add_row(table, "executed", trace["flops"], estimated["flops"], lambda flops: format_si(flops, "FLOP"))
    for kind, size in sorted(trace["comm_bytes"].items()):
        table.add_row(kind.replace("_", "-"), format_bytes(size), "", "")
    return table


def _add_row(table: Table, name: str, traced: float, planned: float, show: Callable[[float], str]) -> None:
    table.add_row(name, show(traced), show(planned), f"{planned / traced - 1:+.1%}" if traced else "")
