"""`trainspec rehearse`: run steps of individual ranks of a plan on the emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from trainspec_cli.cli.options import AsJson, Html, RecipeArguments, check_writable, page_origin, write_page
from trainspec_cli.core.errors import PlanError
from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.plan.sections import describe_won_back, render_simulation
from trainspec_cli.session.planning.disturbance import load_disturbance
from trainspec_cli.wings.emulated.disturbed import add_costs, check_faults, check_leaves
from trainspec_cli.wings.emulated.planned import PART_NAMES, Rehearsal, RehearsedStep, plan_to_rehearse, rehearse_ranks
from trainspec_cli.wings.emulated.rehearsal import read_ranks
from trainspec_cli.wings.emulated.trace import trace_rehearsal, without_slices

Ranks = Annotated[
    str,
    typer.Option(
        metavar="ends|distinct|all|LIST",
        help="ends: one rank each of the first, the last and every other kind of pipeline stage; distinct: one rank "
        "of each stage; all: one of every group of identical ranks; or rank numbers.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="Write a trace of each rank's last step, to view at ui.perfetto.dev."),
]
Steps = Annotated[int, typer.Option(help="Number of steps to run per rank.", min=1)]
MemoryGib = Annotated[
    float | None,
    typer.Option("--memory-gib", metavar="GIB", help="Device memory to use instead of the planned chip's."),
]
NEGLIGIBLE = 0.001
SHOWN = 10
"""Number of tensor groups to print per rank."""


def rehearse(
    arguments: RecipeArguments,
    ranks: Ranks = "ends",
    steps: Steps = 2,
    memory_gib: MemoryGib = None,
    as_json: AsJson = False,
    html: Html = None,
    trace: Trace = None,
) -> int:
    """Run steps of individual ranks of a plan without GPUs, to find their peak memory, when it is reached, what fills
    it, and the step time.

    The engine's own code runs on an emulated device, whose tensors have sizes but no values. No other ranks are needed.
    Memory is counted by the rules of torch's caching allocator. Exit code 3 means that a rank runs out of memory. Based
    on the rehearsed steps, disturb=NAME|FILE simulates the run under a disturbance, and fault=... determines the cost
    of a fault."""
    for file, option in ((html, "--html"), (trace, "--trace")):
        if file is not None:
            check_writable(file, option)
    planned = plan_to_rehearse(arguments, memory_gib)
    numbers = read_ranks(ranks, planned.plan, planned.kinds)
    disturbed = load_disturbance(arguments)
    check_leaves(planned, disturbed)
    faults = check_faults(planned, numbers, disturbed=disturbed is not None)
    with PrintableConsole(stderr=True).status("") as status:
        done = rehearse_ranks(planned, numbers, steps, lambda rank: status.update(f"rehearsing rank {rank}"))
    done = add_costs(planned, done, disturbed, faults)
    model = planned.plan.spec.model
    written = _write(done, f"{model.name or model.family} on {planned.device}", html, trace)
    if as_json:
        print(json_text(to_plain(without_slices(done))))
    else:
        _show(done)
        PrintableConsole(highlight=False).report(*written)
    return PlanError.exit_code if any(rank.rehearsed.failed for rank in done.ranks) else 0


def _write(done: Rehearsal, title: str, html: Path | None, trace: Path | None) -> list[str]:
    """Write the page and the trace. Return lines that describe the trace."""
    if html is not None:
        # This loads charts, which text does not need.
        from trainspec_cli.wings.emulated.page import render_rehearsal_page

        write_page(html, render_rehearsal_page(done, title, page_origin()))
    if trace is None:
        return []
    drawn, slices, left_out = trace_rehearsal(done)
    write_page(trace, json_text(drawn, indent=None), "--trace")
    shorter = f"; {left_out:,} shorter slices are omitted" if left_out else ""
    return ["", f"trace   {trace}: {slices:,} slices, each of operations from one line of the engine{shorter}"]


def _show(done: Rehearsal) -> None:
    console = PrintableConsole(highlight=False)
    free_bytes = done.device_bytes - done.outside_bytes
    console.report(
        f"layout  {done.layout}; micro-batches {done.micro_batch_size} x {done.micro_batches}; "
        f"recompute {done.recompute}; {done.world_size:,} {done.device}",
        f"memory  {format_bytes(free_bytes)} for tensors: {format_bytes(done.device_bytes)} minus "
        f"{format_bytes(done.outside_bytes)} for the context and the buffers of communicators",
        "",
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right", header_style="dim", no_wrap=True)
    for column in ("tensors", "planned", "", "reserved", "planned", "state", "checkpoint"):
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    for rank in done.ranks:
        found = rank.rehearsed
        table.add_row(
            f"{found.rank:,}",
            "out of memory" if found.failed else format_bytes(found.peak_bytes),
            format_bytes(rank.planned_tensors_bytes),
            "" if found.failed else f"{rank.planned_tensors_bytes / found.peak_bytes - 1:+.1%}",
            format_bytes(found.reserved_bytes),
            format_bytes(rank.planned_allocator_bytes),
            format_bytes(found.state_bytes),
            format_bytes(found.checkpoint_bytes),
        )
    console.show(table)
    if host_bytes := max(rank.rehearsed.host_bytes for rank in done.ranks):
        console.report("", f"Host memory for offloaded state: {format_bytes(host_bytes)} per rank.")
    saved = max(rank.fused_saves_bytes for rank in done.ranks)
    if saved > NEGLIGIBLE * free_bytes:
        console.report(
            "",
            "Blocks run eagerly with default kernels here. According to the plan, they need up to "
            f"{format_bytes(saved)} less memory in the recipe's run.",
        )
    if done.step is not None:
        _show_step(console, done, done.step)
    _show_costs(console, done)
    for rank in done.ranks:
        found = rank.rehearsed
        equal = f" (and {rank.equal_ranks - 1:,} equivalent ranks)" if rank.equal_ranks > 1 else ""
        lines = ["", f"rank {found.rank:,}{equal} at its peak: {found.peak.part}"]
        if found.failed:
            tensor = f"{format_bytes(found.failed.bytes)} for {found.failed.shape}"
            lines = ["", f"rank {found.rank:,} ran out of memory: {found.peak.part}"]
            lines.append(f"  {tensor}, allocated by {found.failed.origin}, did not fit in addition to")
        shown = found.peak.largest[:SHOWN]
        lines += [f"  {format_bytes(one.bytes):>10}  {one.number:>4} x {one.shape}  {one.origin}" for one in shown]
        rest = found.peak.largest[SHOWN:]
        if rest:
            lines.append(f"  {format_bytes(sum(one.bytes for one in rest)):>10}  others")
        lines.append(f"  rehearsed in {format_duration(found.seconds)}")
        console.report(*lines)


def _show_step(console: PrintableConsole, done: Rehearsal, step: RehearsedStep) -> None:
    """Print the rehearsed step time by part, next to the planned one."""
    table = Table(box=None, pad_edge=False)
    table.add_column("step", header_style="dim")
    for column in ("rehearsed", "planned", ""):
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    rows = [(name, step.parts_s[name], step.planned_parts_s[name]) for name in step.parts_s]
    for name, found_s, planned_s in [*rows, ("all", step.step_s, step.planned_s)]:
        if found_s or planned_s:
            error = (planned_s - found_s) / step.step_s
            table.add_row(PART_NAMES[name], format_duration(found_s), format_duration(planned_s), f"{error:+.1%}")
    console.report("")
    console.show(table)
    console.report(
        f"Virtual time of rank {step.rank:,}, which has the most work, with eager blocks and default kernels. The "
        "last column is the plan's error relative to the step time. Planned step time of the recipe's run: "
        f"{format_duration(done.planned_step_s)}",
    )


def _show_costs(console: PrintableConsole, done: Rehearsal) -> None:
    """Print the simulated disturbance and the faults."""
    if done.simulation is not None and done.planned_simulation is not None:
        console.report("")
        console.show(render_simulation(done.simulation, console.width, verbose=False))
        planned = describe_won_back(done.planned_simulation)
        console.report(f"At the planned step time of {format_duration(done.planned_simulation.step_s)}: {planned}")
    if not done.faults:
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("fault", header_style="dim", overflow="fold")
    for column in ("lost steps", "pause", "run ends later by", "GPU-hours", "cost"):
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    for cost in done.faults:
        table.add_row(
            cost.fault,
            f"{cost.lost_steps:,.1f}",
            format_duration(cost.pause_s) if cost.pause_s else "",
            "never" if cost.wall_s is None else format_duration(cost.wall_s),
            f"{cost.device_hours:,.1f}",
            "" if cost.usd is None else f"${cost.usd:,.2f}",
        )
    console.report("")
    console.show(table)
