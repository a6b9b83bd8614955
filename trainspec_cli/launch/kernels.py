"""Which kernels are fastest here: tried once at a run's own shapes, by the processes that the run will have, and cached
as the probe of the machine is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from trainspec_cli.launch.job.job import build_job
from trainspec_cli.launch.job.machine import cpu_model
from trainspec_cli.launch.probing import figures_path, keep_figures, read_figures, run_probe
from trainspec_cli.policy.kernels import judge
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import from_plain, to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.kernels import KernelTable, KernelTrials
from trainspec_cli.spec.results.plan import Plan

PROBE = ("-m", "trainspec_cli.engine.tools.kernel_probe")
LIBRARIES = ("triton", "liger-kernel", "fla-core", "torchao")


def table_path(plan: Plan, machine: Machine) -> Path:
    """The name changes with all that the figures depend on: chip, versions, and what gives the run its shapes."""
    spec = to_plain(plan.spec)
    shapes: dict[str, Any] = {key: spec[key] for key in ("model", "lora", "compile", "precision", "optim")}
    plain = to_plain(plan)
    shapes |= {key: plain[key] for key in ("layout", "micro_batch_size", "device", "offload", "recompute")}
    shapes |= {"seq_len": plan.spec.data.seq_len, "documents": plan.spec.data.masks_documents}
    return figures_path("kernels", plan, machine, {"shapes": shapes, "libraries": library_versions()})


def library_versions() -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_table(path: Path) -> KernelTable | None:
    return read_figures(KernelTable, path)


def measure_kernels(plan: Plan, machine: Machine, on_start: Callable[[], None], *, again: bool = False) -> KernelTable:
    """From the cache, else measured now; `on_start` is told before that takes its time.

    Of a run on several hosts this one measures for all. Raises as `probe_machine`.
    """
    path = table_path(plan, machine)
    cached = None if again else read_table(path)
    if cached is not None:
        return cached
    on_start()
    alone = replace(plan.as_one_group, num_nodes=1)
    with tempfile.TemporaryDirectory(prefix="trainspec-kernels-") as folder:
        job = build_job(alone, Path(folder), machine, worker=PROBE)
        write_json(job.root / "plan.json", to_plain(plan.as_one_group))
        figures = [job.root / f"kernels.rank{rank}.json" for rank in range(alone.world_size)]
        run_probe(job, figures, hint="launch with kernels=default")
        ranks = [from_plain(KernelTrials, read_json(file)) for file in figures]
    calls = {op: described for rank in reversed(ranks) for op, described in rank.calls.items()}
    table = KernelTable(_device(plan, machine), plan.compute, metadata.version("torch"), calls, judge(ranks))
    keep_figures(path, to_plain(table))
    return table


def _device(plan: Plan, machine: Machine) -> str:
    return machine.gpu_names[0] if plan.device == "cuda" and machine.gpu_names else cpu_model() or "CPU"
