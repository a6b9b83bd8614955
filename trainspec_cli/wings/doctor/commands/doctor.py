"""`trainspec doctor`: examine this node, or every node of a Slurm job."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import private_files
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.results.doctor import Check, Diagnosis
from trainspec_cli.reporter.console import PrintableConsole, Text
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.script import start_command
from trainspec_cli.session.recipe.load import load, plan_for, this_machine
from trainspec_cli.session.slurm.container import folders_read
from trainspec_cli.wings.doctor.examine import diagnose, examine_here, examine_nodes
from trainspec_cli.wings.doctor.switches import check_switches
from trainspec_cli.wings.doctor.sysfs import read_nics
from trainspec_cli.wings.doctor.tiers import check_fabric

DEFAULT_RECIPE = "recipe=quickstart"
SHARED = Path("runs")
MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
NAME_WIDTH = 15

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="A recipe, or cluster keys such as cluster.devices_per_node=8."),
]


def doctor(arguments: Arguments = None, as_json: AsJson = False) -> int:
    """Check this node: its hardware, settings and speed, and the links between its processes.

    In a Slurm job (salloc, sbatch --wrap), it checks all nodes of the job and reports the slowest. The exit code is 4
    if a check fails.
    """
    given = arguments or []
    named = any(argument.startswith("recipe=") for argument in given)
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    of_job = [f"cluster.num_nodes={nodes}"] if nodes > 1 else []
    loaded = load([*([] if named else [DEFAULT_RECIPE]), *given, *of_job])
    machine = this_machine(loaded.spec)
    cluster = loaded.spec.cluster
    if cluster.device == "cpu" or machine.gpu_names or not (machine.gpu_problem or cluster.device == "cuda"):
        plan = plan_for(loaded, machine).as_one_group
    else:
        # The examination will show why GPUs are unusable. A plan for unknown GPUs is impossible, so plan for the CPU
        # and set the device afterwards.
        on_cpu = replace(loaded, spec=replace(loaded.spec, cluster=replace(cluster, device="cpu")))
        plan = replace(plan_for(on_cpu, machine).as_one_group, device="cuda")
    if nodes == 1:
        with tempfile.TemporaryDirectory(prefix="trainspec-doctor-") as folder:
            diagnosis = diagnose(*examine_here(plan, machine, Path(folder)))
    else:
        # srun starts the examination from the job's first node, and all nodes share the file system of ./runs.
        start = start_command(plan, Path.cwd(), [Path.cwd(), *folders_read(plan, None)])
        reach = Reach(slurm.own_address(), tuple(start))
        with private_files():
            SHARED.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".doctor-", dir=SHARED) as folder:
                diagnosis = diagnose(*examine_nodes(plan, reach, Path(folder).absolute()))
        # Suggest network tiers from Slurm and from measurements.
        links = diagnosis.links
        devices_per_node = plan.devices_per_node
        try:
            tiers = list(check_switches(slurm.show_topology(), devices_per_node))
        except MachineError as error:
            tiers = [Check("switches", "ok", f"none from Slurm: {error.problems[0].message}")]
        tiers += check_fabric(links.pairs if links else (), devices_per_node, len(read_nics()))
        diagnosis = replace(diagnosis, between=(*diagnosis.between, *tiers))
    if as_json:
        print(json_text(diagnosis.as_json()))
    else:
        PrintableConsole(highlight=False, soft_wrap=True).show(render_diagnosis(diagnosis))
    return MachineError.exit_code if diagnosis.status == "fail" else 0


def render_diagnosis(diagnosis: Diagnosis) -> Text:
    text = Text()
    for report in diagnosis.hosts:
        text.append(f"{report.host}\n", style="bold")
        for check in report.checks:
            text.append_text(_check_line(check))
    if diagnosis.between:
        text.append("between the processes\n", style="bold")
        for check in diagnosis.between:
            text.append_text(_check_line(check))
    nodes = len(diagnosis.hosts)
    checks = [check for report in diagnosis.hosts for check in report.checks] + list(diagnosis.between)
    count = {status: sum(check.status == status for check in checks) for status in MARKS}
    warnings = f"{count['warn']} warning{'s' * (count['warn'] != 1)}"
    found = f"{count['ok']} ok, {warnings}, {count['fail']} failed"
    text.append(f"{nodes} node{'s' if nodes > 1 else ''}: {found}")
    if diagnosis.slowest and nodes > 1:
        text.append(f"\nslowest node: {diagnosis.slowest}")
    return text


def _check_line(check: Check) -> Text:
    mark, colour = MARKS[check.status]
    line = Text("  ").append(mark, style=colour).append(f"  {check.name:<{NAME_WIDTH}} {check.found}\n")
    if check.advice:
        line.append(f"        {'':<{NAME_WIDTH}} {check.advice}\n", style="dim")
    return line
