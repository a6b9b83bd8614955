"""Errors that come up in code of one's own and are no fault of it."""

from __future__ import annotations

import torch


def is_no_fault(error: Exception) -> bool:
    """Return whether memory ran out or a peer was lost, which the run deals with as everywhere else."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
