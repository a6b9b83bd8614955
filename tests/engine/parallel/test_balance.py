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
    """Peers that hold as much as this rank, and `extra`."""

    def __init__(self, extra: int = 0):
        self.extra, self.exchanges = extra, 0

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.exchanges += 1
        return tensor.mul_(2).add_(self.extra)


def router(visits: list[int], rate: float = 0.1) -> Any:
    spec = ExpertSpec(num_experts=len(visits), top_k=1, expert_ffn_size=8, balance_rate=rate, balance_loss=0.01)
    made = Router(4, spec)
    made.init_buffers()
    made.tokens_per_expert_E.copy_(torch.tensor(visits, dtype=torch.int64))
    return made


def test_the_bias_follows_the_visits_of_all_ranks_together() -> None:
    """This rank saw the first expert most; all ranks together saw the second most."""
    peers = SimpleNamespace(sum_=lambda counts: counts.add_(torch.tensor([0, 9, 0])))
    routers = [router([5, 0, 1]), router([0, 0, 9])]
    before = [one.balance_bias_E.clone() for one in routers]
    update_balance(routers, peers)  # type: ignore[arg-type]
    moved = [(one.balance_bias_E - bias).sign().tolist() for one, bias in zip(routers, before, strict=True)]
    assert moved == [[0.0, -1.0, 1.0], [1.0, -1.0, -1.0]]
    assert all(not one.tokens_per_expert_E.any() for one in routers), "the next step counts anew"


def test_all_routers_take_one_exchange() -> None:
    peers = Others()
    update_balance([router([1, 2]) for _ in range(4)], peers)  # type: ignore[arg-type]
    assert peers.exchanges == 1


def test_visits_of_a_step_that_is_made_again_do_not_count() -> None:
    routers = [router([5, 1]), router([2, 2])]
    bias = routers[0].balance_bias_E.clone()
    forget_visits(routers)
    assert not any(one.tokens_per_expert_E.any() for one in routers)
    assert torch.equal(routers[0].balance_bias_E, bias)


def test_a_sequences_counts_are_summed_over_all_that_hold_a_part_of_it() -> None:
    over = [Others(1), Others(10)]
    routers = [router([0, 0])]
    sum_over_sequence(routers, over)  # type: ignore[arg-type]
    counts = torch.tensor([[1.0, 3.0]])
    assert routers[0].sum_over_sequence(counts).tolist() == [[16.0, 24.0]]
    assert counts.tolist() == [[1.0, 3.0]], "the rank's own counts stay"


def test_the_balancing_loss_is_a_mean_over_the_global_batch() -> None:
    routers = [router([0, 0]), router([0, 0])]
    scale_balance_loss(routers, 64)
    assert [float(one.loss_scale) for one in routers] == [1 / 64] * 2


def test_every_stages_routers_are_found_in_order() -> None:
    parts = [SimpleNamespace(balance_modules=lambda names=names: names) for names in (["a", "b"], [], ["c"])]
    assert routers_of(parts) == ["a", "b", "c"]
