"""The examination of this node, or of all nodes of a job: their reports, the links between them, and the diagnosis.

`python -m trainspec_cli.wings.doctor.examine FOLDER cpu|cuda bf16|fp32 DEVICES` examines one node with this many
devices, and prints its report, one line of JSON.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.node import node_name
from trainspec_cli.core.printable import format_bytes, format_si
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.doctor import Check, Diagnosis, NodeReport, Status
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import Compute, Device, LinksRequest, LinksResult, SpeedRequest, SpeedResult
from trainspec_cli.run.backend.nodes.backend import Examination, Reach
from trainspec_cli.run.tools import LINKS, SPEED, on_nodes, run_tool, torchrun
from trainspec_cli.wings.doctor.checks import check_node

SPEEDS = {"matmul_flops": ("matrix products", "FLOP/s"), "memory_bytes_per_s": ("memory", "B/s")}
"""Figures of `SpeedResult` that nodes are compared by -> their names and units."""
FAR_BELOW = 0.6
"""A node with less than this part of the others' median speed is refused: every step waits for the slowest."""
BELOW = 0.85
"""A node with less than this part of it is warned of."""
SLOW_LINK = 0.5
"""A pair of nodes with less than this part of the usual rate is warned of."""
CLOCK_APART_S = 1.0
"""A report is on its way for less than this."""

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
    return ("-m", "trainspec_cli.wings.doctor.examine", str(folder), *what)


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


# Nodes side by side


def diagnose(reports: Sequence[NodeReport], links: LinksResult | None) -> Diagnosis:
    """Return nodes side by side: what each can do, the slowest, and the links between them."""
    comparisons = compare(reports)
    between = []
    for one in comparisons:
        if one.ratio >= BELOW:
            between.append(Check("slowest", "ok", one.sentence))
        else:
            advice = f"see what else runs on {one.host}; its cooling, power limit and clocks"
            between.append(Check("slowest", "fail" if one.ratio < FAR_BELOW else "warn", one.sentence, advice))
    for report in reports:
        # The first node noted when the report came.
        apart_s = 0.0 if report.heard_at is None else report.time - report.heard_at
        if abs(apart_s) >= CLOCK_APART_S:
            found = f"{report.host} is {abs(apart_s):.1f} s {'ahead of' if apart_s > 0 else 'behind'} the first node"
            between.append(Check("clock", "warn", found, "let chrony or systemd-timesyncd keep it"))
    between += judge_links(links)
    hosts = []
    for report in reports:
        speeds = []
        for figure, (name, unit) in SPEEDS.items() if report.speed else ():
            speeds.append(Check(name, "ok", format_si(getattr(report.speed, figure), unit)))
        hosts.append(replace(report, checks=(*report.checks, *speeds)))
    statuses = {check.status for report in hosts for check in report.checks} | {check.status for check in between}
    worst: tuple[Status, ...] = ("fail", "warn")
    return Diagnosis(
        status=next((status for status in worst if status in statuses), "ok"),
        hosts=tuple(hosts),
        between=tuple(between),
        slowest=comparisons[0].host if comparisons else None,
        links=links,
    )


@dataclass(frozen=True)
class Comparison:
    """The slowest node by one figure."""

    host: str
    figure: str
    ratio: float
    """Its speed over the median of the others."""

    @property
    def sentence(self) -> str:
        return f"{self.host} is slowest at {SPEEDS[self.figure][0]}: {self.ratio:.0%} of what the others do"


def compare(reports: Sequence[NodeReport]) -> list[Comparison]:
    """Return the slowest node by each figure, the worst first; empty for one node."""
    found = []
    for figure in SPEEDS:
        speeds = [(float(getattr(report.speed, figure)), report.host) for report in reports if report.speed]
        if len(speeds) > 1:
            (slowest, host), *others = sorted(speeds)
            found.append(Comparison(host, figure, slowest / median(speed for speed, _ in others)))
    return sorted(found, key=lambda comparison: comparison.ratio)


def refuse_unfit(reports: Sequence[NodeReport]) -> None:
    """Raises MachineError with every node that fails a check or falls far below the others."""
    problems = []
    for report in reports:
        for check in (check for check in report.checks if check.status == "fail"):
            message = f"{report.host} is not fit: {check.name}: {check.found}"
            hint = f"{check.advice}; or start all the same with run.preflight=false"
            problems.append(Problem("unfit_host", message, hint=hint, environment=True))
    for slow in (one for one in compare(reports) if one.ratio < FAR_BELOW):
        message = f"{slow.sentence}, and every step would wait for it"
        hint = (
            f"see what else runs there (trainspec doctor), leave it out (cluster.slurm.exclude={slow.host}), "
            "or start all the same with run.preflight=false"
        )
        problems.append(Problem("slow_host", message, hint=hint, environment=True))
    if problems:
        raise MachineError(problems)


def judge_links(links: LinksResult | None) -> list[Check]:
    """Return the all-reduce's rates, each pair's, and the nodes that reach no other at the usual rate.

    A pair is judged against the median of the nodes' own best: one bad cable slows all pairs of its node, the half of
    them or more where nodes are few, and no other node's best.
    """
    if links is None:
        return []
    checks = []
    for rate in links.all_reduce:
        found = f"{format_bytes(rate.bytes)} in {rate.seconds * 1e3:.2f} ms, {format_si(rate.bus_bytes_per_s, 'B/s')}"
        checks.append(Check("all-reduce", "ok", found))
    best: dict[str, float] = {}
    for pair in links.pairs:
        for host in pair.hosts:
            best[host] = max(best.get(host, 0.0), pair.bytes_per_s)
    usual = median(best.values()) if best else 0.0
    for pair in links.pairs:
        smallest = pair.sizes[0]
        brief = f"{format_bytes(smallest.bytes)} in {smallest.seconds * 1e3:.2f} ms"
        found = f"{' - '.join(pair.hosts)}: {format_si(pair.bytes_per_s, 'B/s')}, {brief}"
        ratio = pair.bytes_per_s / usual
        if ratio >= SLOW_LINK:
            checks.append(Check("pair", "ok", found))
        else:
            advice = "check the cables and ports of both"
            checks.append(Check("pair", "warn", f"{found}: {ratio:.0%} of the usual", advice))
    for host, rate_of_host in best.items():
        if rate_of_host < SLOW_LINK * usual:
            reached = format_si(rate_of_host, "B/s")
            found = f"{host} reaches nobody at more than {reached}, {rate_of_host / usual:.0%} of the usual"
            checks.append(
                Check("slow link", "warn", found, f"check {host}'s cable and port, and what else uses its link")
            )
    return checks


def main() -> None:
    folder, device, compute, devices = sys.argv[1:]
    report = examine_node(Path(folder), device, compute, int(devices))  # type: ignore[arg-type]  # as in `node_command`
    print(json_text(to_plain(report), indent=None))


if __name__ == "__main__":
    main()
