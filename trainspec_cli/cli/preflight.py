"""Before the workers start: the doctor's short form, on this host alone or on every host of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from trainspec_cli.doctor.diagnosis import refuse_unfit
from trainspec_cli.doctor.examine import node_command
from trainspec_cli.doctor.preflight import Needs, preflight
from trainspec_cli.launch.backend.nodes.backend import Examination
from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.results.doctor import NodeReport
from trainspec_cli.spec.results.plan import Plan


def examine_here(plan: Plan, folder: Path, console: Console, *, force: bool = False) -> None:
    """On a run's only host; says what to look at. Raises MachineError where the host is not fit.

    `force`: the run is to start whatever memory it is predicted to take.
    """
    if plan.spec.run.preflight:
        needs = _needs(plan, written=len(RunDir(folder).checkpoint_steps()), force=force)
        for check in preflight(folder, needs):
            _warn(console, check.name, check.found, check.advice)


def examine_all(plan: Plan, run: RunDir, console: Console) -> Examination | None:
    """On each of several hosts, which are measured and compared; None where the recipe wants none of it."""
    if not plan.spec.run.preflight:
        return None

    def judge(reports: Sequence[NodeReport]) -> None:
        refuse_unfit(reports)
        for report in reports:
            for check in report.checks:
                if check.status == "warn":
                    _warn(console, f"{report.host}: {check.name}", check.found, check.advice)

    return Examination(node_command(plan, run.root), judge)


def _needs(plan: Plan, written: int, *, force: bool) -> Needs:
    """`written`: checkpoints that lie in the run's folder."""
    needed = plan.prediction.needed_bytes if plan.prediction and not force else 0.0
    on_gpus = plan.device == "cuda"
    return Needs(
        processes=plan.world_size,
        memory_bytes=0.0 if on_gpus else needed * plan.devices_per_node,
        gpu_memory_bytes=needed if on_gpus else 0.0,
        uses_gpus=on_gpus,
        checkpoint_bytes=checkpoint_bytes(plan.spec, plan.params),
        checkpoints=max(1, plan.spec.checkpoint.keep_last + 1 - written),
    )


def _warn(console: Console, name: str, found: str, advice: str) -> None:
    console.print(f"{name}: {found}; {advice}", markup=False, highlight=False, soft_wrap=True)
