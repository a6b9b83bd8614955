"""Measure the speed of this node's devices, one after another."""

from __future__ import annotations

import torch

from trainspec_cli.engine.accelerators import devices_here, on_chip
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.cuda_only import nccl_version
from trainspec_cli.engine.observe.counters import matmul_flops, quickest_s
from trainspec_cli.recipe.results.tools import SpeedRequest, SpeedResult

MATMUL_SIZE = 1024
CHIP_MATMUL_SIZE = 8192
COPY_BYTES = 2**26
CHIP_COPY_BYTES = 2**30
ROUNDS = 5
ROUND_S = 0.1


def run(request: SpeedRequest) -> SpeedResult:
    dtype = DTYPES[request.compute]
    devices = devices_here(request.device)
    size = MATMUL_SIZE if request.device == "cpu" else CHIP_MATMUL_SIZE
    flops = [matmul_flops(device, dtype, size, ROUNDS, ROUND_S) for device in devices]
    return SpeedResult(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=nccl_version() if request.device == "cuda" else None,
        devices=len(devices),
        matmul_flops=min(flops),
        memory_bytes_per_s=min(map(measure_copy, devices)),
        slowest_device=flops.index(min(flops)),
    )


def measure_copy(device: torch.device) -> float:
    """Return the device's memory bandwidth: bytes read and written per second."""
    size_bytes = CHIP_COPY_BYTES if on_chip(device) else COPY_BYTES
    source = torch.ones(size_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / quickest_s(lambda: target.copy_(source), device, ROUNDS, ROUND_S)
