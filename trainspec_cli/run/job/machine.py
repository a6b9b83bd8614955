"""Describe this node without torch: cores and memory this process may use, GPUs, native bf16."""

from __future__ import annotations

import math
import os
import re
import socket
from pathlib import Path, PurePosixPath

import psutil

from trainspec_cli.core.node import CPUINFO, cpu_flags
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.run.job.gpus import FoundGpus, find_gpus

BF16_CPU_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def detect(*, look_for_gpus: bool = True) -> Machine:
    """Describe this node. `bf16` speaks of the GPUs where there are any, else of the CPU; a run that is to
    stay on the CPU passes `look_for_gpus=False`."""
    found = find_gpus() if look_for_gpus else FoundGpus()
    gpus = found.gpus
    return Machine(
        hostname=socket.gethostname(),
        cpu_cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        bf16=all(gpu.bf16 for gpu in gpus) if gpus else cpu_has_bf16(),
        fp8=bool(gpus) and all(gpu.fp8 for gpu in gpus),
        gpus=gpus,
        gpu_problem=found.problem,
        gpu_notes=found.notes,
    )


def usable_cores() -> int:
    """Cores of the CPU affinity (where the system has one), no more than the container's quota or Slurm's share.

    Not every Slurm binds a task to the cores it was given.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = _cgroup_setting("cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, math.ceil(int(quota) / int(period)))
    share = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if share.isdigit() and "SLURM_STEP_ID" in os.environ:
        cores = min(cores, int(share))
    return max(1, cores)


def usable_memory_bytes() -> int:
    """The node's memory, or the container's limit where that is less."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup_setting("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def count_oom_kills(
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    vmstat: Path = Path("/proc/vmstat"),
) -> int:
    """Return how many processes the kernel has killed so far because memory had run out; 0 where nothing says.

    They are those of this process's control group or of the next one above it that counts them (`memory.events` of
    version 2, `memory.oom_control` of version 1, in which a container may see its own group as the root). The node's
    count, which includes other programs, is taken only where no group has one.
    """
    groups = [line.split(":", 2) for line in _text(membership).splitlines() if line.count(":") >= 2]
    version_1 = next((group for _, controllers, group in groups if "memory" in controllers.split(",")), "")
    version_2 = next((group for number, controllers, group in groups if (number, controllers) == ("0", "")), "")
    files = [group / "memory.events" for group in _from_own_group_up(root, version_2)]
    files += [group / "memory.oom_control" for group in _from_own_group_up(root / "memory", version_1)]
    return next((int(count) for path in (*files, vmstat) for count in _OOM_KILLS.findall(_text(path))), 0)


def _from_own_group_up(root: Path, group: str) -> list[Path]:
    """Return the folders of a control group and of those above it."""
    own = PurePosixPath("/", group)
    return [root / one.relative_to("/") for one in (own, *own.parents)]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _cgroup_setting(
    name: str, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> str:
    """One setting of this process's own control group (version 2), or "" where there is none."""
    try:
        lines = membership.read_text().splitlines()
        group = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        return (root / group.lstrip("/") / name).read_text().strip()
    except (OSError, StopIteration):
        return ""


def cpu_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the CPU multiplies bf16 natively; False where the system does not say (macOS)."""
    return not BF16_CPU_FLAGS.isdisjoint(cpu_flags(cpuinfo))
