"""Checks of this node without torch: its hardware, its settings and the speed of its disk."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import cpu_name
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.results.doctor import DISK, FAULTS, Check, FaultCause
from trainspec_cli.run.job.gpus import find_gpus, opened_nvml
from trainspec_cli.run.job.job import versions
from trainspec_cli.run.job.machine import detect
from trainspec_cli.run.job.node_faults import increased, kernel_lines, read_counters, read_kernel_faults
from trainspec_cli.wings.doctor.sysfs import INFINIBAND, read_nics, sysfs_text

SHM_BYTES = 2**30
"""Minimum size of /dev/shm, through which NCCL and the data loaders communicate. In containers, it is often only 64
MiB."""
OPEN_FILES = 4096
DISK_BYTES = 2**24
SLOW_DISK_BYTES_PER_S = 20e6
LITTLE_SPACE_BYTES = 2**30
LITTLE_MEMORY_BYTES = 2**30
MOSTLY_FREE = 0.8
"""A GPU with less than this fraction of its memory free is treated as in use. The driver and a desktop together use
less than the remaining fraction."""
CLOCK_TOOLS = (("chronyc", "tracking"), ("timedatectl", "show", "--property=NTPSynchronized"))
TOOL_TIMEOUT_S = 5.0
LATELY_S = 3600.0
"""Kernel messages of this many seconds count."""
FAULT_ADVICE: dict[FaultCause, str] = {
    "xid": "reset the GPU or reboot the node; if it happens again, have the GPU replaced",
    "ecc": "reset the GPU, and run dcgmi diag -r 3",
    "row_remap": "reset the GPU; replace it if rows cannot be remapped",
    "nvlink": "run nvidia-smi nvlink --errorcounters; reset the GPU, or have its link checked",
    "thermal": "check the node's fans, inlet temperature and power supply",
    "nic": "check the cable and the switch port: ethtool -S, or perfquery",
    "link_down": "check the cable and the switch port",
    "machine_check": "have the node's memory and processor checked: ras-mc-ctl --errors",
    "storage": "check the disk or the file server: dmesg, smartctl -a",
}


def check_node(folder: Path, device: str, devices: int = 1) -> list[Check]:
    """Return all checks in display order. `folder` is the run folder, and `devices` is the number of devices in the
    node."""
    chips = [*check_chips(device), *(check_gpus() if device == "cuda" else ())]
    chips += check_faults()
    links = [*check_rdma(), *check_nics(devices), *check_links(), *check_clock()]
    python = f"Python {platform.python_version()}, torch {versions().get('torch', 'unknown')}"
    system = [*check_shm(), *check_limits(), *check_disk(folder)]
    return [Check("versions", "ok", python), *chips, *check_memory(), *links, *system]


def check_chips(device: str) -> Iterator[Check]:
    """Check that the driver and torch can use the run's devices."""
    machine = detect(look_for_gpus=device != "cpu")
    for note in machine.gpu_notes:
        yield Check("chips", "warn", note, "list this node's GPUs with nvidia-smi -L or rocm-smi")
    if problem := machine.gpu_problem:
        yield Check("chips", "fail", problem.message, problem.hint)
    elif machine.gpu_names:
        memory = format_bytes(machine.gpu_memory_bytes)
        yield Check("chips", "ok", f"{len(machine.gpu_names)} x {machine.gpu_names[0]}, {memory}; driver {driver()}")
        if len(set(machine.gpu_names)) > 1:
            names = ", ".join(sorted(set(machine.gpu_names)))
            yield Check("chips", "warn", f"the GPUs differ: {names}", "select identical GPUs with CUDA_VISIBLE_DEVICES")
        yield from check_torch(machine)
    elif device == "cuda":
        yield Check("chips", "fail", "no GPU is visible", "check nvidia-smi, and the GPUs that the job requested")
    else:
        memory = format_bytes(machine.memory_bytes)
        yield Check("chips", "ok", f"{machine.cpu_cores} cores of {cpu_name()}, {memory}")


def check_gpus(needed_bytes: float = 0.0) -> Iterator[Check]:
    """Check whether other processes use the GPUs. `needed_bytes` is as in `check_memory`, but per GPU."""
    for number, gpu in enumerate(find_gpus().gpus):
        taken = gpu.memory_bytes - gpu.free_bytes
        found = f"GPU {number} ({gpu.name}): {format_bytes(taken)} of {format_bytes(gpu.memory_bytes)} is in use"
        advice = "find the processes with nvidia-smi, or exclude the GPU with CUDA_VISIBLE_DEVICES"
        if gpu.free_bytes < needed_bytes:
            yield Check("chips", "fail", f"{found}; the run needs {format_bytes(needed_bytes)}", advice)
        elif gpu.free_bytes < MOSTLY_FREE * gpu.memory_bytes:
            yield Check("chips", "warn", found, advice)


def check_faults() -> Iterator[Check]:
    """Check what the kernel and the drivers have reported lately. A node that has failed repeatedly is not used again
    while there is anything."""
    # The counters of NICs and links add up since the node was started, so their values alone mean nothing.
    counters = {key: value for key, value in read_counters().items() if key[0] not in ("nic", "nvlink")}
    seen = set()
    for fault in (*read_kernel_faults(kernel_lines(time.monotonic() - LATELY_S)), *increased({}, counters)):
        if (fault.cause, fault.where) not in seen and fault.is_of_machine:
            seen.add((fault.cause, fault.where))
            yield Check(FAULTS, "warn", fault.text, FAULT_ADVICE[fault.cause])


def check_torch(machine: Machine) -> Iterator[Check]:
    """Check that the installed torch was built for these GPUs and their driver, without importing torch."""
    version, cuda, hip = torch_build()
    amd = any(gpu.vendor == "amd" for gpu in machine.gpus)
    if version and not (hip if amd else cuda):
        wanted = "ROCm" if amd else "CUDA"
        advice = f"install torch for {wanted} (pytorch.org/get-started/locally), or set cluster.device=cpu"
        yield Check("torch", "fail", f"torch {version} was built without {wanted}, so it sees no GPU", advice)
    elif cuda and not amd:
        newest = 0  # unknown requirement or driver
        with suppress(MachineError), opened_nvml() as nvml:
            newest = int(nvml.nvmlSystemGetCudaDriverVersion()) // 1000 if nvml else 0
        needed = int(cuda.partition(".")[0])
        if 0 < newest < needed:
            found = f"torch {version} needs a driver for CUDA {needed}; this driver supports CUDA {newest} at most"
            yield Check("torch", "fail", found, "update NVIDIA's driver, or install a torch for an older CUDA")


def torch_build() -> tuple[str, str, str]:
    """Return the version of the installed torch, and the CUDA and ROCm (HIP) versions that it was built for; "" if
    unknown or absent."""
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.origin or "").parent / "version.py").read_text() if spec else ""
    except OSError:
        text = ""
    found = {
        key: re.search(rf"^{key}\b[^=\n]*= '([^']+)'", text, re.MULTILINE) for key in ("__version__", "cuda", "hip")
    }
    version, cuda, hip = (match[1] if match else "" for match in found.values())
    return version, cuda, hip


def driver() -> str:
    """Return the version of NVIDIA's driver."""
    with suppress(MachineError), opened_nvml() as nvml:
        if nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    try:
        version = Path("/proc/driver/nvidia/version").read_text()
        return str(re.findall(r"Kernel Module\s+(?:for \S+\s+)?(\S+)", version)[0])
    except (OSError, IndexError):
        return "unknown"


def check_memory(needed_bytes: float = 0.0) -> Iterator[Check]:
    """Check the free memory. `needed_bytes` is the run's predicted memory; 0 if unknown."""
    memory = psutil.virtual_memory()
    found = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available"
    advice = "see what uses it (ps aux --sort=-rss), or use less (a smaller batching.micro_batch_size)"
    if memory.available < needed_bytes:
        yield Check("memory", "fail", f"{found}; the run needs {format_bytes(needed_bytes)}", advice)
    elif memory.available < LITTLE_MEMORY_BYTES:
        yield Check("memory", "warn", found, advice)
    else:
        yield Check("memory", "ok", found)


def check_rdma(folder: Path = INFINIBAND) -> Iterator[Check]:
    """Check the RDMA ports. Yield nothing on a node without RDMA, because not every cluster uses it."""
    ports = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
    for port in ports:
        name = f"{port.parents[1].name} port {port.name}"
        state = sysfs_text(port / "state")
        if "ACTIVE" in state:
            yield Check("rdma", "ok", f"{name}: {sysfs_text(port / 'rate')}")
        else:
            yield Check(
                "rdma",
                "warn",
                f"{name} is {state or 'unknown'}",
                f"run ibstat {port.parents[1].name}, and check the cable",
            )


def check_nics(devices: int, folder: Path = INFINIBAND) -> Iterator[Check]:
    """Yield the rate of the RDMA NICs, in total and per device. Yield nothing if there are none."""
    nics = read_nics(folder)
    if not nics:
        return
    total = sum(nic.gbit_per_s or 0.0 for nic in nics)
    numa_nodes = sorted({nic.numa_node for nic in nics if nic.numa_node is not None})
    where = f" on NUMA node{'s' * (len(numa_nodes) > 1)} {', '.join(map(str, numa_nodes))}" if numa_nodes else ""
    found = f"{len(nics)} NIC{'s' * (len(nics) > 1)}{where}, {total:g} Gbit/s in total"
    if len({nic.gbit_per_s for nic in nics}) > 1:
        rates = ", ".join(f"{nic.name} {nic.gbit_per_s:g}" for nic in nics)
        yield Check(
            "nics",
            "warn",
            f"{found}, with different rates: {rates}",
            "traffic striped over these NICs is limited by the slowest one",
        )
    else:
        yield Check("nics", "ok", f"{found}; with {devices} devices, set cluster.nic_gbit_per_s={total / devices:g}")


def check_links() -> Iterator[Check]:
    """Check the network interfaces that are up, except the loopback interface."""
    for name, link in sorted(psutil.net_if_stats().items()):
        if not link.isup or name == "lo" or name.startswith("lo0"):
            continue
        speed = f"{link.speed / 1000:g} Gbit/s" if link.speed > 0 else "speed unknown"
        errors = psutil.net_io_counters(pernic=True).get(name)
        dropped = errors.errin + errors.errout if errors else 0
        if dropped:
            yield Check(
                "link",
                "warn",
                f"{name}: {speed}, {dropped} packet errors",
                f"run ethtool -S {name}, and check the cable",
            )
        else:
            yield Check("link", "ok", f"{name}: {speed}, mtu {link.mtu}")


def check_clock() -> Iterator[Check]:
    """Check whether the clock is synchronised, because `diagnose` compares timestamps from several nodes."""
    for command in CLOCK_TOOLS:
        if shutil.which(command[0]):
            try:
                output = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S).stdout
            except subprocess.TimeoutExpired:
                continue
            if "Leap status     : Normal" in output or "NTPSynchronized=yes" in output:
                yield Check("clock", "ok", f"synchronised ({command[0]})")
                return
    yield Check("clock", "ok", "unknown: no tool reports whether the clock is synchronised")


def check_shm(folder: Path = Path("/dev/shm")) -> Iterator[Check]:
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder)
    if size.free < SHM_BYTES:
        advice = "increase it for the container: --shm-size=16g, or mount a tmpfs on /dev/shm"
        yield Check("/dev/shm", "warn", f"{format_bytes(size.free)} free of {format_bytes(size.total)}", advice)
    else:
        yield Check("/dev/shm", "ok", f"{format_bytes(size.free)} free")


def check_limits() -> Iterator[Check]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < OPEN_FILES:
        yield Check("open files", "warn", f"ulimit -n is {files}", f"run ulimit -n {OPEN_FILES} before the launch")
    else:
        yield Check("open files", "ok", f"ulimit -n is {files}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and INFINIBAND.is_dir():
        found = f"ulimit -l is {format_bytes(locked)}"
        yield Check(
            "locked memory", "warn", found, "RDMA needs locked memory: set memlock to unlimited for Slurm or the user"
        )


def check_disk(folder: Path) -> Iterator[Check]:
    """Check the free space, and the speed of writes that reach the disk (fsync)."""
    free = shutil.disk_usage(folder).free
    if free < LITTLE_SPACE_BYTES:
        yield Check(
            DISK, "fail", f"{format_bytes(free)} free in {folder}", "free up some space, or choose another run.dir"
        )
        return
    speed = measure_disk(folder)
    found = f"writes {format_bytes(int(speed))}/s in {folder}, {format_bytes(free)} free"
    slow = speed < SLOW_DISK_BYTES_PER_S
    advice = "checkpoints will be slow: choose a faster file system with run.dir" if slow else ""
    yield Check(DISK, "warn" if slow else "ok", found, advice)


def measure_disk(folder: Path, read_clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the rate in bytes per second for writing one file of `DISK_BYTES`."""
    block = os.urandom(2**20)
    started = read_clock()
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=folder) as file:
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / max(1e-9, read_clock() - started)
