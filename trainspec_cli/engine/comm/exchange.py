"""Differentiable collectives of activations (B, S, D), in pairs: each one's backward is the other.

A region is a module whose matrices are cut over tp: its input is needed whole by every rank and its output is a sum
over ranks. With sequence parallelism (arXiv:2205.05198) activations between regions are cut along the sequence, which
is gathered before a region, and its output is summed and scattered along the sequence in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TimeCollective = Callable[[], AbstractContextManager[None]]

# torch 2.13 renamed them; 2.11 has the old names alone.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Peers:
    """A process group, and the timer of its collectives."""

    group: dist.ProcessGroup
    time: TimeCollective

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        with self.time():
            dist.all_reduce(x, group=self.group)
        return x

    def maximum_(self, x: Tensor) -> Tensor:
        with self.time():
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def gather_sequence(self, x_BSD: Tensor) -> Tensor:
        """Gather (B, S / n, D) into (B, S, D), contiguous: else every matrix product of a region would save a copy."""
        mine_SBD = x_BSD.transpose(0, 1).contiguous()
        all_SBD = mine_SBD.new_empty((mine_SBD.shape[0] * self.size, *mine_SBD.shape[1:]))
        with self.time():
            all_gather(all_SBD, mine_SBD, group=self.group)
        return all_SBD.transpose(0, 1).contiguous()

    def scatter_sum(self, x_BSD: Tensor) -> Tensor:
        """Sum (B, S, D) over the ranks, and return this rank's (B, S / n, D)."""
        whole_SBD = x_BSD.transpose(0, 1).contiguous()
        mine_SBD = whole_SBD.new_empty((whole_SBD.shape[0] // self.size, *whole_SBD.shape[1:]))
        with self.time():
            reduce_scatter(mine_SBD, whole_SBD, group=self.group)
        return mine_SBD.transpose(0, 1)


class _Mirror(torch.autograd.Function):
    """Runs one function forward and another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


@torch.compiler.disable
def enter_region(x_BSD: Tensor, peers: Peers, sequence_parallel: bool) -> Tensor:
    """Return the whole input of a region on every rank; in the backward, the ranks' gradients are summed."""
    if sequence_parallel:
        return _Mirror.apply(x_BSD, peers.gather_sequence, peers.scatter_sum)
    return _Mirror.apply(x_BSD, _same, lambda gradient: peers.sum_(gradient.clone()))


@torch.compiler.disable
def leave_region(x_BSD: Tensor, peers: Peers, sequence_parallel: bool) -> Tensor:
    """Return the sum of the ranks' outputs; in the backward, each gets the whole gradient."""
    if sequence_parallel:
        return _Mirror.apply(x_BSD, peers.scatter_sum, peers.gather_sequence)
    return _Mirror.apply(x_BSD, lambda x: peers.sum_(x.clone()), _same)


@torch.compiler.disable
def exchange(x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    return _Mirror.apply(x, ahead, back)
