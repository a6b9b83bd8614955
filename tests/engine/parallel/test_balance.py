"""Experts' visits: counted over the global batch, whatever it is spread over, and forgotten with a step that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from trainspec_cli.engine.models.experts import Router
from trainspec_cli.engine.parallel.pipeline import (
    forget_visits,
    routers_of,
    scale_balance_loss,
    sum_over_sequence,
    update_balance,
)
from trainspec_cli.recipe.keys.model import ExpertSpec


class Others:
    """A group whose other members hold `extra`."""

    def __init__(self, *extra: float):
        self.extra, self.exchanges = torch.tensor(extra), 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        return tensor.add_(self.extra.to(tensor.dtype))


def router(*visits: int) -> Any:
    spec = ExpertSpec(num_experts=len(visits), top_k=1, expert_ffn_size=8, balance_rate=0.1, balance_loss=0.01)
    made = Router(4, spec)
    made.init_buffers()
    made.tokens_per_expert_E.copy_(torch.tensor(visits))
    return made


def test_the_bias_follows_the_visits_of_all_ranks_together_in_one_exchange() -> None:
    """This rank saw the first expert most; all ranks together saw the second most."""
    peers = Others(0, 9, 0)
    routers = [router(5, 0, 1), router(0, 0, 9)]
    update_balance(routers, peers)  # type: ignore[arg-type]
    assert [one.balance_bias_E.sign().tolist() for one in routers] == [[0.0, -1.0, 1.0], [1.0, -1.0, -1.0]]
    assert all(not one.tokens_per_expert_E.any() for one in routers), "the next step counts anew"
    assert peers.exchanges == 1


def test_visits_of_a_step_that_is_made_again_do_not_count() -> None:
    routers = [router(5, 1), router(2, 2)]
    forget_visits(routers)
    assert not any(one.tokens_per_expert_E.any() or one.balance_bias_E.any() for one in routers)


def test_a_sequences_counts_are_summed_over_all_that_hold_a_part_of_it() -> None:
    (one,) = routers_of([SimpleNamespace(balance_modules=lambda: [router(0, 0)])])
    sum_over_sequence([one], [Others(1, 1), Others(10, 20)])  # type: ignore[list-item]
    counts = torch.tensor([[1.0, 3.0]])
    assert one.sum_over_sequence(counts).tolist() == [[12.0, 24.0]]
    assert counts.tolist() == [[1.0, 3.0]], "the rank's own counts stay"


def test_the_balancing_loss_is_a_mean_over_the_global_batch() -> None:
    routers = [router(0, 0), router(0, 0)]
    scale_balance_loss(routers, 64)
    assert [float(one.loss_scale) for one in routers] == [1 / 64] * 2
