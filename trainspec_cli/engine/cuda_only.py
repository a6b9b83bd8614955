"""What NVIDIA's and AMD's devices alone have, of which torch knows no general form.

Pinning memory that exists already (torch pins only what it allocates itself, and rounds that up to powers of two), and
the version of NCCL. Kernels that need CUDA (Triton, cuDNN) say so in the table of kernels, `spec/recipe/kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def register_pinned(buffer: Tensor) -> None:
    """Pin the memory of a tensor on the host where it is."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)))


def unregister_pinned(buffer: Tensor) -> None:
    """Take back `register_pinned`."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())))


def nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
