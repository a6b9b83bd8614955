"""The kinds of devices that the engine runs on, and the device operations that it needs, for any vendor.

torch.accelerator, torch.Event and torch.Stream support all vendors' chips; on CUDA they make the same calls as
torch.cuda (checked in torch 2.11 to 2.13). Everything else, such as a device's name and its random number generator,
comes from the device's module (`torch.get_device_module`). Features that only CUDA has are in `cuda_only.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from trainspec_cli.core.environment_names import DEVICE
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.wings import Point, parts_of
from trainspec_cli.recipe.results.verdict import Collective


@dataclass(frozen=True)
class DeviceKind:
    collectives: str
    """The process-group backend for tensors on such devices."""
    is_numbered: bool = True
    """True if torch gives these devices an index. False if a machine never has more than one of this kind."""
    capturable: bool = True
    """True if torch's optimizers can keep their update count on the device (torch/optim/optimizer.py)."""
    is_profiled: bool = True
    """True if torch's profiler measures times on the device (torch/autograd/profiler.py)."""
    compiles: bool = True
    """True if torch.compile has a backend for the device."""
    has_norm_kernels: bool = False
    """True if torch has the kernels of SyncBatchNorm for the device (`torch.batch_norm_elemt` and related ones)."""


KINDS = {
    "cpu": DeviceKind("gloo", is_numbered=False, capturable=False, is_profiled=False),
    "cuda": DeviceKind("nccl", has_norm_kernels=True),
    "xpu": DeviceKind("xccl"),
    "hpu": DeviceKind("hccl"),
    "npu": DeviceKind("hccl"),
    "mps": DeviceKind("gloo", is_numbered=False, capturable=False, is_profiled=False),
}
"""Maps torch's name for a kind of device to its properties. NVIDIA's and AMD's devices are both `cuda`, and RCCL is
AMD's `nccl`; `xpu` is Intel's, `hpu` Habana's, `npu` Ascend's, `mps` Apple's."""


class DevicePlugin(Protocol):
    """A kind of device that torch does not support natively."""

    name: str
    kind: DeviceKind

    def register(self) -> None:
        """Make the device known to torch in this process."""


DEVICES: Point[DevicePlugin] = Point("devices")


def on_chip(device: torch.device) -> bool:
    """Return True if the device is an accelerator, which runs asynchronously."""
    return device.type != "cpu"


def enter(device_type: str) -> torch.device:
    """Return the device for this process's local rank, and make it this thread's current device."""
    wanted = os.environ.get(DEVICE)
    if wanted is not None:  # a plug-in's device replaces the plan's
        plugins = {plugin.name: plugin for plugin in parts_of(DEVICES)}
        if wanted not in plugins:
            known = ", ".join(sorted(plugins)) or "none is installed"
            message = f"{DEVICE}: `{wanted}` is not the name of a device plugin"
            raise RecipeError(Problem("unknown_value", message, DEVICE, f"unset it, or set it to one of: {known}"))
        plugin = plugins[wanted]
        plugin.register()
        KINDS[plugin.name] = plugin.kind
        device_type = plugin.name
    number = int(os.environ["LOCAL_RANK"]) if KINDS[device_type].is_numbered else None
    device = torch.device(device_type) if number is None else torch.device(device_type, number)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Make an accelerator this thread's current device. In a new thread, the current device is the node's first one."""
    if KINDS[device.type].is_numbered:
        torch.accelerator.set_device_index(device)


def process_group_backends(device_type: str) -> str:
    """Return the backends for `init_process_group`: an accelerator's own backend, and gloo for the host."""
    own = KINDS[device_type].collectives
    host = KINDS["cpu"].collectives
    return host if device_type == "cpu" else f"cpu:{host},{device_type}:{own}"


def devices_here(device_type: str) -> list[torch.device]:
    """Return the devices of this kind that are visible to this process."""
    if not KINDS[device_type].is_numbered:
        return [torch.device(device_type)]
    return [torch.device(device_type, index) for index in range(torch.accelerator.device_count())]


# Streams


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that queues an accelerator's work in a new stream. On a CPU, it does nothing."""
    return torch.Stream(device) if on_chip(device) else nullcontext()


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work in all streams."""
    if on_chip(device):
        torch.accelerator.synchronize(device)


def synchronise_stream(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread's current stream."""
    if on_chip(device):
        torch.accelerator.current_stream(device).synchronize()


def keep_busy(device: torch.device, seconds: float) -> None:
    """Keep the current stream busy; on a CPU, and on accelerators whose module has no `_sleep`, block this thread."""
    sleep = getattr(torch.get_device_module(device), "_sleep", None) if on_chip(device) else None
    if sleep is None:
        time.sleep(seconds)
    else:
        sleep(round(seconds * _cycles_per_s(device)))


# Host time


def host_clock(device: torch.device) -> Callable[[], float]:
    """Return the time on the host's clock, in seconds: Unix time or, if the device emulates host time, the emulated
    time."""
    clock: Callable[[], float] = _emulated(device, "host_time") or time.time
    return clock


def host_is_emulated(device: torch.device) -> bool:
    """Return True if the host's work takes emulated time, which the system's counters do not measure."""
    return _emulated(device, "host_time") is not None


def emulated_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the peak FLOP/s of an emulated chip; None for a real device, which has to be measured. Measuring an
    emulated chip would take emulated time before the first step in some runs but not in others."""
    peak = _emulated(device, "peak_flops")
    flops: float | None = None if peak is None else peak(dtype)
    return flops


def _emulated(device: torch.device, name: str) -> Callable[..., Any] | None:
    """Return a function that only an emulated device's module provides; None for any other device."""
    function: Callable[..., Any] | None = getattr(getattr(torch, device.type, None), name, None)
    return function


def host_work(device: torch.device, name: str = "", seconds: float = 0.0) -> None:
    """Advance an emulated host clock by the duration of a `read` (of a batch) or `write` (of a checkpoint), plus
    `seconds`. A real host sleeps for `seconds` instead."""
    work = _emulated(device, "host_work")
    if work is not None:
        work(name, seconds)
    elif seconds:
        time.sleep(seconds)


MEASURED_CYCLES = 10**7


@cache
def _cycles_per_s(device: torch.device) -> float:
    """Measure the rate of the clock whose cycles `_sleep` counts. Waits for the device."""
    begin, end = (torch.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.get_device_module(device)._sleep(MEASURED_CYCLES)
    end.record()
    end.synchronize()
    return MEASURED_CYCLES / (begin.elapsed_time(end) / 1e3)


# Memory


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of an accelerator in bytes."""

    used: int
    """Memory used by this process's tensors."""
    reserved: int
    """Memory held by this process's allocator."""
    free: int
    """Memory not used by any process."""
    total: int

    @property
    def available(self) -> int:
        """Memory that this process may still allocate: free memory plus the unused part of its allocator's memory."""
        return self.free + self.reserved - self.used


def device_memory(device: torch.device) -> DeviceMemory:
    used = torch.accelerator.memory_allocated(device)
    reserved = torch.accelerator.memory_reserved(device)
    return DeviceMemory(used, reserved, *torch.accelerator.get_memory_info(device))


def allocator_count(device: torch.device, name: str) -> int:
    """Return a counter from the allocator's statistics; 0 on a CPU and before the first allocation."""
    return int(torch.accelerator.memory_stats(device).get(name, 0)) if on_chip(device) else 0


def release_unused(device: torch.device) -> None:
    """Return the allocator's unused memory to the driver."""
    if on_chip(device):
        torch.accelerator.empty_cache()


# Names and random numbers


def chip_name(device: torch.device) -> str:
    """Return the accelerator's name, or its kind if its module does not provide names (Apple's, for example)."""
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(name_of(device)) if name_of else device.type


def physical_device(device: torch.device) -> str | None:
    """Return an identifier that is the same for processes that use the same physical device, or slices of it; None if
    unknown. Devices are identified by their position on the bus, as in NCCL."""
    properties_of = getattr(torch.get_device_module(device), "get_device_properties", None)
    properties = properties_of(device) if properties_of else None
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip()} {place}" if None not in place and boot.exists() else None


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the device's random number generator, as a tensor on the host."""
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    torch.get_device_module(device).set_rng_state(state, device)


def device_collectives() -> list[Collective]:
    """Return the newest collectives from the record of a device that keeps one outside of torch, oldest first."""
    kind = started_kind()
    read = getattr(torch.get_device_module(kind), "read_collectives", None) if kind else None
    return read() if read else []


def started_kind() -> str | None:
    """Return the kind of accelerator that this process has started to use. The query itself does not initialise a
    device."""
    chip = torch.accelerator.current_accelerator()
    module: Any = torch.get_device_module(chip) if chip else None
    is_started = getattr(module, "is_initialized", lambda: True)
    return chip.type if chip and is_started() else None
