"""The probe of this machine: run once, with the processes and the environment that a run will have, then cached."""

from __future__ import annotations

import hashlib
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from trainspec_cli import __version__
from trainspec_cli.corpus.cache import cache_dir, make_cache
from trainspec_cli.errors import Interrupted, MachineError, Problem, RecipeError
from trainspec_cli.launch.backend.local import LocalBackend
from trainspec_cli.launch.failure import tail
from trainspec_cli.launch.job.job import Job, build_job
from trainspec_cli.launch.job.machine import cpu_model
from trainspec_cli.launch.supervise import supervise
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import canonical_json, from_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import MachineProbe

PROBE = ("-m", "trainspec_cli.engine.tools.probe")
DISTURBED_HOLDS_S = 900.0
"""A probe that other programs disturbed tells what a run gets beside them; they may be gone later."""
Figures = TypeVar("Figures")


def probe_path(plan: Plan, machine: Machine) -> Path:
    """The name changes with all that the figures depend on."""
    return figures_path("probe", plan, machine, {})


def figures_path(kind: str, plan: Plan, machine: Machine, others: dict[str, Any]) -> Path:
    """Of figures of this machine, that depend on `others` besides."""
    facts = {
        "machine": asdict(machine),
        "cpu": cpu_model() or platform.processor(),
        "processes": plan.devices_per_node,
        "compute": plan.compute,
        "torch": version("torch"),
        "trainspec": __version__,
        **others,
    }
    name = hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]
    return cache_dir() / "machine" / f"{kind}-{name}.json"


def read_probe(path: Path) -> MachineProbe | None:
    return read_figures(MachineProbe, path)


def read_figures(kind: type[Figures], path: Path) -> Figures | None:
    """None where there are none, or where another version of trainspec has written them."""
    if not path.is_file():
        return None
    try:
        return from_plain(kind, read_json(path))
    except (RecipeError, ValueError):
        return None


def keep_figures(path: Path, told: Any) -> None:
    make_cache()
    write_json(path, told)


def probe_machine(plan: Plan, machine: Machine, on_start: Callable[[], None]) -> MachineProbe:
    """From the cache, else measured now; `on_start` is told before that takes its seconds.

    A probe that other programs have disturbed holds for `DISTURBED_HOLDS_S`.

    Raises MachineError where it fails, Interrupted where a stop was asked for.
    """
    path = probe_path(plan, machine)
    cached = read_probe(path)
    if cached is not None and (not cached.is_disturbed or time.time() - path.stat().st_mtime < DISTURBED_HOLDS_S):
        return cached
    on_start()
    with tempfile.TemporaryDirectory(prefix="trainspec-probe-") as folder:
        job = build_job(plan, Path(folder), machine, worker=(*PROBE, plan.compute))
        figures = job.root / "probe.json"
        run_probe(job, [figures], hint="launch with --force to train without a prediction")
        told = read_json(figures)
    probe = from_plain(MachineProbe, told)
    keep_figures(path, told)
    return probe


def run_probe(job: Job, figures: Sequence[Path], hint: str) -> None:
    """Until it has left its figures. Raises as `probe_machine`."""
    ending = supervise(job, None, LocalBackend)
    if ending.stop_requested:
        raise Interrupted("the probe of this machine was interrupted", code="interrupted")
    if ending.exit_code != 0 or not all(path.is_file() for path in figures):
        raise MachineError(_failure(job, hint))


def _failure(job: Job, hint: str) -> Problem:
    logs = sorted(job.logs.rglob("stderr.log")) or [job.torchrun_log]
    return Problem(
        code="probe_failed",
        message=f"the probe of this machine failed\n\n{tail(logs[0], 10)}",
        hint=hint,
        environment=True,
    )
