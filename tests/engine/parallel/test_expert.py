"""Experts spread over ranks, which are threads here, against the same experts on one rank; uneven and with drops."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.parallel.ranks import FakePeers, Ranks, all_to_all

from trainspec_cli.engine.models.experts import Experts, dispatch_here, sort_by_expert
from trainspec_cli.engine.parallel import expert
from trainspec_cli.engine.parallel.expert import SpreadDispatch, apply_expert_parallel, even_splits, read_splits
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec

EXPERTS, TOP, HIDDEN = 6, 2, 8
MODEL = DecoderModel(
    1, HIDDEN, 1, 1, 8, 8, 8, experts=ExpertSpec(EXPERTS, TOP, expert_ffn_size=4, bias=True, capacity_factor=9.0)
)


def experts_of(first: int, count: int) -> Experts:
    """The experts `first` to `first + count` - 1, in fp64, the same wherever they stand."""
    made = Experts(MODEL).double()
    for number, (name, parameter) in enumerate(list(made.named_parameters())):
        full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        setattr(made, name, torch.nn.Parameter(full[first : first + count]))
    return made


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts (the last number is none), their weights, and a gradient of the output."""
    drawn = torch.Generator().manual_seed(10 + rank)
    tokens = 3 + 2 * rank
    x, dy = (torch.randn(tokens, HIDDEN, generator=drawn, dtype=torch.float64) for _ in range(2))
    indices = torch.stack([torch.randperm(EXPERTS + 1, generator=drawn)[:TOP] for _ in range(tokens)])
    indices[indices == 4] = 1  # one expert that nobody visits
    weights = torch.rand(tokens, TOP, generator=drawn, dtype=torch.float64).masked_fill(indices == EXPERTS, 0.0)
    return x, indices, weights, dy


@pytest.mark.parametrize("size", [2, 3])
def test_spread_experts_give_what_they_give_on_one_rank(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(expert.dist, "all_to_all_single", all_to_all)
    whole, ranks = experts_of(0, EXPERTS), Ranks(size)
    wanted, wanted_dx, wanted_weights = [], [], []
    for rank in range(size):
        x, indices, weights, dy = batch(rank)
        x.requires_grad_()
        weights.requires_grad_()
        out = dispatch_here(x, indices, weights, whole)
        out.backward(dy)
        wanted.append(out.detach())
        wanted_dx.append(x.grad)
        wanted_weights.append(weights.grad)
    each = EXPERTS // size

    def of_rank(rank: int) -> list[torch.Tensor]:
        own, dispatch = experts_of(rank * each, each), SpreadDispatch(EXPERTS, FakePeers(ranks, rank), sort_by_expert)  # type: ignore[arg-type]
        x, indices, weights, dy = batch(rank)
        x.requires_grad_()
        weights.requires_grad_()
        out = dispatch(x, indices, weights, own)
        out.backward(dy)
        return [out.detach(), x.grad, weights.grad, *(parameter.grad for parameter in own.parameters())]  # type: ignore[list-item]

    for rank, (out, dx, dweights, *gradients) in enumerate(ranks.run(of_rank)):
        torch.testing.assert_close(out, wanted[rank])
        torch.testing.assert_close(dx, wanted_dx[rank])
        torch.testing.assert_close(dweights, wanted_weights[rank])
        for gradient, parameter in zip(gradients, whole.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(gradient, parameter.grad[rank * each : (rank + 1) * each])


class Mixture(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.experts = Experts(MODEL)
        self.experts.down.requires_grad_(False)
        self.dispatch: Any = dispatch_here


def test_a_rank_keeps_its_own_experts_and_knows_where_they_lie() -> None:
    model: Any = torch.nn.Module()
    model.ffn = Mixture()
    model.expert_modules = lambda: [model.ffn]
    peers = SimpleNamespace(rank=2, size=3, group="ep", time=nullcontext)
    cuts = apply_expert_parallel(model, peers, sort_by_expert)  # type: ignore[arg-type]
    assert set(cuts) == {f"ffn.experts.{leaf}" for leaf in ("up", "down", "up_bias", "down_bias")}
    assert {(cut.dim, cut.full_size, cut.index, cut.count, cut.group) for cut in cuts.values()} == {(0, 6, 2, 3, "ep")}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.ffn.experts.named_parameters()}
    assert shapes == {"up": (2, 8, 8), "down": (2, 4, 8), "up_bias": (2, 8), "down_bias": (2, 8)}
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["ffn.experts.down"]
    assert isinstance(model.ffn.dispatch, SpreadDispatch)
    assert (model.ffn.dispatch.num_experts, model.ffn.dispatch.peers) == (6, peers)


def test_splits_are_the_copies_that_go_and_come() -> None:
    counts, came = torch.tensor([[1, 2], [0, 4]]), torch.tensor([[5, 0], [3, 3]])
    assert read_splits(counts, came, 99) == ([3, 4], [5, 6])
    assert even_splits(counts, came, 10) == ([5, 5], [5, 5])
