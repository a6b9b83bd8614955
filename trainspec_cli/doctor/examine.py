"""The examination of this node, or of all nodes of a job: their reports, and the links between the processes.

`python -m trainspec_cli.doctor.examine FOLDER cpu|cuda bf16|fp32 DEVICES` examines one node, which has so many devices,
and prints its report, one line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainspec_cli.doctor.checks import check_node
from trainspec_cli.errors import MachineError
from trainspec_cli.launcher.backend.nodes.backend import Examination, Reach
from trainspec_cli.launcher.tools import LINKS, SPEED, on_nodes, run_tool, torchrun
from trainspec_cli.node import node_name
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.doctor import Check, NodeReport
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.tools import Compute, Device, LinksRequest, LinksResult, SpeedRequest, SpeedResult

Examined = tuple[Sequence[NodeReport], LinksResult | None]
"""A report of each node, and the processes' links; None for a single process."""


def examine_here(plan: Plan, machine: Machine, folder: Path) -> Examined:
    """`folder` is on the disk that is measured."""
    report = examine_node(folder, plan.device, plan.compute, plan.devices_per_node)
    measured = plan.world_size > 1 and not _are_unusable(report.checks)
    links = run_tool(LINKS, LinksRequest(plan.device), torchrun(plan, machine)) if measured else None
    return [report], links


def examine_nodes(plan: Plan, reach: Reach, folder: Path) -> Examined:
    """Examine every node of a job. `folder` is on a file system that they share. Raises MachineError.

    The doctor refuses no node: it wants the reports of all.
    """
    reports: list[NodeReport] = []
    examination = Examination(node_command(plan, folder), reports.extend)
    links = run_tool(LINKS, LinksRequest(plan.device), on_nodes(plan, reach, examination), shared=folder)
    return reports, links


def node_command(plan: Plan, folder: Path) -> tuple[str, ...]:
    """Return Python's arguments for the examination of one node; `folder` is where the run is kept."""
    what = (plan.device, plan.compute, str(plan.devices_per_node))
    return ("-m", "trainspec_cli.doctor.examine", str(folder), *what)


def examine_node(folder: Path, device: Device, compute: Compute, devices: int) -> NodeReport:
    checks = check_node(folder, device, devices)
    speed: SpeedResult | None = None
    if _are_unusable(checks):
        return NodeReport(node_name(), time.time(), tuple(checks))
    try:
        speed = run_tool(SPEED, SpeedRequest(device, compute))
    except MachineError as error:
        found = str(error).splitlines()
        advice = "run python -c 'import torch' on that node"
        checks.append(Check("speed", "fail", ": ".join(dict.fromkeys((found[0], found[-1]))), advice))
    return NodeReport(node_name(), time.time(), tuple(checks), speed)


def _are_unusable(checks: Sequence[Check]) -> bool:
    """Return whether no process could compute on the chips, so that measuring them would only fail."""
    return any(check.status == "fail" and check.name in ("chips", "torch") for check in checks)


def main() -> None:
    folder, device, compute, devices = sys.argv[1:]
    report = examine_node(Path(folder), device, compute, int(devices))  # type: ignore[arg-type]  # as in `node_command`
    print(json_text(to_plain(report), indent=None))


if __name__ == "__main__":
    main()
