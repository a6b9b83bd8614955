"""Keeps experts evenly visited: counts of the global batch, and the routers' update after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.comm.exchange import Peers


def routers_of(parts: Sequence[Any]) -> list[Any]:
    return [router for part in parts for router in part.balance_modules()]


def sum_over_sequence(routers: Sequence[Any], over: Sequence[Peers]) -> None:
    """Let routers compute the balancing loss of whole sequences where these are spread over ranks."""

    def summed(counts_BE: Tensor) -> Tensor:
        counts_BE = counts_BE.clone()
        for peers in over:
            peers.sum_(counts_BE)
        return counts_BE

    for router in routers:
        router.sum_over_sequence = torch.compiler.disable(summed)


def scale_balance_loss(routers: Sequence[Any], global_tokens: int) -> None:
    """Divide the balancing loss like the main one."""
    for router in routers:
        router.loss_scale.fill_(1 / global_tokens)


def forget_visits(routers: Sequence[Any]) -> None:
    """Forget the visits of a step that is made again."""
    for router in routers:
        router.tokens_per_expert_E.zero_()


def update_balance(routers: Sequence[Any], peers: Peers) -> None:
    """Update all routers by the visits of the global batch, in one exchange.

    `peers` hold the same layers and see the other tokens.
    """
    counts = peers.sum_(torch.stack([router.tokens_per_expert_E for router in routers]))
    for router, counts_E in zip(routers, counts, strict=True):
        router.update_balance(counts_E)
