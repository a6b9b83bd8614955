"""The examination of this host, or of all hosts of a Slurm job: their reports, and the links between the processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trainspec_cli.doctor import host
from trainspec_cli.errors import Interrupted, MachineError, Problem
from trainspec_cli.launch.backend import OpenBackend
from trainspec_cli.launch.backend.local import LocalBackend
from trainspec_cli.launch.backend.nodes.backend import Examination, NodesBackend, Reach, build_nodes_job
from trainspec_cli.launch.failure import tail
from trainspec_cli.launch.job.job import Job, build_job
from trainspec_cli.launch.supervise import supervise
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.plan import Plan

LINKS = ("-m", "trainspec_cli.engine.tools.links")


def examine_here(plan: Plan, machine: Machine, root: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """-> (one report, its processes' links; None for a single process)"""
    reports = [host.examine_host(root, plan.device, plan.compute)]
    if plan.world_size == 1:
        return reports, None
    job = build_job(plan, root, machine, worker=(*LINKS, plan.device))
    return reports, _measure_links(job, None, LocalBackend)


def examine_hosts(plan: Plan, reach: Reach, root: Path) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """-> (a report of each host, links). `root` is on a file system that they share. Raises MachineError."""
    reports: list[dict[str, Any]] = []
    write_json(RunDir(root).plan_json, to_plain(plan))
    examination = Examination(host_command(plan, root), _keep(reports))
    backend = partial(NodesBackend, reach=reach, worker=(*LINKS, plan.device), examination=examination)
    return reports, _measure_links(build_nodes_job(plan, root, reach), plan, backend)


def host_command(plan: Plan, root: Path) -> tuple[str, ...]:
    """Examines one host; `root` is where the run is kept."""
    return (sys.executable, "-m", host.__name__, str(root), plan.device, plan.compute)


def _keep(reports: list[dict[str, Any]]) -> Callable[[Sequence[dict[str, Any]]], None]:
    """The doctor refuses nobody: it wants to hear all."""
    return reports.extend


def _measure_links(job: Job, plan: Plan | None, backend: OpenBackend) -> dict[str, Any]:
    """Raises MachineError where the processes cannot reach one another."""
    ending = supervise(job, plan, backend)
    if ending.stop_requested:
        raise Interrupted("the examination was interrupted", code="interrupted")
    figures = job.root / "links.json"
    if not figures.is_file():
        raise MachineError(_failure(job))
    links: dict[str, Any] = read_json(figures)
    return links


def _failure(job: Job) -> Problem:
    words = [str(read_json(path)["message"]) for path in sorted(job.run.errors_folder.glob("*.json"))]
    logs = [log for log in sorted(job.logs.rglob("*.log")) if log.stat().st_size]
    message = "\n".join(["the processes could not be joined", *words, *(tail(log, 10) for log in logs[:1])]).strip()
    hint = "look at the interface that leads to the other hosts (ip route), at its firewall, and at `links` above"
    return Problem("links_failed", message, hint=hint, environment=True)
