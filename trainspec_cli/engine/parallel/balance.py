"""Experts are kept evenly visited: counts of the global batch, and the routers' update after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.comm.exchange import Peers


def routers_of(parts: Sequence[Any]) -> list[Any]:
    return [router for part in parts for router in part.balance_modules()]


def sum_over_sequence(routers: Sequence[Any], over: Sequence[Peers]) -> None:
    """Where a sequence is spread over ranks, its balancing loss is of the whole sequence."""

    def summed(counts_BE: Tensor) -> Tensor:
        counts_BE = counts_BE.clone()
        for peers in over:
            peers.sum_(counts_BE)
        return counts_BE

    for router in routers:
        router.sum_over_sequence = torch.compiler.disable(summed)


def scale_balance_loss(routers: Sequence[Any], global_tokens: int) -> None:
    """The balancing loss is divided like the main one."""
    for router in routers:
        router.loss_scale.fill_(1 / global_tokens)


def forget_visits(routers: Sequence[Any]) -> None:
    """Of a step that is made again."""
    for router in routers:
        router.tokens_per_expert_E.zero_()


def update_balance(routers: Sequence[Any], peers: Peers) -> None:
    """`peers` hold the same layers and see the other tokens; one exchange for all routers."""
    counts = peers.sum_(torch.stack([router.tokens_per_expert_E for router in routers]))
    for router, counts_E in zip(routers, counts, strict=True):
        router.update_balance(counts_E)
