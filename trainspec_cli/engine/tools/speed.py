"""The speed of this node's devices, one after another."""

from __future__ import annotations

import torch

from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.observe.device import matmul_flops, quickest_s
from trainspec_cli.spec.results.tools import SpeedRequest, SpeedResult

MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**26, "cuda": 2**30}
ROUNDS, ROUND_S = 5, 0.1


def run(request: SpeedRequest) -> SpeedResult:
    on_gpus, dtype = request.device == "cuda", DTYPES[request.compute]
    count = torch.cuda.device_count() if on_gpus else 1
    devices = [torch.device("cuda", index) if on_gpus else torch.device("cpu") for index in range(count)]
    flops = [matmul_flops(device, dtype, MATMUL_SIZE[device.type], ROUNDS, ROUND_S) for device in devices]
    return SpeedResult(
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpus else None,  # type: ignore[no-untyped-call]
        devices=count,
        matmul_flops=min(flops),
        memory_bytes_per_s=min(map(measure_copy, devices)),
        slowest_device=flops.index(min(flops)),
    )


def measure_copy(device: torch.device) -> float:
    """Return the bytes read and written a second."""
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / quickest_s(lambda: target.copy_(source), device, ROUNDS, ROUND_S)
