"""The measurements before a launch: this machine's probe and its kernels, once and then cached; a step's trace.

The processes and their environment are those that a run will have.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from trainspec_cli import __version__
from trainspec_cli.core.cache import cache_dir, make_cache
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.node import cpu_name
from trainspec_cli.recipe.canonical import canonical_json, from_plain, to_plain
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KernelTable
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.probe import MachineProbe
from trainspec_cli.recipe.results.tools import KernelRequest, ProbeRequest, TraceRequest, TraceResult
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.kernels import judge
from trainspec_cli.run.tools import KERNELS, PROBE, TRACE, one_process, run_tool, torchrun

DISTURBED_HOLDS_S = 86_400.0
"""A probe that other programs disturbed shows what a run gets while they run; they may be gone a day later. With 15
minutes, a machine that is always in use was probed before most of its launches."""
LIBRARIES = ("triton", "liger-kernel", "fla-core", "torchao")
Figures = TypeVar("Figures")


def probe_machine(plan: Plan, machine: Machine, on_start: Callable[[], None]) -> MachineProbe:
    """Return the probe in the cache, else measure now; `on_start` is called before that takes its seconds.

    A probe that other programs have disturbed holds for `DISTURBED_HOLDS_S`. Raises MachineError where it fails,
    Interrupted where a stop was requested.
    """
    path = probe_path(plan, machine)
    cached = read_probe(path)
    if cached is not None and (not cached.is_disturbed or time.time() - path.stat().st_mtime < DISTURBED_HOLDS_S):
        return cached
    on_start()
    probe = run_tool(PROBE, ProbeRequest(plan.compute), torchrun(plan, machine))
    _keep(path, probe)
    return probe


def measure_kernels(plan: Plan, machine: Machine, on_start: Callable[[], None], *, again: bool = False) -> KernelTable:
    """Return the table in the cache, else measure now; `on_start` is called before that takes its time.

    Of a run on several nodes this one measures for all. Raises as `probe_machine`.
    """
    path = table_path(plan, machine)
    cached = None if again else read_table(path)
    if cached is not None:
        return cached
    on_start()
    alone = replace(plan.as_one_group, num_nodes=1)
    ranks = run_tool(KERNELS, KernelRequest(plan.as_one_group), torchrun(alone, machine)).ranks
    calls = {op: described for rank in reversed(ranks) for op, described in rank.calls.items()}
    table = KernelTable(_device(plan, machine), plan.compute, metadata.version("torch"), calls, judge(ranks))
    _keep(path, table)
    return table


def _device(plan: Plan, machine: Machine) -> str:
    return machine.gpu_names[0] if plan.device == "cuda" and machine.gpu_names else cpu_name()


def trace_plan(plan: Plan) -> TraceResult:
    """Trace a step of `plan` without a GPU, and return the counts of the fullest traced rank. Raises MachineError."""
    where = one_process({"OMP_NUM_THREADS": "1"})
    ranks = [run_tool(TRACE, TraceRequest(plan, rank), where) for rank in traced_ranks(plan)]
    return max(ranks, key=lambda traced: traced.peak_memory_bytes)


def traced_ranks(plan: Plan) -> list[int]:
    """Return a rank of the pipeline's first stage, and one of its last: the stages between hold less than one of them.

    Along cp it is the last, whose queries meet every part of the keys.
    """
    layout = plan.layout
    per_stage, along_cp = plan.world_size // layout.pp, (layout.cp - 1) * layout.tp
    return sorted({along_cp, (layout.pp - 1) * per_stage + along_cp})


# The cache of figures


def probe_path(plan: Plan, machine: Machine) -> Path:
    return figures_path("probe", plan, machine, {})


def read_probe(path: Path) -> MachineProbe | None:
    return read_figures(MachineProbe, path)


def known_probe(plan: Plan, machine: Machine) -> MachineProbe | None:
    """Return this machine's probe for such a plan; None where it was not probed."""
    return read_probe(probe_path(plan, machine))


def table_path(plan: Plan, machine: Machine) -> Path:
    """Return a name that also changes with what gives a run its shapes, and with the kernels' libraries."""
    spec = to_plain(plan.spec)
    shapes = {key: spec[key] for key in ("model", "lora", "compile", "precision", "optim")}
    plain = to_plain(plan)
    shapes |= {key: plain[key] for key in ("layout", "micro_batch_size", "device", "offload", "recompute")}
    shapes |= {"seq_len": plan.spec.data.seq_len, "documents": plan.spec.data.masks_documents}
    return figures_path("kernels", plan, machine, {"shapes": shapes, "libraries": library_versions()})


def read_table(path: Path) -> KernelTable | None:
    return read_figures(KernelTable, path)


def library_versions() -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def figures_path(kind: str, plan: Plan, machine: Machine, others: Mapping[str, object]) -> Path:
    """Return a file whose name changes with all that the figures depend on: the machine, versions, and `others`."""
    facts = {
        "machine": asdict(machine),
        "cpu": cpu_name(),
        "processes": plan.devices_per_node,
        "compute": plan.compute,
        "torch": metadata.version("torch"),
        "trainspec": __version__,
        **others,
    }
    name = hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]
    return cache_dir() / "machine" / f"{kind}-{name}.json"


def read_figures(kind: type[Figures], path: Path) -> Figures | None:
    """Return None where there are no figures, or where another version of trainspec has written them."""
    if not path.is_file():
        return None
    try:
        return from_plain(kind, read_json(path))
    except (RecipeError, ValueError):
        return None


def _keep(path: Path, figures: MachineProbe | KernelTable) -> None:
    make_cache()
    write_json(path, to_plain(figures))
