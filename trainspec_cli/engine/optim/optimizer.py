"""Create the optimizer of an OptimSpec, and update with a guard: gradients are clipped by the global norm, and the
update is skipped if anything is not finite.

Both happen inside the fused kernel, through the two tensors that it accepts for mixed precision: `grad_scale` divides
every gradient, and `found_inf` makes the update (and its step count) a no-op. The host therefore never has to wait.
trainspec's optimizers (`whole.py`) accept the same two tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.comm.exchange import TimeCollective
from trainspec_cli.engine.optim.adamw8bit import AdamW8bit, is_quantised
from trainspec_cli.engine.optim.muon import Muon, is_hidden_matrix
from trainspec_cli.engine.optim.whole import Group, GuardedOptimizer, start_adamw
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.recipe.parameter_names import group_of


def fused(groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """Return an AdamW optimizer that updates all parameters in one kernel, which includes clipping and the guard
    (`guarded_update`)."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def untimed(_sent_bytes: float | None = None) -> nullcontext[bool]:
    return nullcontext(False)


def build_optimizer(
    shares: Sequence[Share],
    optim: OptimSpec,
    adamw: Callable[..., Any] = fused,
    moment_like: Callable[[Tensor], Tensor] = torch.zeros_like,
    time: TimeCollective = untimed,
    compute: torch.dtype | None = None,
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer, with `parameter_groups`.

    `moment_like` creates a parameter's state, given a tensor with its shape and dtype. `time` is the timer of the
    update's exchanges. `compute` is the format of the run's matmuls, including Muon's.
    """
    betas = (optim.beta1, optim.beta2)
    if optim.name in _RULES:
        by_rule = [share for share in shares if _RULES[optim.name](share)]
        rest = [share for share in shares if not _RULES[optim.name](share)]
        own = [group | {"rule": optim.name, "momentum": optim.momentum} for group in parameter_groups(by_rule, optim)]
        groups = [*own, *parameter_groups(rest, optim)]
        guarded: GuardedOptimizer
        if optim.name == "muon":
            guarded = Muon(groups, by_rule, optim.lr, betas, optim.eps, time, compute)
        else:
            guarded = AdamW8bit(groups, optim.lr, betas, optim.eps)
        for group in guarded.param_groups:
            for parameter in group["params"]:
                start = guarded.start_rule if group["rule"] else start_adamw
                guarded.state[parameter] = start(parameter, moment_like)
        return guarded
    groups = parameter_groups(shares, optim)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, fused=True)
    optimizer: torch.optim.AdamW = adamw(groups, lr=optim.lr, betas=betas, eps=optim.eps)
    # Create the moments that the first update would create, so that a checkpoint can be loaded before any update.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = start_adamw(parameter, moment_like)
    return optimizer


def parameter_groups(shares: Sequence[Share], optim: OptimSpec) -> list[Group]:
    """Return torch's parameter groups. Weight decay applies to matrices, but not to norms and biases, unless a group of
    the recipe has another one."""
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for share in sorted(shares, key=lambda share: share.parameter.dim() <= 1):
        decay, scale = optim.weight_decay if share.parameter.dim() > 1 else 0.0, 1.0
        if (asked := group_of(share.name, optim.groups)) is not None:
            decay = decay if asked.decay is None else asked.decay
            scale = asked.lr_scale
        groups.setdefault((decay, scale), []).append(share.local)
    return [
        {"params": held, "weight_decay": decay} | ({"lr_scale": scale} if scale != 1 else {})
        for (decay, scale), held in groups.items()
    ]


_RULES: dict[str, Callable[[Share], bool]] = {"adamw8bit": is_quantised, "muon": is_hidden_matrix}
"""Maps each optimizer with a special rule to a function that selects the parameters it trains. AdamW trains all other
parameters."""


def without_memory(parameter: Tensor) -> Tensor:
    """Return a tensor with the parameter's shape whose memory has not been allocated yet."""
    moment = torch.empty_like(parameter, requires_grad=False)
    moment.untyped_storage().resize_(0)
    return moment


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


@torch.no_grad()
def squared_norm(shares: Sequence[Share]) -> Tensor:
    """Return this rank's share of the gradients' squared Euclidean norm (fp64). The shares of all ranks add up to it:
    each part counts once, regardless of how many ranks hold it."""
    by_copies: dict[int, list[Tensor]] = {}
    for share in shares:
        if share.gradient is not None:
            by_copies.setdefault(share.copies, []).append(share.gradient)
    sums = [
        torch.stack(torch._foreach_norm(gradients)).double().square().sum() / copies
        for copies, gradients in by_copies.items()
    ]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def guarded_update(
    optimizer: torch.optim.Optimizer, shares: Sequence[Share], norm: Tensor, loss: Tensor, clip_norm: float | None
) -> Tensor:
    """Update the parameters; return 1.0 if the update was skipped, otherwise 0.0.

    `norm` and `loss` (fp32) have already been reduced, so every rank makes the same decision.
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
