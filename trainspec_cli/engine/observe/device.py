"""The device of this rank: name, speed, memory used."""

from __future__ import annotations

import platform
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

MATMUL_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
MATMUL_SECONDS = 0.2
"""How long each size is tried; its best product counts."""


@dataclass(frozen=True)
class Peak:
    flops: float
    """FLOP/s of one device."""
    source: str
    """The source of the value; it is shown with every MFU."""


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure_peak(device: torch.device, dtype: torch.dtype, seconds: float = MATMUL_SECONDS) -> Peak:
    """Measure the best rate of a square matrix product, on every rank of the node at the same time."""
    best = max(_matmul_flops(device, dtype, size, seconds) for size in MATMUL_SIZES[device.type])
    return Peak(best, f"best {str(dtype).removeprefix('torch.')} matmul measured on this device")


def _matmul_flops(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    a @ b
    best, deadline = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = _synchronised_now(device)
        a @ b
        best = max(best, 2 * size**3 / (_synchronised_now(device) - start))
    return best


def _synchronised_now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def device_allocations(device: torch.device) -> int:
    """Return how often this process has allocated from the device's driver; 0 on a CPU."""
    return int(torch.cuda.memory_stats(device)["num_device_alloc"]) if device.type == "cuda" else 0


def peak_memory_bytes(device: torch.device) -> int:
    """Return the allocator's peak on a GPU, the resident peak of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
