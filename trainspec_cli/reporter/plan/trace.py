"""Compare a traced step with the planner's estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.printable import format_bytes, format_duration, format_si
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.recipe.results.tools import TraceResult


@dataclass(frozen=True)
class TraceEstimate:
    """The planner's values for the memory that a trace counts: tensors, but no allocator fragmentation, no buffers
    inside collectives and no device context."""

    peak_memory_bytes: float
    peak_by_cause: dict[str, float]
    flops: float


@dataclass(frozen=True)
class TraceReport:
    """A traced step of a layout, and the planner's estimate of it."""

    layout: str
    micro_batch_size: int
    recompute: str
    traced: TraceResult
    estimated: TraceEstimate

    def as_json(self) -> JsonObject:
        plain = to_plain(self)
        del plain["traced"]
        return plain | to_plain(self.traced)


def compare_trace(
    candidate: Candidate, capacity: CapacityPlan, traced: TraceResult, counted: dict[str, float] | None
) -> TraceReport:
    """Compare a trace of `candidate` with its estimate. `counted`: the planner's model of the engine's memory, by
    cause, if there is one."""
    memory = candidate.fullest_memory
    by_cause = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "logits": memory.logits_bytes,
        "collectives": 0.0,
    }
    if counted is not None:
        by_cause = {cause: sum(counted.get(part, 0.0) for part in parts) for cause, parts in GROUPS.items()}
    model_flops = capacity.flops_per_token * capacity.tokens_per_step / capacity.world_size
    executed = model_flops * candidate.hfu / candidate.mfu if candidate.mfu else model_flops
    estimated = TraceEstimate(sum(by_cause.values()), by_cause, executed)
    layout = candidate.layout.describe()
    return TraceReport(layout, candidate.micro_batch_size, candidate.recompute, traced, estimated)


GROUPS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("activations", "temporaries"),
    "logits": ("logits",),
    "collectives": ("collectives",),
}
"""Maps each displayed cause to the causes that the engine's memory model and the trace distinguish."""


def render_trace(trace: TraceReport) -> RenderableType:
    traced = trace.traced
    estimated = trace.estimated
    title = f"traced in {format_duration(traced.seconds)}: rank {traced.rank} of {trace.layout}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("a step of one device", header_style="dim")
    for column in ("traced", "planned", ""):
        table.add_column(column, justify="right", header_style="dim")
    _add_row(table, "peak of tensors", traced.peak_memory_bytes, estimated.peak_memory_bytes, format_bytes)
    for cause, parts in GROUPS.items():
        size = sum(traced.peak_by_cause.get(part, 0) for part in parts)
        _add_row(table, f"  {cause}", size, estimated.peak_by_cause[cause], format_bytes)
    _add_row(table, "executed", traced.flops, estimated.flops, lambda flops: format_si(flops, "FLOP"))
    for kind, size in sorted(traced.comm_bytes.items()):
        table.add_row(kind.replace("_", "-"), format_bytes(size), "", "")
    return table


def _add_row(table: Table, name: str, traced: float, planned: float, show: Callable[[float], str]) -> None:
    table.add_row(name, show(traced), show(planned), f"{planned / traced - 1:+.1%}" if traced else "")
