"""Trials of the user's code: whether they can be made, and which of its errors are not its fault."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_no_fault(error: Exception) -> bool:
    """Return whether memory ran out or a peer was lost, which the run deals with as everywhere else."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def has_values() -> bool:
    """Return whether tensors hold numbers: those of a step that is only traced have none, and nothing can be tried."""
    return not isinstance(torch.empty(0), FakeTensor)
