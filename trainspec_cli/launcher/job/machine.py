"""Describe this node without torch: cores and memory this process may use, GPUs, native bf16."""

from __future__ import annotations

import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from trainspec_cli.node import CPUINFO, cpu_flags
from trainspec_cli.spec.recipe.cluster import Machine

BF16_CPU_FLAGS = frozenset({"amx_bf16", "avx512_bf16"})
BF16_COMPUTE_CAPABILITY = (8, 0)
"""Ampere, the first NVIDIA generation whose tensor cores multiply bf16."""

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)

FP8_COMPUTE_CAPABILITY = (8, 9)
"""Ada, the first whose tensor cores multiply fp8."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    free_bytes: int
    """Memory of the GPU that no other program holds."""


def detect(*, look_for_gpus: bool = True) -> Machine:
    """Describe this node. `bf16` speaks of the GPUs where there are any, else of the CPU; a run that is to
    stay on the CPU passes `look_for_gpus=False`."""
    gpus = visible_gpus() if look_for_gpus else ()
    return Machine(
        hostname=socket.gethostname(),
        cpu_cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        gpu_names=tuple(gpu.name for gpu in gpus),
        gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        bf16=all(gpu.compute_capability >= BF16_COMPUTE_CAPABILITY for gpu in gpus) if gpus else cpu_has_bf16(),
        fp8=bool(gpus) and all(gpu.compute_capability >= FP8_COMPUTE_CAPABILITY for gpu in gpus),
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
    version_1 = _group_of_version_1(membership, "memory")
    files = [group / "memory.events" for group in _from_own_group_up(root, _group_of_version_2(membership))]
    files += [group / "memory.oom_control" for group in _from_own_group_up(root / "memory", version_1)]
    return next((int(count) for path in (*files, vmstat) for count in _OOM_KILLS.findall(_text(path))), 0)


def _from_own_group_up(root: Path, group: str) -> list[Path]:
    """Return the folders of a control group and of those above it."""
    own = PurePosixPath("/", group)
    return [root / one.relative_to("/") for one in (own, *own.parents)]


def _group_of_version_2(membership: Path) -> str:
    return next((line.removeprefix("0::") for line in _text(membership).splitlines() if line.startswith("0::")), "")


def _group_of_version_1(membership: Path, controller: str) -> str:
    for line in _text(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controller in controllers.split(","):
            return group
    return ""


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


def visible_gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs that CUDA would show this process; none without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except (ImportError, OSError):
        return ()
    except pynvml.NVMLError:
        return ()
    try:
        handles = _visible_handles(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return tuple(_describe_gpu(pynvml, handle) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def _visible_handles(nvml: Any, visible: str | None) -> list[Any]:
    """CUDA's rule: numbers or UUIDs in order, ending before the first that names no device."""
    count = nvml.nvmlDeviceGetCount()
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    handles: list[Any] = []
    for entry in filter(None, (part.strip() for part in visible.split(","))):
        try:
            if entry.lstrip("-").isdigit():
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
            else:
                handles.append(_handle_by_uuid(nvml, entry, count))
        except (nvml.NVMLError, ValueError):
            break
    return handles


def _handle_by_uuid(nvml: Any, start: str, count: int) -> Any:
    """A GPU may be named by the start of its UUID, a MIG slice by the whole of it."""
    if start.startswith("MIG-"):
        return nvml.nvmlDeviceGetHandleByUUID(start)
    for index in range(count):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if nvml.nvmlDeviceGetUUID(handle).startswith(start):
            return handle
    raise ValueError(f"no GPU has a UUID that starts with {start}")


def _describe_gpu(nvml: Any, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total),
        compute_capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        free_bytes=int(memory.free),
    )
