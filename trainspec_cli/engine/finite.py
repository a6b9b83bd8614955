"""Finds NaN and infinity in tensors, without another tensor of their size."""

from __future__ import annotations

from torch import Tensor

NOT_FINITE = "values that are not finite (NaN or infinity)"
"""The reason that a file is refused for."""
REMEDY = "try a lower optim.lr, a longer optim.schedule.warmup_steps, or precision=bf16 in place of fp8"
"""A hint for a run that diverged."""


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; integers always are. Waits for the device."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, greatest = tensor.detach().aminmax()
    return bool(least.isfinite() & greatest.isfinite())


def count_not_finite(tensor: Tensor) -> int:
    return int((~tensor.isfinite()).sum())
