"""Before the workers start: `auto` kernels are decided, by what is measured here or was before."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from trainspec_cli.launch.measuring import measure_kernels, read_table, table_path
from trainspec_cli.report.kernels_text import describe_choice
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.kernels import KernelTable
from trainspec_cli.spec.results.plan import Plan


def settle_kernels(
    plan: Plan, machine: Machine, console: Console, *, may_measure: bool = True
) -> tuple[Plan, KernelTable | None]:
    """-> the plan with no `auto` kernel left, and the table it was chosen by (None where nothing was left open).

    Without `may_measure` nothing is started: kernels that were never measured stay open, and this says so.
    """
    if not plan.kernels.open_ops:
        return plan, None
    table = measure(plan, machine, console) if may_measure else read_table(table_path(plan, machine))
    if table is None:
        _say(console, "kernels: not measured yet; the first launch does that, in about a minute")
        return plan, None
    settled = replace(plan, kernels=table.settle(plan.kernels))
    _say(console, f"kernels: {describe_choice(settled.kernels, table)}")
    return settled, table


def measure(plan: Plan, machine: Machine, console: Console, *, again: bool = False) -> KernelTable:
    return measure_kernels(plan, machine, lambda: _say(console, "measuring kernels on this machine, once"), again=again)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
