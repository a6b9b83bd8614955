"""Write a blueprint into the run folder and the workers' environment, each line with its reason and source."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trainspec_cli.core.printable import on_one_line
from trainspec_cli.recipe.results.blueprint import Setting
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.paths import RunDir

TUNER_FILE = "NCCL_TUNER_CONFIG_FILE"
EXAMPLE_TUNER = "NVIDIA/nccl, ext-tuner/example/README.md"
TUNER_COLUMNS = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
PROTOCOL = "simple"
"""The protocol that the example tuner takes by itself: a row changes the algorithm and nothing else."""


def communication_settings(plan: Plan, run: RunDir) -> tuple[Setting, ...]:
    """Return the variables that the plan's blueprint sets; where the table of a tuner is wanted, its place too."""
    if plan.blueprint is None:
        return ()
    table: tuple[Setting, ...] = ()
    if plan.blueprint.tuner and plan.spec.cluster.fabric.nccl_tuner:
        reason = "cluster.fabric.nccl_tuner: the planned algorithm for each size"
        table = (Setting(TUNER_FILE, str(run.nccl_tuner_csv), reason, EXAMPLE_TUNER),)
    return (*plan.blueprint.settings, *table)


def communication_environment(plan: Plan, run: RunDir) -> Mapping[str, str]:
    """Return them as variables; what the user has set already stays."""
    settings = communication_settings(plan, run)
    return {setting.name: setting.value for setting in settings if setting.name not in os.environ}


def write_communication(plan: Plan, run: RunDir) -> None:
    """Write the settings, and the tuner's table where there is something in it."""
    if plan.blueprint is None:
        return
    if lines := describe_communication(plan, run):
        write_text(run.nccl_env, "\n".join(lines) + "\n")
    if plan.blueprint.tuner:
        about = (
            f"For NCCL's example tuner plugin ({EXAMPLE_TUNER}), which forces ring and {PROTOCOL} where no row fits."
        )
        lines = [f"# {about}", f"# {TUNER_COLUMNS}"]
        for row in plan.blueprint.tuner:
            size = f"{row.min_bytes},{row.max_bytes}"
            figures = f"{row.collective},{size},{row.algorithm},{PROTOCOL},-1,{row.nodes},{row.ranks},-1,-1"
            lines += [f"# {row.reason}", figures]
        write_text(run.nccl_tuner_csv, "\n".join(lines) + "\n")


def describe_communication(plan: Plan, run: RunDir) -> list[str]:
    """Return each setting below its reason and source, as comments and assignments, or why nothing is set; empty for a
    run that has no NCCL between nodes."""
    settings = communication_settings(plan, run)
    if settings:
        lines = ["# Set for the workers of this run; a variable that you have set yourself stays as it is."]
        for setting in settings:
            lines += [f"# {setting.reason} ({setting.source})", f"{setting.name}={on_one_line(setting.value)}"]
        return lines
    chip = plan.spec.cluster.accelerator
    if plan.blueprint is None or plan.device != "cuda" or plan.num_nodes == 1 or (chip and chip.vendor != "nvidia"):
        return []
    wiring = plan.spec.cluster.fabric.nic_wiring
    why = f"cluster.fabric.nic_wiring is {'null' if wiring is None else wiring}"
    return [f"# No variable of NCCL is set for the workers of this run: {why}."]
