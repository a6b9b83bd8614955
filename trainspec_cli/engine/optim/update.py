"""One guarded update: clip by the global norm, skip where anything is not finite.

Both happen inside the fused kernel, through the two tensors that it takes for mixed precision: `grad_scale` divides
every gradient, `found_inf` makes the update (and its step count) a no-op. So the host never waits to decide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainspec_cli.engine.shares import Share


@torch.no_grad()
def squared_norm(shares: Sequence[Share]) -> Tensor:
    """This rank's share of the gradients' squared Euclidean norm (fp64): the ranks' shares sum to it.

    Each part counts once, however many ranks hold it.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for share in shares:
        if share.gradient is not None:
            by_copies.setdefault(share.copies, []).append(share.gradient)
    sums = [
        torch.stack(torch._foreach_norm(gradients)).double().square().sum() / copies
        for copies, gradients in by_copies.items()
    ]
    return torch.stack(sums).sum()


def guarded_update(
    optimizer: torch.optim.Optimizer, shares: Sequence[Share], norm: Tensor, loss: Tensor, clip_norm: float | None
) -> Tensor:
    """Update the parameters; -> 1.0 where the update was skipped, else 0.0.

    `norm` and `loss` (fp32) are the same on every rank (already reduced), so every rank decides alike.
    """
    skipped = (~(torch.isfinite(norm) & torch.isfinite(loss))).float().to(shares[0].local.device)
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    if clip_norm is not None:
        optimizer.grad_scale = (norm / clip_norm).clamp_min(1.0).to(skipped.device)  # type: ignore[attr-defined]
    for share in shares:
        share.local.grad = share.gradient
    optimizer.step()
    clear_gradients(shares)
    return skipped


def clear_gradients(shares: Sequence[Share]) -> None:
    for share in shares:
        share.local.grad = share.parameter.grad = None
