"""Check the nodes before the workers start: the doctor's short form on a single node, its examination on several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.planner.this_machine import is_predictable, least_memory
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.nodes.backend import Examination
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.wings.doctor.examine import Needs, node_command, preflight, refuse_unfit


def check_nodes(plan: Plan, folder: Path, console: PrintableConsole, force: bool = False) -> Examination | None:
    """Check a run's only node now; for several return the examination that each goes through when its agent starts,
    which measures and compares them. None where the recipe wants no preflight, or there is nothing left to examine.

    `folder`: the run's, which need not be there yet. `force`: the run is to start whatever memory it is predicted to
    take. Raises MachineError where this node is not fit.
    """
    if not plan.spec.run.preflight:
        return None
    if plan.num_nodes > 1:
        return Examination(node_command(plan, folder), lambda reports: _judge(reports, console))
    for check in preflight(folder, _needs(plan, written=len(RunDir(folder).checkpoint_steps()), force=force)):
        console.report(f"{check.name}: {check.found}; {check.advice}")
    return None


def _judge(reports: Sequence[NodeReport], console: PrintableConsole) -> None:
    refuse_unfit(reports)
    for report in reports:
        for check in report.checks:
            if check.status == "warn":
                console.report(f"{report.host}: {check.name}: {check.found}; {check.advice}")


def _needs(plan: Plan, written: int, *, force: bool) -> Needs:
    """`written`: checkpoints that lie in the run's folder."""
    alone = plan.as_one_group
    prediction = plan.prediction or (least_memory(alone) if is_predictable(alone) else None)
    needed = prediction.needed_bytes if prediction and not force else 0.0
    on_gpus = plan.device == "cuda"
    return Needs(
        processes=plan.world_size,
        memory_bytes=0.0 if on_gpus else needed * plan.devices_per_node,
        gpu_memory_bytes=needed if on_gpus else 0.0,
        uses_gpus=on_gpus,
        checkpoint_bytes=checkpoint_bytes(plan.spec, plan.params),
        checkpoints=max(1, plan.spec.checkpoint.keep_last + plan.spec.checkpoint.keep_best + 1 - written),
    )
