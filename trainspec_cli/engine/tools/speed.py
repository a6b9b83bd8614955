"""`python -m trainspec_cli.engine.tools.speed cpu|cuda bf16|fp32`: what this host's devices do, as JSON.

One device after another; the slowest counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from trainspec_cli.spec.json_text import json_text

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
MEASURE_S = 0.5
REPEATS = 5


def main() -> None:
    device_type, compute = sys.argv[1], sys.argv[2]
    print(json_text(measure(device_type, DTYPES[compute]), indent=None))


def measure(device_type: str, dtype: torch.dtype) -> dict[str, Any]:
    count = torch.cuda.device_count() if device_type == "cuda" else 1
    devices = [
        torch.device(device_type, index) if device_type == "cuda" else torch.device("cpu") for index in range(count)
    ]
    flops = [measure_matmul(device, dtype) for device in devices]
    bandwidths = [measure_copy(device) for device in devices]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device_type == "cuda" else None,  # type: ignore[no-untyped-call]
        "devices": count,
        "matmul_flops": min(flops),
        "memory_bytes_per_s": min(bandwidths),
        "slowest_device": flops.index(min(flops)),
    }


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product, the best of some repeats."""
    n = MATMUL_SIZE[device.type]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / best_s(lambda: torch.mm(a, b), device)


def measure_copy(device: torch.device) -> float:
    """Bytes read and written a second."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_s(lambda: target.copy_(source), device)


def best_s(act: Callable[[], Any], device: torch.device) -> float:
    """Of `REPEATS` measurements, which share `MEASURE_S`."""
    act()
    times = []
    for _ in range(REPEATS):
        runs, started = 0, time.perf_counter()
        while not runs or time.perf_counter() - started < MEASURE_S / REPEATS:
            act()
            synchronise(device)
            runs += 1
        times.append((time.perf_counter() - started) / runs)
    return min(times)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
