"""Features of NVIDIA and AMD devices for which torch has no general interface.

There are two: pinning existing memory (torch only pins memory that it allocates, rounded up to powers of two), and NCCL
(its version, and a process group whose errors do not end the process). Kernels that need CUDA (Triton, cuDNN) are
marked in the table of kernels, `recipe/keys/kernels.py`.
"""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SURVIVABLE_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Environment variables that a ProcessGroupNCCL reads when it is created (according to the source,
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; not tested). By default, its watchdog ends the process at a peer's
first error. After an error it sleeps for a minute, during which the group cannot be destroyed, and its monitor ends a
process whose watchdog is blocked."""


def pin(buffer: Tensor, device: torch.device) -> None:
    """Pin the host memory of a tensor in place, so that copies from this device are asynchronous. Devices other than
    CUDA have no API for this, so their copies block the host."""
    if device.type == "cuda":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))


def unpin(buffer: Tensor, device: torch.device) -> None:
    """Undo `pin` before the buffer is freed, because its addresses may be reused."""
    if device.type == "cuda":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())))


def nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def open_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a ProcessGroupNCCL that may lose peers. Its owner detects errors, checks the time, and calls `abort`.

    Connecting is non-blocking, so that it ends after `timeout` if a peer has died in the meantime; NCCL's blocking form
    would wait forever and cannot be aborted. torch reads this timeout once per process. The group's timeout is longer
    than its owner's, because it also limits `abort`, and because the owner must detect a late exchange before the
    watchdog does.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * timeout
    options.config.blocking = 0
    before = {name: os.environ.get(name) for name in SURVIVABLE_NCCL}
    os.environ.update(SURVIVABLE_NCCL)
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
