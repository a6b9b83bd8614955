"""Assemble each full matrix on one rank from its parts on several ranks, and later send the parts back.

If n ranks hold parts of n matrices, each rank gets one full matrix, so all ranks share the work, and each receives as
much data as it sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from trainspec_cli.engine.comm.exchange import TimeCollective, sent_bytes
from trainspec_cli.engine.shares import Split


def gather_own(parts: Sequence[Tensor], splits: Sequence[Sequence[Split]], time: TimeCollective) -> list[Tensor]:
    """Return this rank's full matrices, assembled from every rank's `parts`.

    `splits[i]`: how matrix i is split, innermost first; the groups are the same for all matrices. Matrices are assigned
    to a group's ranks round-robin. Called collectively by all ranks of the groups.
    """
    if not splits or not splits[0]:
        return list(parts)
    group = splits[0][0].group
    own = [several[0] for several in splits]
    ranks = group.size()
    rank = group.rank()
    sent = [[parts[number] for number in range(to, len(parts), ranks)] for to in range(ranks)]
    mine = range(rank, len(parts), ranks)
    shapes = [[_resized(parts[number], own[number].dim, size) for size in own[number].sizes] for number in mine]
    received = _swap(
        sent, [[of_ranks[sender] for of_ranks in shapes] for sender in range(ranks)], parts[0], group, time
    )
    wholes = [
        torch.cat([received[sender][place] for sender in range(ranks)], own[number].dim)
        for place, number in enumerate(mine)
    ]
    return gather_own(wholes, [splits[number][1:] for number in mine], time)


def scatter_own(
    wholes: Sequence[Tensor], like: Sequence[Tensor], splits: Sequence[Sequence[Split]], time: TimeCollective
) -> list[Tensor]:
    """The inverse of `gather_own`: return this rank's parts, shaped like `like`, of all ranks' full matrices."""
    if not splits or not splits[0]:
        return list(wholes)
    group = splits[0][0].group
    own = [several[0] for several in splits]
    ranks = group.size()
    rank = group.rank()
    mine = range(rank, len(like), ranks)
    inner = [like[number].new_empty(_resized(like[number], own[number].dim, own[number].size)) for number in mine]
    held = scatter_own(wholes, inner, [splits[number][1:] for number in mine], time)
    cut = [whole.split(own[number].sizes, own[number].dim) for number, whole in zip(mine, held, strict=True)]
    numbers = [list(range(sender, len(like), ranks)) for sender in range(ranks)]
    sent = [[pieces[to] for pieces in cut] for to in range(ranks)]
    received = _swap(
        sent, [[like[number].shape for number in of_sender] for of_sender in numbers], like[0], group, time
    )
    by_number = {
        number: part
        for of_sender, came in zip(numbers, received, strict=True)
        for number, part in zip(of_sender, came, strict=True)
    }
    return [by_number[number] for number in range(len(like))]


def _resized(part: Tensor, dim: int, size: int) -> torch.Size:
    return torch.Size([size if place == dim else length for place, length in enumerate(part.shape)])


def _swap(
    sent: Sequence[Sequence[Tensor]],
    shapes: Sequence[Sequence[torch.Size]],
    like: Tensor,
    group: dist.ProcessGroup,
    time: TimeCollective,
) -> list[list[Tensor]]:
    """Send `sent[r]` to rank r. Return the tensors received from each rank, with these `shapes` and the format of
    `like`. A rank may have nothing to send."""
    out = torch.cat([like.new_empty(0), *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    out_sizes = [sum(tensor.numel() for tensor in tensors) for tensors in sent]
    in_sizes = [sum(math.prod(shape) for shape in of_rank) for of_rank in shapes]
    received = like.new_empty(sum(in_sizes))
    with time(sent_bytes(out.nbytes, group.size())):
        dist.all_to_all_single(received, out, in_sizes, out_sizes, group=group)
    return [
        [piece.view(shape) for piece, shape in zip(block.split(list(map(math.prod, of_rank))), of_rank, strict=True)]
        for block, of_rank in zip(received.split(in_sizes), shapes, strict=True)
    ]


# Code shared by trainspec's optimizers: the guard of `guarded_update`, and AdamW for parameters without a special rule.


Group = dict[str, Any]


@dataclass(frozen=True)
class Guard:
    """The flag that skips an update, and the divisor of the gradients. Both are on the device, so that the host never
    waits."""

    skipped: Tensor
    """True if the update is skipped because a value is not finite."""
    scale: Tensor

    def set_(self, target: Tensor, value: Tensor) -> None:
        """Set `target` in place, unless the update is skipped."""
        target.copy_(torch.where(self.skipped, target, value))


class GuardedOptimizer(torch.optim.Optimizer):
    """Updates parameter groups that have a `rule` with `update_group`, and all other groups with AdamW in one
    kernel."""

    def __init__(self, groups: Sequence[Group], lr: float, betas: tuple[float, float], eps: float):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "rule": ""})

    def start_rule(self, parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        raise NotImplementedError

    def update_group(self, group: Group, guard: Guard) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # torch's gradient scaler sets these two attributes for one step.
        device = self.param_groups[0]["params"][0].device
        found_inf = getattr(self, "found_inf", None)
        scale = getattr(self, "grad_scale", None)
        self.found_inf = self.grad_scale = None  # type: ignore[attr-defined]
        found_inf = torch.zeros((), device=device) if found_inf is None else found_inf
        guard = Guard(found_inf > 0, torch.ones((), device=device) if scale is None else scale)
        for group in self.param_groups:
            if group["rule"]:
                self.update_group(group, guard)
                continue
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=guard.scale,
                found_inf=guard.skipped.float(),
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def start_adamw(parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=parameter.device),
        "exp_avg": like(parameter),
        "exp_avg_sq": like(parameter),
    }
