"""OptimSpec -> a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainspec_cli.engine.shares import Share
from trainspec_cli.spec.recipe.optim import OptimSpec


def fused(groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """One kernel for all parameters, clipping and the guard in it (`update.guarded_update`)."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def build_optimizer(
    shares: Sequence[Share], optim: OptimSpec, adamw: Callable[..., Any] = fused
) -> torch.optim.Optimizer:
    """Matrices decay, norms and biases do not."""
    matrices = [share.local for share in shares if share.parameter.dim() > 1]
    vectors = [share.local for share in shares if share.parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, fused=True)
    optimizer = adamw(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    _start_moments(optimizer)
    return optimizer


def _start_moments(optimizer: torch.optim.AdamW) -> None:
    """Make the moments that the first update would make, so that a checkpoint can be loaded before any update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
