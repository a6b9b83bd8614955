"""Describe this node without torch: the cores and memory available to this process, GPUs, native bf16."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.node import CPUINFO, cpu_flags
from trainspec_cli.core.printable import on_one_line
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.blueprint import Setting
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.gpus import FoundGpus, find_gpus

# avx512_bf16 alone does not make bf16 faster: converting numbers to bf16 costs more time than the faster matmuls save.
# With it, the quickstart takes 1.5 times the processor time of fp32 (measured on a processor with AMX, with oneDNN
# limited to AVX512_CORE_BF16).
BF16_CPU_FLAG = "amx_bf16"

_OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def detect(*, look_for_gpus: bool = True) -> Machine:
    """Describe this node. `bf16` refers to the GPUs if the node has any, otherwise to the CPU. For a run that stays on
    the CPU, pass `look_for_gpus=False`."""
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
    """Return the number of cores in the CPU affinity (if the system has one), limited by the container's quota or
    Slurm's allocation, because some Slurm installations do not bind a task to its cores."""
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
    """Return the node's memory, or the container's limit if that is lower."""
    total = int(psutil.virtual_memory().total)
    limit = _cgroup_setting("memory.max")
    return min(total, int(limit)) if limit.isdigit() else total


def count_oom_kills(
    root: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
    vmstat: Path = Path("/proc/vmstat"),
) -> int:
    """Return the number of processes that the kernel has killed so far because memory ran out; 0 if that is unknown.

    The count belongs to this process's control group, or to its nearest ancestor that has one (`memory.events` in
    version 2, `memory.oom_control` in version 1, where a container may see its own group as the root). The node's
    count, which includes other programs, is used only if no group has one."""
    groups = [line.split(":", 2) for line in _text(membership).splitlines() if line.count(":") >= 2]
    version_1 = next((group for _, controllers, group in groups if "memory" in controllers.split(",")), "")
    version_2 = next((group for number, controllers, group in groups if (number, controllers) == ("0", "")), "")
    files = [group / "memory.events" for group in _from_own_group_up(root, version_2)]
    files += [group / "memory.oom_control" for group in _from_own_group_up(root / "memory", version_1)]
    return next((int(count) for path in (*files, vmstat) for count in _OOM_KILLS.findall(_text(path))), 0)


def _from_own_group_up(root: Path, group: str) -> list[Path]:
    """Return the folders of a control group and of its ancestors."""
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
    """Return one setting of this process's own control group (version 2), or ""."""
    try:
        lines = membership.read_text().splitlines()
        group = next(line.removeprefix("0::") for line in lines if line.startswith("0::"))
        return (root / group.lstrip("/") / name).read_text().strip()
    except (OSError, StopIteration):
        return ""


def cpu_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the CPU multiplies bf16 natively; False if the system does not report it (macOS)."""
    return BF16_CPU_FLAG in cpu_flags(cpuinfo)


# One node's place in a multi-node job: its number, the first node's address, and this node's address as seen from the
# first node.


BACKLOG = 1024
SPARE_DESCRIPTORS = 512


@dataclass(frozen=True)
class NodePlace:
    node: int
    """Node 0 runs the supervisor and the rendezvous server."""
    num_nodes: int
    head: str
    """The first node's name or address."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens only at this node's address `host`. Raises MachineError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        message = f"{socket.gethostname()} cannot listen at {host or 'any address'}:{port}: {error.strerror or error}"
        hint = "choose a port that is free"
        raise MachineError(Problem("cannot_listen", message, hint=hint, environment=True)) from error


def allow_connections(connections: int) -> None:
    """Raise the limit on open files, as far as the system allows, to make room for this many connections in addition to
    the files that are usually open."""
    wanted = connections + SPARE_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while soft != resource.RLIM_INFINITY and soft < allowed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            break
        except (ValueError, OSError):  # macOS accepts a lower limit than it reports
            allowed //= 2


def listening_address(head: str) -> str:
    """Return the address at which this node, the first one, listens for the others: the address of the job's network
    interface. If the node's name resolves to a loopback address here (as in many /etc/hosts) but to another address
    elsewhere, return "", which means every interface."""
    address = own_address(head)
    named = head != "localhost" and not _is_address(head)
    return "" if named and ipaddress.ip_address(address).is_loopback else address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def own_address(head: str) -> str:
    """Return this node's address on the route to `head`; nothing is sent. Raises MachineError if there is no route."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as way:
            way.connect(address)
            return str(way.getsockname()[0])
    except OSError as error:
        message = f"{socket.gethostname()} has no route to the first node, {head}: {error.strerror or error}"
        hint = (
            f"check that its name resolves on this node (getent hosts {head}) and that the network is up (ip address)"
        )
        raise MachineError(Problem("no_route", message, hint=hint, environment=True)) from error


def interface_of(address: str) -> str | None:
    """Return the network interface that has `address`."""
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, held in interfaces if any(entry.address == address for entry in held)), None)


# Write a communication blueprint to the run folder and the workers' environment, each line with its reason and source.


TUNER_FILE = "NCCL_TUNER_CONFIG_FILE"
EXAMPLE_TUNER = "NVIDIA/nccl, ext-tuner/example/README.md"
TUNER_COLUMNS = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
PROTOCOL = "simple"
"""The example tuner's default protocol. Every row of the table states it, because only the algorithm should change."""


def communication_settings(plan: Plan, run: RunDir) -> tuple[Setting, ...]:
    """Return the environment variables that the plan's blueprint sets, including the path of the tuner's table if there
    is one."""
    if plan.blueprint is None:
        return ()
    table: tuple[Setting, ...] = ()
    if plan.blueprint.tuner and plan.spec.cluster.fabric.nccl_tuner:
        reason = "cluster.fabric.nccl_tuner: the planned algorithm for each size"
        table = (Setting(TUNER_FILE, str(run.nccl_tuner_csv), reason, EXAMPLE_TUNER),)
    return (*plan.blueprint.settings, *table)


def communication_environment(plan: Plan, run: RunDir) -> Mapping[str, str]:
    """Return the settings as environment variables; the user's own settings take precedence."""
    settings = communication_settings(plan, run)
    return {setting.name: setting.value for setting in settings if setting.name not in os.environ}


def write_communication(plan: Plan, run: RunDir) -> None:
    """Write the settings, and the tuner's table if it has rows."""
    if plan.blueprint is None:
        return
    if lines := describe_communication(plan, run):
        write_text(run.nccl_env, "\n".join(lines) + "\n")
    if plan.blueprint.tuner:
        about = (
            f"For NCCL's example tuner plugin ({EXAMPLE_TUNER}), which forces ring and {PROTOCOL} where no row matches."
        )
        lines = [f"# {about}", f"# {TUNER_COLUMNS}"]
        for row in plan.blueprint.tuner:
            size = f"{row.min_bytes},{row.max_bytes}"
            figures = f"{row.collective},{size},{row.algorithm},{PROTOCOL},-1,{row.nodes},{row.ranks},-1,-1"
            lines += [f"# {row.reason}", figures]
        write_text(run.nccl_tuner_csv, "\n".join(lines) + "\n")


def describe_communication(plan: Plan, run: RunDir) -> list[str]:
    """Return each setting as an assignment, preceded by a comment with its reason and source. If nothing is set, return
    the reason; for a run without NCCL between nodes, return no lines."""
    settings = communication_settings(plan, run)
    if settings:
        lines = ["# Set for the workers of this run; variables that you have set yourself stay unchanged."]
        for setting in settings:
            lines += [f"# {setting.reason} ({setting.source})", f"{setting.name}={on_one_line(setting.value)}"]
        return lines
    chip = plan.spec.cluster.accelerator
    if plan.blueprint is None or plan.device != "cuda" or plan.num_nodes == 1 or (chip and chip.vendor != "nvidia"):
        return []
    wiring = plan.spec.cluster.fabric.nic_wiring
    why = f"cluster.fabric.nic_wiring is {'null' if wiring is None else wiring}"
    return [f"# No NCCL variable is set for the workers of this run: {why}."]
