"""Decide `auto` kernels before the workers start, by what is measured here or was before."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelTable
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.kernels_text import describe_choice
from trainspec_cli.run.tools import measure_kernels, read_table, table_path
from trainspec_cli.session.console import PrintableConsole


def select_kernels(
    plan: Plan, machine: Machine, console: PrintableConsole, *, may_measure: bool = True
) -> tuple[Plan, KernelTable | None]:
    """Return the plan with no `auto` kernel left, and the table it was chosen by (None where nothing was left open).

    On several nodes the first measures for all. Without `may_measure` nothing is started: kernels that were never
    measured stay open, and this says so.
    """
    if not plan.kernels.open_ops:
        return plan, None
    table = measure(plan, machine, console) if may_measure else read_table(table_path(plan, machine))
    if table is None:
        console.report("kernels: not measured yet; the first launch does that, in about a minute")
        return plan, None
    selected = replace(plan, kernels=table.resolve(plan.kernels))
    console.report(f"kernels: {describe_choice(selected.kernels, table)}")
    return selected, table


def measure(plan: Plan, machine: Machine, console: PrintableConsole, *, again: bool = False) -> KernelTable:
    return measure_kernels(
        plan, machine, lambda: console.report("measuring kernels on this machine, once"), again=again
    )
