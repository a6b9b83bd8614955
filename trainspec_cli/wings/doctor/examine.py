"""Examine this node or all nodes of a job: collect their reports, measure the links between them, and make a diagnosis.

`python -m trainspec_cli.wings.doctor.examine FOLDER cpu|cuda bf16|fp32 DEVICES` examines one node with DEVICES devices,
and prints its report as one line of JSON."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.node import node_name
from trainspec_cli.core.printable import format_bytes, format_si
from trainspec_cli.planner.run.forecast import checkpoint_bytes
from trainspec_cli.planner.this_machine import is_predictable, least_memory
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.doctor import Check, Diagnosis, NodeReport, Status
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import Compute, Device, LinksRequest, LinksResult, SpeedRequest, SpeedResult
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.backend.nodes.backend import Examination, Reach
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.tools import LINKS, SPEED, on_nodes, run_tool, torchrun
from trainspec_cli.wings.doctor.checks import check_gpus, check_limits, check_memory, check_node, check_shm, check_torch

# Check nodes before the workers start: a single node with quick checks, several nodes with measurements.


def check_nodes(plan: Plan, folder: Path, console: PrintableConsole, force: bool = False) -> Examination | None:
    """Check a single node now. For several nodes, return the examination that each node runs when its agent starts, to
    measure and compare the nodes; without a preflight, only nodes that have failed repeatedly run it. Return None if
    nothing remains to be examined.

    `folder` is the run folder, which may not exist yet. With `force`, predicted memory is not checked. Raises
    MachineError if this node fails a check."""
    of_all = plan.spec.run.preflight
    if plan.num_nodes > 1:
        return Examination(node_command(plan, folder), lambda reports: _check_reports(reports, console), of_all)
    for check in preflight(plan, folder, force=force) if of_all else ():
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
    # Require space for one checkpoint, because a run without a checkpoint has no result. Recommend space for all kept
    # checkpoints plus one, because the oldest is only deleted once the next one is complete.
    spec = plan.spec.checkpoint
    written = len(RunDir(folder).checkpoint_steps())
    to_write = max(1, spec.keep_last + spec.keep_best + 1 - written)
    one = checkpoint_bytes(plan.spec, plan.params)
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    found = f"{format_bytes(free)} free in {existing}; a checkpoint needs {format_bytes(one)}"
    advice = "free up some space, choose another run.dir, or keep fewer checkpoints (checkpoint.keep_last)"
    if free < one:
        checks.append(Check("disk", "fail", found, advice))
    elif free < to_write * one:
        checks.append(
            Check(
                "disk",
                "warn",
                f"{found}; a run needs space for {to_write} checkpoints: it keeps old ones while it writes the next",
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


SPEEDS = {"matmul_flops": ("matmuls", "FLOP/s"), "memory_bytes_per_s": ("memory", "B/s")}
"""The fields of `SpeedResult` that nodes are compared by -> name and unit."""
MIN_SPEED = 0.6
"""A node is rejected if its speed, relative to the median of the other nodes, is below this ratio, because every step
waits for the slowest node."""
WARN_SPEED = 0.85
"""A node gets a warning if its speed, relative to the median of the other nodes, is below this ratio."""
MIN_LINK_RATE = 0.5
"""A pair of nodes gets a warning if its rate, relative to the usual rate, is below this ratio."""
MAX_CLOCK_DIFFERENCE_S = 1.0
"""Sending a report takes less time than this. A larger difference between timestamps means that the clocks differ."""

Examined = tuple[Sequence[NodeReport], LinksResult | None]
"""The report of each node, and the measured links between processes (None for a single process)."""


def examine_here(plan: Plan, machine: Machine, folder: Path) -> Examined:
    """Examine this node. The disk of `folder` is measured."""
    report = examine_node(folder, plan.device, plan.compute, plan.devices_per_node)
    measured = plan.world_size > 1 and not _are_unusable(report.checks)
    links = run_tool(LINKS, LinksRequest(plan.device), torchrun(plan, machine)) if measured else None
    return [report], links


def examine_nodes(plan: Plan, reach: Reach, folder: Path) -> Examined:
    """Examine all nodes of a job; `folder` is on a file system that the nodes share. Raises MachineError.

    No node is rejected here, because the doctor needs all reports."""
    reports: list[NodeReport] = []
    examination = Examination(node_command(plan, folder), reports.extend)
    links = run_tool(LINKS, LinksRequest(plan.device), on_nodes(plan, reach, examination), shared=folder)
    return reports, links


def node_command(plan: Plan, folder: Path) -> tuple[str, ...]:
    """Return the Python arguments for examining one node; `folder` is the run folder."""
    of_node = (plan.device, plan.compute, str(plan.devices_per_node))
    return ("-m", "trainspec_cli.wings.doctor.examine", str(folder), *of_node)


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
    """Return whether no process can use the devices. Measurements would then fail."""
    return any(check.status == "fail" and check.name in ("chips", "torch") for check in checks)


# Compare nodes


def diagnose(reports: Sequence[NodeReport], links: LinksResult | None) -> Diagnosis:
    """Compare nodes: the speed of each node, the slowest node, and the links between nodes."""
    comparisons = compare(reports)
    between = []
    for one in comparisons:
        if one.ratio >= WARN_SPEED:
            between.append(Check("slowest", "ok", one.text))
        else:
            advice = f"see what else runs on {one.host}; check its cooling, power limit and clocks"
            between.append(Check("slowest", "fail" if one.ratio < MIN_SPEED else "warn", one.text, advice))
    for report in reports:
        # `heard_at` is the first node's time when it received the report.
        difference_s = 0.0 if report.heard_at is None else report.time - report.heard_at
        if abs(difference_s) >= MAX_CLOCK_DIFFERENCE_S:
            direction = "ahead of" if difference_s > 0 else "behind"
            found = f"{report.host} is {abs(difference_s):.1f} s {direction} the first node"
            between.append(Check("clock", "warn", found, "synchronise it with chrony or systemd-timesyncd"))
    between += check_measured_links(links)
    hosts = []
    for report in reports:
        speeds = []
        for figure, (name, unit) in SPEEDS.items() if report.speed else ():
            speeds.append(Check(name, "ok", format_si(getattr(report.speed, figure), unit)))
        hosts.append(replace(report, checks=(*report.checks, *speeds)))
    statuses = {check.status for report in hosts for check in report.checks} | {check.status for check in between}
    worst: tuple[Status, ...] = ("fail", "warn")
    # A node whose measurement failed or did not end in time is treated as slower than all measured nodes.
    slowest = [
        report.host for report in reports if any((one.name, one.status) == ("speed", "fail") for one in report.checks)
    ]
    slowest += [one.host for one in comparisons]
    return Diagnosis(
        status=next((status for status in worst if status in statuses), "ok"),
        hosts=tuple(hosts),
        between=tuple(between),
        slowest=slowest[0] if slowest else None,
        links=links,
    )


@dataclass(frozen=True)
class Comparison:
    """The slowest node in one kind of measurement."""

    host: str
    figure: str
    ratio: float
    """The node's speed divided by the median speed of the other nodes."""

    @property
    def text(self) -> str:
        return f"{self.host} is slowest in {SPEEDS[self.figure][0]}: {self.ratio:.0%} of the other nodes' speed"


def compare(reports: Sequence[NodeReport]) -> list[Comparison]:
    """Return the slowest node in each kind of measurement, worst first; empty for a single node."""
    found = []
    for figure in SPEEDS:
        speeds = [(float(getattr(report.speed, figure)), report.host) for report in reports if report.speed]
        if len(speeds) > 1:
            (slowest, host), *others = sorted(speeds)
            found.append(Comparison(host, figure, slowest / median(speed for speed, _ in others)))
    return sorted(found, key=lambda comparison: comparison.ratio)


def refuse_unfit(reports: Sequence[NodeReport]) -> None:
    """Raise MachineError listing all nodes that fail a check or are much slower than the others."""
    problems = []
    for report in reports:
        for check in (check for check in report.checks if check.status == "fail"):
            message = f"{report.host} fails the check {check.name}: {check.found}"
            hint = f"{check.advice}; or start anyway with run.preflight=false"
            problems.append(Problem("unfit_host", message, hint=hint, environment=True))
    for slow in (one for one in compare(reports) if one.ratio < MIN_SPEED):
        message = f"{slow.text}; every step would wait for it"
        hint = (
            f"see what else runs there (trainspec doctor), exclude it (cluster.slurm.exclude={slow.host}), "
            "or start anyway with run.preflight=false"
        )
        problems.append(Problem("slow_host", message, hint=hint, environment=True))
    if problems:
        raise MachineError(problems)


def check_measured_links(links: LinksResult | None) -> list[Check]:
    """Check the rates of all-reduces and of node pairs, and warn about nodes whose links to all other nodes are slow.

    Pairs are compared with the median of the nodes' best rates, not with the median of all pairs. A bad cable slows
    down every pair that includes its node, and these can be most of the pairs, but it does not affect the best rate of
    any other node."""
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
        latency = f"{format_bytes(smallest.bytes)} in {smallest.seconds * 1e3:.2f} ms"
        found = f"{' - '.join(pair.hosts)}: {format_si(pair.bytes_per_s, 'B/s')}, {latency}"
        ratio = pair.bytes_per_s / usual
        if ratio >= MIN_LINK_RATE:
            checks.append(Check("pair", "ok", found))
        else:
            advice = "check the cables and ports of both nodes"
            checks.append(Check("pair", "warn", f"{found}: {ratio:.0%} of the usual rate", advice))
    for host, rate_of_host in best.items():
        if rate_of_host < MIN_LINK_RATE * usual:
            best_rate = format_si(rate_of_host, "B/s")
            found = f"the best link of {host} reaches {best_rate}, {rate_of_host / usual:.0%} of the usual rate"
            checks.append(
                Check("slow link", "warn", found, f"check the cable and port of {host}, and what else uses its link")
            )
    return checks


def main() -> None:
    folder, device, compute, devices = sys.argv[1:]
    report = examine_node(Path(folder), device, compute, int(devices))  # type: ignore[arg-type]  # as in `node_command`
    print(json_text(to_plain(report), indent=None))


if __name__ == "__main__":
    main()
