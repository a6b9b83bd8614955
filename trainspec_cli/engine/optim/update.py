"""One guarded update: clip by the global norm, skip where anything is not finite.

Both happen inside the fused kernel, through the two tensors that it takes for mixed precision: `grad_scale` divides
every gradient, `found_inf` makes the update (and its step count) a no-op. So the host never waits to decide.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients of all ranks, a scalar (fp32)."""
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def guarded_update(optimizer: torch.optim.Optimizer, norm: Tensor, loss: Tensor, clip_norm: float | None) -> Tensor:
    """Update the parameters; -> 1.0 where the update was skipped, else 0.0.

    `norm` and `loss` are the same on every rank (already reduced), so every rank decides alike.
    """
    skipped = (~(torch.isfinite(norm) & torch.isfinite(loss))).float()
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    if clip_norm is not None:
        optimizer.grad_scale = (norm / clip_norm).clamp_min(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
    return skipped
