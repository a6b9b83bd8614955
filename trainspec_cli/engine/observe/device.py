"""The device of this rank: its name, its speed, the memory used."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from trainspec_cli.core.node import cpu_name
from trainspec_cli.engine.accelerators import allocator_count, chip_name, device_memory, on_chip, synchronise

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: tuple[Product, ...] = (lambda a, b: a @ b, lambda a, b: a @ b.T, lambda a, b: a.T @ b)
"""A layer's products, forward and backward. CPUs differ in them, tenfold in a format that they do not have."""
MATMUL_SIZES, CHIP_MATMUL_SIZES = (1024, 2048), (4096, 8192)
MATMUL_ROUNDS, MATMUL_ROUND_S = 10, 0.02
"""A size is tried in so many rounds, of one product at least; the best counts."""
MATMUL_LIMIT_S = 1.0
"""No round begins after so long, and no size is tried whose product takes longer: a CPU that has no bf16 makes some
1 GFLOP a second in it."""


@dataclass(frozen=True)
class Peak:
    flops: float
    """FLOP/s of one device."""
    source: str
    """The source of the value; it is shown with every MFU."""


def device_name(device: torch.device) -> str:
    return chip_name(device) if on_chip(device) else cpu_name()


def measure_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """The best rate of a square matrix product, with every rank of the node measuring at the same time."""
    best, products = 0.0, PRODUCTS[:1] if on_chip(device) else PRODUCTS
    limits = MATMUL_ROUNDS, MATMUL_ROUND_S, MATMUL_LIMIT_S
    for size in CHIP_MATMUL_SIZES if on_chip(device) else MATMUL_SIZES:
        rates = [matmul_flops(device, dtype, size, *limits, product) for product in products]
        products = (products[rates.index(max(rates))],)
        best = max(best, *rates)
        if 8 * (2 * size**3) / max(rates) > MATMUL_LIMIT_S:  # of the next size, which is twice as large
            break
    return Peak(best, f"best {str(dtype).removeprefix('torch.')} matmul measured on this device")


def matmul_flops(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    rounds: int,
    round_s: float,
    limit_s: float = math.inf,
    product: Product = PRODUCTS[0],
) -> float:
    """Return the FLOP/s of a square product in the quickest round."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / quickest_s(lambda: product(a, b), device, rounds, round_s, limit_s)


def quickest_s(
    call: Callable[[], Any], device: torch.device, rounds: int, round_s: float = 0.0, limit_s: float = math.inf
) -> float:
    """Return the seconds of a call in the quickest round, after one call that does not count.

    A round makes calls for `round_s`, and one at least: what another program takes away is not the call's own. None but
    the first begins after `limit_s`.
    """
    call()
    quickest, started = math.inf, time.perf_counter()
    for _ in range(rounds):
        quickest = min(quickest, _round_s(call, device, round_s))
        if time.perf_counter() - started > limit_s:
            break
    return quickest


def _round_s(call: Callable[[], Any], device: torch.device, round_s: float) -> float:
    synchronise(device)
    calls, taken_s, started = 0, 0.0, time.perf_counter()
    while not calls or taken_s < round_s:
        call()
        synchronise(device)
        calls, taken_s = calls + 1, time.perf_counter() - started
    return taken_s / calls


def free_bytes(device: torch.device) -> float:
    """Return the memory that this process may still take: of a GPU all that is free, of a host its part of it."""
    if on_chip(device):
        return float(device_memory(device).available)
    return psutil.virtual_memory().available / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def device_allocations(device: torch.device) -> int:
    """Return how often this process has allocated from the device's driver; 0 on a CPU."""
    return allocator_count(device, "num_device_alloc")


def peak_memory_bytes(device: torch.device) -> int:
    """Return the allocator's peak on a GPU, the resident peak of this process on a CPU."""
    if on_chip(device):
        return torch.accelerator.max_memory_allocated(device)
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
