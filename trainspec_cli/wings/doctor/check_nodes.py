"""Check the nodes before the workers start: quick checks on a single node, measurements on several."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.core.node import node_name
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.planner.this_machine import is_predictable, least_memory
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.backend.nodes.backend import Examination
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import detect
from trainspec_cli.wings.doctor.checks import check_gpus, check_limits, check_memory, check_shm, check_torch
from trainspec_cli.wings.doctor.examine import node_command, refuse_unfit


def check_nodes(plan: Plan, folder: Path, console: PrintableConsole, force: bool = False) -> Examination | None:
    """Check a single node now. For several nodes, return the examination that each one runs when its agent starts,
    which measures and compares them. Return None without a preflight, or if nothing remains to be examined.

    `folder` is the run folder, which may not exist yet. With `force`, predicted memory is not checked. Raises
    MachineError if this node fails a check."""
    if not plan.spec.run.preflight:
        return None
    if plan.num_nodes > 1:
        return Examination(node_command(plan, folder), lambda reports: _check_reports(reports, console))
    for check in preflight(plan, folder, force=force):
        console.report(f"{check.name}: {check.found}; {check.advice}")
    return None


def _check_reports(reports: Sequence[NodeReport], console: PrintableConsole) -> None:
    refuse_unfit(reports)
    for report in reports:
        for check in report.checks:
            if check.status == "warn":
                console.report(f"{report.host}: {check.name}: {check.found}; {check.advice}")


def preflight(plan: Plan, folder: Path, *, force: bool = False) -> list[Check]:
    """Return the warnings from the quick checks on this node. Raises MachineError if a check fails."""
    checks: list[Check] = []
    # Space for one checkpoint is required, because a run without one has no result. Space for all kept checkpoints plus
    # one is recommended, because the oldest is deleted only after the next one is complete.
    spec = plan.spec.checkpoint
    written = len(RunDir(folder).checkpoint_steps())
    to_write = max(1, spec.keep_last + spec.keep_best + 1 - written)
    one = checkpoint_bytes(plan.spec, plan.params)
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    found = f"{format_bytes(free)} free in {existing}; a checkpoint needs {format_bytes(one)}"
    advice = "free some space, choose another run.dir, or keep fewer (checkpoint.keep_last)"
    if free < one:
        checks.append(Check("disk", "fail", found, advice))
    elif free < to_write * one:
        checks.append(
            Check(
                "disk",
                "warn",
                f"{found}; a run needs space for {to_write} of them: it keeps the old ones while it writes the next",
                advice,
            )
        )
    # Each process needs its predicted memory on its GPU, or in the node's memory, which all processes share.
    alone = plan.as_one_group
    prediction = plan.prediction or (least_memory(alone) if is_predictable(alone) else None)
    needed = prediction.needed_bytes if prediction and not force else 0.0
    on_gpus = plan.device == "cuda"
    checks += check_memory(0.0 if on_gpus else needed * plan.devices_per_node)
    if on_gpus:
        checks += [*check_torch(detect()), *check_gpus(needed)]
    if plan.world_size > 1:
        checks += [*check_shm(), *check_limits()]
    refuse_unfit([NodeReport(node_name(), time.time(), tuple(checks))])
    return [check for check in checks if check.status == "warn"]
