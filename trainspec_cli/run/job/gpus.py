"""The GPUs visible to a process on this node, as reported by their drivers: NVIDIA's driver through NVML, AMD's through
amdsmi or /sys.

There is no silent fallback to the CPU. A run on `device: auto` or `cuda` is rejected, with advice, if a driver does not
answer, a GPU is lost, the device selection names no valid device, or trainspec does not run on the accelerator."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.recipe.keys.cluster import Gpu

SYS = Path("/sys")
DEV = Path("/dev")

CPU_HINT = "or set cluster.device=cpu"
NVLINK_GB_PER_S = {1: 20.0, 2: 25.0, 3: 25.0, 4: 25.0, 5: 50.0}
"""Maps an NVLink generation to the bandwidth of one link in one direction, in GB/s (NVIDIA's architecture papers)."""
HIDING = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES (and of HIP_... and ROCR_...) that hide all GPUs."""
MOST_NVLINKS = 18
WITH_64_CORES = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))
"""Compute capabilities whose multiprocessors have 64 fp32 cores; all others have 128 (CUDA programming guide)."""
PCIE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Maps a PCIe generation to the bandwidth of one lane in one direction, in GB/s."""
AMD_VENDOR = 0x1002
AMD_NAMES = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""Maps a PCI device to its name (from libdrm's amdgpu.ids), because /sys has no names."""
UNTESTED_AMD = "trainspec has never run on an AMD GPU: this path is based only on ROCm's documentation"
OTHER_VENDORS = {"0x1da3": "Habana Gaudi", "0x1ae0": "Google TPU", "0x1d0f": "AWS Neuron"}
"""PCI vendors of accelerators in /sys/class/accel. trainspec can plan for them, but cannot run on them."""
INTEL_MAX = frozenset({"0x0bd4", "0x0bd5", "0x0bd6", "0x0bd7", "0x0bd8", "0x0bd9", "0x0bda", "0x0bdb"})
"""PCI devices in the Intel Data Center GPU Max series."""


@dataclass(frozen=True)
class FoundGpus:
    gpus: tuple[Gpu, ...] = ()
    problem: Problem | None = None
    """Why the GPUs of this node cannot be used. If set, `gpus` is empty."""
    notes: tuple[str, ...] = ()
    """Information for the user about conditions that do not stop the run."""


def _unusable(message: str, hint: str) -> MachineError:
    return MachineError(Problem("no_gpu", message, "cluster.device", f"{hint}; {CPU_HINT}", environment=True))


def find_gpus(sys: Path = SYS, dev: Path = DEV) -> FoundGpus:
    """Return the GPUs that CUDA or ROCm would show to this process, in the same order."""
    try:
        for look in (_nvidia_gpus, _amd_gpus):
            found = look(sys, dev)
            if found.gpus or found.notes:
                return found
        # A node with an accelerator that trainspec does not support must not be mistaken for one without accelerators.
        vendors = {_text(one / "device/vendor") for one in (sys / "class/accel").glob("accel*")}
        names = [name for vendor, name in OTHER_VENDORS.items() if vendor in vendors]
        if not names and (dev / "neuron0").exists():
            names.append("AWS Neuron")
        pci = list((sys / "bus/pci/devices").glob("*"))
        if not names and any(_text(one / "vendor") == "0x8086" and _text(one / "device") in INTEL_MAX for one in pci):
            names.append("Intel Data Center GPU Max")
        if names:
            message = f"this node has accelerators ({names[0]}) on which trainspec does not run"
            raise _unusable(
                message, "trainspec plans such clusters (trainspec list shows them), and runs on NVIDIA and AMD"
            )
    except MachineError as error:
        return FoundGpus(problem=error.problems[0])
    return FoundGpus()


# NVIDIA


@contextmanager
def opened_nvml(sys: Path = SYS) -> Iterator[Any]:
    """Yield NVML (the pynvml module), initialised; None on a node without an NVIDIA driver. Raises MachineError if an
    installed driver does not answer."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        missing = error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        pci = (sys / "bus/pci/devices").glob("*")
        has_gpu = any(_text(one / "vendor") == "0x10de" and _text(one / "class").startswith("0x03") for one in pci)
        unused = error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED and not has_gpu
        if not missing and not unused:
            raise _not_answering("NVIDIA's driver", error) from error
        yield None
        return
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise _not_answering("NVIDIA's driver", error) from error
    finally:
        pynvml.nvmlShutdown()


def _nvidia_gpus(sys: Path, dev: Path) -> FoundGpus:
    try:
        with opened_nvml(sys) as nvml:
            if nvml is not None:
                chosen, notes = _chosen(nvml, nvml.nvmlDeviceGetCount())
                gpus = []
                for index, handle in chosen:
                    try:
                        gpus.append(_describe(nvml, handle))
                    except nvml.NVMLError as error:
                        others = [other for other, _ in chosen if other != index]
                        raise _not_answering(f"GPU {index}", error, others) from error
                return FoundGpus(tuple(gpus), notes=notes)
    except MachineError:
        if os.environ.get("CUDA_VISIBLE_DEVICES") not in HIDING:
            raise
        return FoundGpus(notes=("CUDA_VISIBLE_DEVICES hides this node's GPUs, whose driver does not answer",))
    if (dev / "nvidiactl").exists():
        message = "this node has an NVIDIA driver (/dev/nvidiactl), but its library NVML (libnvidia-ml.so.1) is missing"
        raise _unusable(message, "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    return FoundGpus()


def _not_answering(what: str, error: Any, others: Sequence[int] = ()) -> MachineError:
    """Return the error for a GPU or driver that does not answer. `error`: error from NVML. `others`: the remaining
    GPUs."""
    by_code = {
        4: "let this user read /dev/nvidia* (with the container's --gpus, or in the group that owns the devices)",
        9: "load the driver (sudo modprobe nvidia), or reinstall it after a kernel update",
        15: "the GPU fell off the bus: check dmesg | grep -i xid, then reset the GPU or reboot the node",
        16: "reset the GPU (sudo nvidia-smi --gpu-reset), or reboot the node",
        18: "the driver was updated while its kernel module stayed loaded: reboot, or reload the module",
    }
    hint = by_code.get(error.value, "nvidia-smi shows whether the driver works")
    if others:
        hint += f"; CUDA_VISIBLE_DEVICES={','.join(map(str, others))} excludes it"
    return _unusable(f"{what} does not answer: {error} (NVML error {error.value})", hint)


def _chosen(nvml: Any, count: int) -> tuple[list[tuple[int, Any]], tuple[str, ...]]:
    """Return the number and handle of each GPU that CUDA shows, and notes on the GPUs that it leaves out.

    CUDA's rule: numbers or UUIDs in order, up to the first that does not name a device. On a partitioned GPU (MIG), a
    process sees only one slice, the first in the list, and no full GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    notes: list[str] = []
    if visible is None:
        entries = [str(index) for index in range(count)]
    else:
        entries = [part.strip() for part in visible.split(",") if part.strip()]
        if count and visible.strip() in HIDING:
            return [], (f"CUDA_VISIBLE_DEVICES={visible!r} hides the {count} GPUs of this node",)
        if len(set(entries)) < len(entries):
            message = f"CUDA_VISIBLE_DEVICES={visible} names a GPU twice, so CUDA shows none"
            raise _unusable(message, "name each once, or unset CUDA_VISIBLE_DEVICES")
    chosen: list[tuple[int, Any]] = []
    for place, entry in enumerate(entries):
        named = _named(nvml, entry, count)
        if named is None and not chosen and count:
            message = f"CUDA_VISIBLE_DEVICES={visible}: {entry} names none of the {count} GPUs of this node"
            raise _unusable(message, "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi -L lists")
        if named is None:
            ignored = ",".join(entries[place:])
            notes.append(
                f"CUDA_VISIBLE_DEVICES: {entry} names no GPU, so CUDA ignores it and all entries after it ({ignored})"
            )
            break
        chosen.append(named)
    return _with_slices(nvml, chosen, notes), tuple(notes)


def _named(nvml: Any, entry: str, count: int) -> tuple[int, Any] | None:
    """Return the GPU with this index or UUID prefix, or the MIG slice with this full UUID; None if no GPU matches.
    Raises MachineError if the GPU with this number does not answer."""
    if entry.lstrip("-").isdigit():
        if not 0 <= int(entry) < count:
            return None
        try:
            return int(entry), nvml.nvmlDeviceGetHandleByIndex(int(entry))
        except nvml.NVMLError as error:
            others = [other for other in range(count) if other != int(entry)]
            raise _not_answering(f"GPU {entry}", error, others) from error
    if entry.startswith("MIG-"):
        try:
            return 0, nvml.nvmlDeviceGetHandleByUUID(entry)
        except nvml.NVMLError:
            return None
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            if nvml.nvmlDeviceGetUUID(handle).startswith(entry):
                return index, handle
        except nvml.NVMLError:
            continue  # a lost GPU that was not selected does not matter
    return None


def _with_slices(nvml: Any, chosen: list[tuple[int, Any]], notes: list[str]) -> list[tuple[int, Any]]:
    """Return the only MIG slice that CUDA shows if a slice or a partitioned GPU was selected; otherwise return the
    GPUs."""
    divided = False
    for index, handle in chosen:
        if _is_slice(nvml, handle):
            if len(chosen) > 1:
                notes.append("CUDA shows a process only the first of the MIG slices that are named")
            return [(index, handle)]
        if _ask(nvml, "nvmlDeviceGetMigMode", handle, default=(0, 0))[0]:
            divided = True
            if (first := _ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, 0)) is not None:
                notes.append("this node's GPUs are partitioned (MIG), and CUDA shows a process only the first slice")
                return [(index, first)]
    if divided:
        message = "MIG is enabled, but no slice exists, so CUDA shows no GPU"
        raise _unusable(
            message, "create slices (sudo nvidia-smi mig -cgi PROFILE -C), or disable MIG (sudo nvidia-smi -mig 0)"
        )
    return chosen


def _is_slice(nvml: Any, handle: Any) -> bool:
    return bool(_ask(nvml, "nvmlDeviceIsMigDeviceHandle", handle, default=0))


def _ask(nvml: Any, query: str, *arguments: Any, default: Any = None) -> Any:
    """Return NVML's answer, or `default` if this driver, module or GPU does not provide one."""
    try:
        return getattr(nvml, query)(*arguments)
    except (AttributeError, nvml.NVMLError):
        return default


def _describe(nvml: Any, handle: Any) -> Gpu:
    """Describe a GPU or a slice. Raises NVMLError if NVML reports neither its name nor its memory."""
    name = nvml.nvmlDeviceGetName(handle)
    capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        memory_bytes = int(memory.total)
        free_bytes = int(memory.free)
    except nvml.NVMLError as error:
        if error.value != 3:  # not supported, because the GPU uses the system's memory (GB10, Jetson)
            raise
        system = psutil.virtual_memory()
        memory_bytes = int(system.total)
        free_bytes = int(system.available)
    whole = handle
    processors = 0
    part = 1.0
    if _is_slice(nvml, handle):
        whole = _ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle, default=handle)
        attributes = _ask(nvml, "nvmlDeviceGetAttributes_v2", handle)
        processors = int(attributes.multiprocessorCount) if attributes else 0
        of_whole = _ask(nvml, "nvmlDeviceGetMemoryInfo", whole)
        part = memory_bytes / of_whole.total if of_whole else 1.0
    elif cores := _ask(nvml, "nvmlDeviceGetNumGpuCores", handle):
        processors = cores // (64 if tuple(capability) in WITH_64_CORES else 128)
    bus_bits = _ask(nvml, "nvmlDeviceGetMemoryBusWidth", whole, default=0)
    memory_mhz = _ask(nvml, "nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_MEM, default=0)
    lanes = _ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", whole, default=0)
    generation = _ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", whole, default=0)
    # Add up the rates of the links that are up: 0 if all are down, None if the driver reports no links.
    states = []
    for link in range(MOST_NVLINKS):
        state = _ask(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        if state is None:
            break
        states.append(int(state))
    if not states:
        nvlink_gb_per_s = None
    else:
        version = _ask(nvml, "nvmlDeviceGetNvLinkVersion", handle, 0, default=1)
        nvlink_gb_per_s = sum(states) * NVLINK_GB_PER_S.get(int(version), NVLINK_GB_PER_S[max(NVLINK_GB_PER_S)])
    return Gpu(
        name=name,
        memory_bytes=memory_bytes,
        compute_capability=tuple(capability),
        free_bytes=free_bytes,
        processors=processors,
        clock_mhz=_ask(nvml, "nvmlDeviceGetMaxClockInfo", whole, nvml.NVML_CLOCK_SM, default=0),
        memory_gb_per_s=2 * memory_mhz * 1e6 * bus_bits / 8 / 1e9 * part,
        power_w=_ask(nvml, "nvmlDeviceGetPowerManagementLimit", whole, default=0) / 1000,
        nvlink_gb_per_s=nvlink_gb_per_s,
        pcie_gb_per_s=lanes * PCIE_GB_PER_S.get(min(generation, max(PCIE_GB_PER_S)), 0.0),
    )


# AMD


def _amd_gpus(sys: Path, dev: Path) -> FoundGpus:
    found = _by_amdsmi(sys)
    if found is None:
        found = _by_kfd(sys)
    if not found:
        return FoundGpus()
    shown = found
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        visible = os.environ.get(variable)
        if visible is None and variable.startswith("HIP"):
            variable = "CUDA_VISIBLE_DEVICES"
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            continue
        entries = [part.strip() for part in visible.split(",") if part.strip()]
        if visible.strip() in HIDING:
            return FoundGpus(notes=(f"{variable}={visible!r} hides the {len(found)} GPUs of this node",))
        # Entries are numbers or UUIDs (`GPU-<unique id>`).
        said = f"{variable}={visible}"
        chosen = []
        for entry in entries:
            if entry.isdigit():
                named = shown[int(entry)] if int(entry) < len(shown) else None
            else:
                named = next((gpu for gpu in shown if entry.lower() in (gpu[0], f"gpu-{gpu[0]}")), None)
            if named is None:
                message = f"{said}: {entry} names none of the {len(shown)} AMD GPUs of this node"
                raise _unusable(message, "unset the variable, or name GPUs that rocm-smi lists")
            chosen.append(named)
        shown = chosen
    return FoundGpus(tuple(gpu for _, gpu in shown), notes=(UNTESTED_AMD,))


def _by_amdsmi(sys: Path) -> list[tuple[str, Gpu]] | None:
    """Return each AMD GPU with its unique id, as reported by amdsmi; None without amdsmi or its library."""
    try:
        import amdsmi  # type: ignore[import-not-found, unused-ignore]
    # the module or the library that it loads is missing
    except (ImportError, OSError, KeyError, AttributeError, RuntimeError):
        return None
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as error:
        if (sys / "class/kfd").is_dir():
            message = f"AMD's driver does not answer: {' '.join(str(error).split())}"
            raise _unusable(
                message, "run amd-smi list, and check that this user is in the groups render and video"
            ) from error
        return None
    try:
        return [_amd_described(amdsmi, handle) for handle in amdsmi.amdsmi_get_processor_handles()]
    except amdsmi.AmdSmiException as error:
        message = f"an AMD GPU does not answer: {' '.join(str(error).split())}"
        raise _unusable(message, "amd-smi list, and dmesg | grep amdgpu") from error
    finally:
        amdsmi.amdsmi_shut_down()


def _amd_described(amdsmi: Any, handle: Any) -> tuple[str, Gpu]:
    chip = amdsmi.amdsmi_get_gpu_asic_info(handle)
    total = int(amdsmi.amdsmi_get_gpu_memory_total(handle, amdsmi.AmdSmiMemoryType.VRAM))
    used = int(amdsmi.amdsmi_get_gpu_memory_usage(handle, amdsmi.AmdSmiMemoryType.VRAM))
    # The last two digits are hexadecimal: 942 -> (9, 0x42), 1100 -> (11, 0x00).
    target = str(chip.get("target_graphics_version", "")).removeprefix("gfx")
    try:
        capability = (int(target[:-2]), int(target[-2:], 16))
    except ValueError:
        capability = (0, 0)
    units = chip.get("num_compute_units", 0)
    gpu = Gpu(
        name=str(chip["market_name"]),
        memory_bytes=total,
        compute_capability=capability,
        free_bytes=total - used,
        vendor="amd",
        processors=units if isinstance(units, int) else 0,
    )
    return str(chip.get("asic_serial", "")).lower().removeprefix("0x"), gpu


def _by_kfd(sys: Path) -> list[tuple[str, Gpu]]:
    """Return each AMD GPU with its unique id, as the amdgpu driver lists it for compute."""
    found = []
    nodes = (sys / "class/kfd/kfd/topology/nodes").glob("*")
    for node in sorted(nodes, key=lambda path: int(path.name) if path.name.isdigit() else 0):
        facts = _facts(node / "properties")
        if facts.get("vendor_id") != AMD_VENDOR or not facts.get("simd_count"):
            continue
        device = sys / f"class/drm/renderD{facts.get('drm_render_minor', 0)}/device"
        total = _text(device / "mem_info_vram_total")
        used = _text(device / "mem_info_vram_used")
        if not total.isdigit():
            raise _unusable(f"the memory of an AMD GPU cannot be read from {device}", "amd-smi list; ls -l /dev/dri")
        bank = _facts(node / "mem_banks/0/properties")
        version = facts.get("gfx_target_version", 0)
        gpu = Gpu(
            name=AMD_NAMES.get(facts.get("device_id", 0), f"AMD GPU 0x{facts.get('device_id', 0):04x}"),
            memory_bytes=int(total),
            compute_capability=(version // 10000, version // 100 % 100 * 16 + version % 100),
            free_bytes=int(total) - (int(used) if used.isdigit() else 0),
            vendor="amd",
            processors=facts["simd_count"] // max(1, facts.get("simd_per_cu", 4)),
            clock_mhz=facts.get("max_engine_clk_fcompute", 0),
            memory_gb_per_s=2 * bank.get("mem_clk_max", 0) * 1e6 * bank.get("width", 0) / 8 / 1e9,
        )
        found.append((f"{facts.get('unique_id', 0):016x}", gpu))
    return found


def _facts(path: Path) -> dict[str, int]:
    """Read `key value` lines."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


# Others


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
