"""A simulated disturbance in the terminal: speed without the scheduler, with it and at best, and what was decided."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from trainspec_cli.core.units import format_duration
from trainspec_cli.recipe.results.simulation import Simulation
from trainspec_cli.report.chart import render_chart
from trainspec_cli.report.plan.labels import percent
from trainspec_cli.report.rich_text import Text

KINDS = {
    "shares": "other shares",
    "group_shares": "shares of the replica groups",
    "layers": "other layers in the stages",
    "layout": "another layout",
}
WHERE = (
    "The live scheduler decides so on CPUs. On GPUs it changes nothing yet: it cannot tell a rank's computing from its "
    "waiting there."
)
SHOWN_EVENTS = 8
SHOWN_DECISIONS = 20
CHART_ROWS = 8
MARGIN = 12
"""Columns beside the chart, for its labels."""


def render_simulation(simulation: Simulation, width: int) -> RenderableType:
    ranks, batch = simulation.data_parallel_ranks, simulation.global_batch_size
    what = f"{simulation.steps:,} steps of {batch:,} samples over {ranks:,} data-parallel ranks"
    parts: list[RenderableType] = [
        Text(f"Disturbance {simulation.name}, simulated  {what}", style="bold"),
        *map(Text, event_lines(simulation)),
        _paces(simulation),
        Text(f"{describe_won_back(simulation)}\n{WHERE}"),
        Text(_chart(simulation, width)),
        Text("Decisions", style="bold"),
        _decisions(simulation),
    ]
    return Group(*parts)


def event_lines(simulation: Simulation) -> Iterator[str]:
    events = simulation.events
    yield from events[:SHOWN_EVENTS]
    if len(events) > SHOWN_EVENTS:
        yield f"and {len(events) - SHOWN_EVENTS:,} more"


def pace_rows(simulation: Simulation) -> Iterator[tuple[str, str, str, str]]:
    """(who divides the samples, samples a second, of an undisturbed run's, the whole run's time)"""
    undisturbed = simulation.global_batch_size / simulation.step_s
    yield (
        "undisturbed",
        f"{undisturbed:,.4g}",
        percent(1.0),
        format_duration(simulation.steps * simulation.step_s),
    )
    for name, pace in (
        ("scheduler off", simulation.off),
        ("scheduler on", simulation.on),
        ("ideal, whole samples", simulation.ideal),
        ("ideal, any share", simulation.ideal_real),
    ):
        rate = pace.samples_per_s
        yield name, f"{rate:,.4g}", percent(rate / undisturbed, 1), format_duration(pace.wall_s)


def describe_won_back(simulation: Simulation) -> str:
    """`94% of what whole samples allow is won back (92% of what the speeds allow)`"""
    won, of_real = simulation.won_back, simulation.won_back_of_real
    if of_real is None:
        return "other shares would win nothing back: 0 of 0"
    if won is None:
        return "whole samples allow nothing to win back; a larger batch has finer shares"
    return f"{percent(won)} of what whole samples allow is won back ({percent(of_real)} of what the speeds allow)"


def decision_rows(simulation: Simulation) -> Iterator[tuple[str, str, str, str]]:
    """(step, what is decided, why, what it was expected to bring and brought)"""
    for decision in simulation.decisions:
        group = "" if decision.group is None else f" in replica group {decision.group}"
        what = KINDS[decision.kind] + group
        if decision.micro_batches is not None:
            what += f", {decision.micro_batch_size} x {decision.micro_batches} at most"
        gain = f"{format_duration(decision.before_s)} -> {format_duration(decision.expected_s)}"
        yield (
            f"{decision.step:,}",
            what,
            decision.reason,
            f"{gain}, was {format_duration(decision.achieved_s)}",
        )


def _paces(simulation: Simulation) -> Table:
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in ("samples/s", "of undisturbed", "time"):
        table.add_column(heading, justify="right")
    for row in pace_rows(simulation):
        table.add_row(*row)
    return table


def _chart(simulation: Simulation, width: int) -> str:
    points = [(step, rate) for step, rate in enumerate(simulation.on.by_step, 1)]
    return render_chart(
        points, width=max(20, width - MARGIN), height=CHART_ROWS, title="samples/s by step, scheduler on"
    )


def _decisions(simulation: Simulation) -> RenderableType:
    rows = list(decision_rows(simulation))
    if not rows:
        return Text("none")
    table = Table(box=None, header_style="bright_black", padding=(0, 2, 0, 0))
    table.add_column("step", justify="right")
    for heading in ("decision", "reason", "computing in a step"):
        table.add_column(heading)
    for row in rows[:SHOWN_DECISIONS]:
        table.add_row(*row)
    if len(rows) > SHOWN_DECISIONS:
        table.add_row("", f"and {len(rows) - SHOWN_DECISIONS:,} more", "", "")
    return table
