"""Muon (K. Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv:2502.16982).

The momentum of each matrix inside a block is orthogonalised by Newton-Schulz steps, and scaled so that an update has
the root mean square of a typical AdamW update. All other parameters are trained with AdamW, with the same learning rate
and weight decay. Newton-Schulz steps need full matrices. If matrices are split over ranks, each rank gathers some full
matrices, and later sends their parts back. Stacked experts are treated as separate matrices. Small matrices of the same
shape are multiplied in one batch: on a core with AMX, six layers of 256 x 704 take 42 ms, compared with 55 ms one by
one. The steps are computed in bf16 on a GPU, and in the run's format on a CPU (in fp32, the example takes 180 ms).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.comm.exchange import TimeCollective
from trainspec_cli.engine.optim.whole import Group, Guard, GuardedOptimizer, gather_own, scatter_own
from trainspec_cli.engine.shares import Share, Split
from trainspec_cli.recipe.keys.training import STACKED_VALUES

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
RMS = 0.2
"""Root mean square of an AdamW update (arXiv:2502.16982, section 2.2)."""


def is_hidden_matrix(share: Share) -> bool:
    """Return whether Muon trains a parameter: a matrix inside a block, or a stack of matrices. Convolution taps, which
    do not mix channels, and stacked biases do not count."""
    *owner, leaf = share.name.split(".")
    depthwise = any(part.startswith("conv_") for part in owner)
    return owner[:1] == ["blocks"] and len(share.full_shape) in (2, 3) and not leaf.endswith("bias") and not depthwise


@torch.no_grad()
def orthogonalise(matrices: Tensor) -> Tensor:
    """Return approximately U V^T for a matrix U S V^T, or for each matrix of a stack, computed in its dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / x.flatten(-2).norm(dim=-1).clamp(min=SMALLEST_NORM)[..., None, None]
    multiply_add = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(STEPS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Muon(GuardedOptimizer):
    """Applies Muon to the parameter groups that have its rule. `shares`: this rank's shares of these groups'
    parameters, in order."""

    def __init__(
        self,
        groups: Sequence[Group],
        shares: Sequence[Share],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        time: TimeCollective,
        compute: torch.dtype | None = None,
    ):
        super().__init__(groups, lr, betas, eps)
        self.batches: dict[int, list[list[Share]]] = {}
        """The batches of each parameter group, by the ID of its first parameter."""
        for group in self.param_groups:
            own = {id(parameter) for parameter in group["params"]}
            self.batches[id(group["params"][0])] = list(_batches([one for one in shares if id(one.local) in own]))
        self.time = time
        self.compute = compute

    def start_rule(self, parameter: Tensor, like: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        return {"momentum_buffer": like(parameter)}

    def update_group(self, group: Group, guard: Guard) -> None:
        for shares in self.batches[id(group["params"][0])]:
            updates = [self._take_gradient(share.local, group["momentum"], guard) for share in shares]
            splits = [_splits_of_matrix(share) for share in shares]
            whole = _orthogonalise_alike(gather_own(updates, splits, self.time))
            for share, update in zip(shares, scatter_own(whole, updates, splits, self.time), strict=True):
                lr = group["lr"]
                weight = share.local
                scaled = lr * RMS * math.sqrt(max(share.full_shape[-2:]))
                guard.set_(weight, (weight * (1 - lr * group["weight_decay"])).sub_(update, alpha=scaled))

    def _take_gradient(self, weight: Tensor, momentum: float, guard: Guard) -> Tensor:
        """Add the gradient to the momentum. Return the Nesterov momentum in the compute format."""
        buffer = self.state[weight]["momentum_buffer"]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad / guard.scale
        averaged = buffer.lerp(gradient, 1 - momentum)
        guard.set_(buffer, averaged)
        compute = torch.bfloat16 if on_chip(weight.device) else self.compute or weight.dtype
        return gradient.lerp_(averaged, momentum).to(compute)


def _splits_of_matrix(share: Share) -> tuple[Split, ...]:
    """Return the splits that divide individual matrices, without those that only divide a stack."""
    return tuple(split for split in share.splits if split.dim >= len(share.full_shape) - 2)


def _orthogonalise_alike(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise matrices or stacks of the same shape together."""
    if len(matrices) <= 1:
        return [orthogonalise(matrix) for matrix in matrices]
    return list(orthogonalise(torch.stack(list(matrices)).flatten(0, -3)).view(-1, *matrices[0].shape))


def _batches(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Yield shares of the same shape on the same ranks: one for each rank, or several if they are small."""
    by_kind: dict[tuple[object, ...], list[Share]] = {}
    for share in shares:
        groups = tuple(split.group.group_name for split in _splits_of_matrix(share))
        by_kind.setdefault((groups, tuple(share.full_shape)), []).append(share)
    for alike in by_kind.values():
        ranks = math.prod(split.group.size() for split in _splits_of_matrix(alike[0]))
        together = ranks * max(1, STACKED_VALUES // math.prod(alike[0].full_shape))
        yield from (alike[start : start + together] for start in range(0, len(alike), together))
