"""`trainspec doctor`: examine this node, or every node of a Slurm job."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.trust import private_files
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.doctor import Check
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import LinksResult
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.script import start_command
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.recipe.load import Loaded, load, plan_for, this_machine
from trainspec_cli.session.slurm.container import folders_read
from trainspec_cli.wings.doctor.doctor_text import render_diagnosis
from trainspec_cli.wings.doctor.examine import Examined, diagnose, examine_here, examine_nodes
from trainspec_cli.wings.doctor.switches import check_switches
from trainspec_cli.wings.doctor.sysfs import read_nics
from trainspec_cli.wings.doctor.tiers import check_fabric

DEFAULT_RECIPE = "recipe=quickstart"
SHARED = Path("runs")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="A recipe or a cluster's keys, such as cluster.devices_per_node=8."),
]


def doctor(arguments: Arguments = None, as_json: AsJson = False) -> int:
    """Check this node: its hardware, its settings, its speed, and the links between its processes.

    Inside a Slurm job (salloc, sbatch --wrap) it checks every node of the job and names the slowest. Exit code 4 where
    something fails.
    """
    given = arguments or []
    named = any(argument.startswith("recipe=") for argument in given)
    loaded = _load([*([] if named else [DEFAULT_RECIPE]), *given])
    diagnosis = diagnose(*_examine(loaded))
    if _nodes() > 1:
        diagnosis = replace(diagnosis, between=(*diagnosis.between, *_fabric(loaded, diagnosis.links)))
    if as_json:
        print(json_text(diagnosis.as_json()))
    else:
        PrintableConsole(highlight=False, soft_wrap=True).show(render_diagnosis(diagnosis))
    return MachineError.exit_code if diagnosis.status == "fail" else 0


def _fabric(loaded: Loaded, links: LinksResult | None) -> Iterator[Check]:
    """The network as Slurm knows it, and as it was measured."""
    devices_per_node = plan_for(loaded, this_machine(loaded.spec)).devices_per_node
    try:
        yield from check_switches(slurm.show_topology(), devices_per_node)
    except MachineError as error:
        yield Check("switches", "ok", f"Slurm shows none: {error.problems[0].message}")
    yield from check_fabric(links.pairs if links else (), devices_per_node, len(read_nics()))


def _nodes() -> int:
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))


def _load(arguments: list[str]) -> Loaded:
    return load([*arguments, *([f"cluster.num_nodes={_nodes()}"] if _nodes() > 1 else [])])


def _examine(loaded: Loaded) -> Examined:
    machine = this_machine(loaded.spec)
    if _nodes() > 1:
        return _examine_job(loaded, machine)
    with tempfile.TemporaryDirectory(prefix="trainspec-doctor-") as folder:
        return examine_here(_plan(loaded, machine), machine, Path(folder))


def _plan(loaded: Loaded, machine: Machine) -> Plan:
    """Plan a run of all devices. GPUs that cannot be used are examined all the same: the examination says why."""
    cluster = loaded.spec.cluster
    if cluster.device == "cpu" or machine.gpu_names or not (machine.gpu_problem or cluster.device == "cuda"):
        return plan_for(loaded, machine).as_one_group
    on_cpu = replace(loaded, spec=replace(loaded.spec, cluster=replace(cluster, device="cpu")))
    return replace(plan_for(on_cpu, machine).as_one_group, device="cuda")


def _examine_job(loaded: Loaded, machine: Machine) -> Examined:
    """Examine from the job's first node, by srun; below ./runs, which the nodes share."""
    plan = _plan(loaded, machine)
    start = start_command(plan, Path.cwd(), [Path.cwd(), *folders_read(plan, None)])
    reach = Reach(slurm.own_address(), tuple(start))
    with private_files():
        SHARED.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=SHARED) as folder:
            return examine_nodes(plan, reach, Path(folder).absolute())
