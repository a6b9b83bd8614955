"""Routing and experts against loops over tokens in fp64; balancing; capacity."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from trainspec_cli.engine.models.experts import (
    Experts,
    MixtureOfExperts,
    Router,
    count_experts,
    sort_by_expert,
)
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec

SPEC = ExpertSpec(num_experts=6, top_k=2, expert_ffn_size=24, shared_experts=1, shared_gate=True)
MODEL = DecoderModel(
    num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, ffn_size=20, vocab_size=30, experts=SPEC
)


def build(model: DecoderModel = MODEL, **changes) -> MixtureOfExperts:
    assert model.experts is not None
    moe = MixtureOfExperts(replace(model, experts=replace(model.experts, **changes))).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.4, generator=generator)
    moe.router.init_buffers()
    return moe


def tokens(batch: int = 2, seq: int = 7, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, seq, 16, generator=generator, dtype=dtype, requires_grad=True)


def by_loops(moe: MixtureOfExperts, x_BSD: torch.Tensor) -> torch.Tensor:
    """Each token by itself: softmax, the two best, their weights normalised, each expert's SwiGLU."""
    rows = []
    for x in x_BSD.flatten(0, 1):
        scores = (moe.router.weight @ x).softmax(0)
        best = scores.topk(2)
        total = torch.zeros_like(x)
        for weight, expert in zip(best.values / best.values.sum(), best.indices.tolist(), strict=True):
            gate, up = (x @ moe.experts.up[expert]).chunk(2)
            total = total + weight * ((F.silu(gate) * up) @ moe.experts.down[expert])
        shared = moe.shared(x) * (moe.shared_gate[0] @ x).sigmoid()
        rows.append(total + shared)
    return torch.stack(rows).view_as(x_BSD)


def test_output_and_gradients_equal_loops_over_tokens() -> None:
    moe, x = build(), tokens()
    inputs = (x, *moe.parameters())
    found, expected = moe(x), by_loops(moe, x)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(x.shape, dtype=torch.float64)
    found_gradients = torch.autograd.grad((found * weight).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for found_gradient, gradient in zip(found_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found_gradient, gradient)


def test_copies_stand_in_their_experts_order_and_know_their_places() -> None:
    x, indices = torch.arange(4.0)[:, None], torch.tensor([[2, 0], [1, 2], [0, 3], [3, 1]])
    copies = sort_by_expert(x, indices, 3)
    assert copies.counts_E.tolist() == [2, 2, 2], "an index of 3 is an expert that nobody has"
    assert copies.x_MD[:, 0].tolist() == [0, 2, 1, 3, 0, 1, 2, 3]
    assert torch.equal(copies.source_M[copies.place_M], torch.arange(8))


@pytest.mark.parametrize("bias", [False, True])
def test_experts_without_visitors_have_zero_gradients(bias) -> None:
    experts = Experts(replace(MODEL, experts=replace(SPEC, bias=bias)))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    experts(torch.randn(5, 16), torch.tensor([0, 5, 0, 0, 0, 0])).pow(2).sum().backward()
    for parameter in experts.parameters():
        assert parameter.grad is not None and not parameter.grad[0].any() and parameter.grad[1].any()


def test_balance_bias_changes_the_choice_and_no_weight() -> None:
    moe, x = build(balance_rate=0.5), tokens()
    before, _ = moe.router(x)
    moe.router.balance_bias_E[3] = 10.0
    after, weights = moe.router(x)
    assert (after == 3).any(-1).all() and not (before == 3).any(-1).all()
    scores = F.linear(x, moe.router.weight).softmax(-1).gather(-1, after)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


def test_a_step_moves_the_bias_towards_the_mean_and_clears_the_counter() -> None:
    moe = build(balance_rate=0.25)
    moe(tokens())
    with torch.no_grad():
        moe(tokens())
    counts = moe.router.tokens_per_expert_E.clone()
    assert counts.sum() == 2 * 7 * 2, "forwards without gradients are not counted"
    moe.router.update_balance(torch.tensor([4, 4, 10, 0, 3, 3]))
    assert moe.router.balance_bias_E.tolist() == [0, 0, -0.25, 0.25, 0.25, 0.25]
    assert not moe.router.tokens_per_expert_E.any()


def sequence_balance(moe: MixtureOfExperts, x_SD: torch.Tensor, coefficient: float) -> torch.Tensor:
    """DeepSeek-V3, eq. 17-20, of one sequence."""
    scores = F.linear(x_SD, moe.router.weight).sigmoid()
    chosen = F.one_hot(scores.topk(2).indices, 6).sum(1).double()
    frequency = chosen.sum(0) * 6 / (2 * len(x_SD))
    return coefficient * (frequency * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def test_the_balance_loss_is_in_the_gradients_and_not_in_the_output() -> None:
    plain, balanced = build(score="sigmoid"), build(score="sigmoid", balance_loss=0.1)
    balanced.router.loss_scale.fill_(0.5)
    x = tokens()
    assert torch.equal(plain(x), balanced(x))
    plain(x).sum().backward()
    balanced(x).sum().backward()
    extra = sum(7 * sequence_balance(plain, sequence, 0.1) for sequence in x.detach())
    (expected,) = torch.autograd.grad(0.5 * extra, [plain.router.weight])
    torch.testing.assert_close(balanced.router.weight.grad - plain.router.weight.grad, expected)


def test_the_balance_loss_of_a_cut_sequence_is_that_of_the_whole() -> None:
    """Context and sequence parallelism cut the sequence; the counts are summed over the parts."""
    whole, parts = (build(score="sigmoid", balance_loss=0.1).router for _ in range(2))
    x = tokens(1, 8).detach()
    _, weights = whole(x)
    weights.sum().backward()
    counts = count_experts(whole(x)[0], 6)[None].double()
    parts.sum_over_sequence = lambda _: counts
    for part in x.chunk(2, dim=1):
        parts(part)[1].sum().backward()
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)


def test_a_token_stays_within_its_groups() -> None:
    router = build(num_groups=3, top_groups=1).router
    indices, _ = router(tokens())
    assert (indices // 2 == indices[..., :1] // 2).all(), "two experts a group, one group a token"
    grouped = F.linear(tokens(), router.weight).softmax(-1).unflatten(-1, (3, 2)).sum(-1)
    assert torch.equal(indices[..., 0] // 2, grouped.argmax(-1))


def test_a_group_counts_by_the_sum_of_its_two_best() -> None:
    router = build(num_groups=3, top_groups=1).router
    scores = torch.tensor([[[0.9, 0.0, 0.5, 0.5, 0.1, 0.1]]])
    assert sorted(router._choose(scores).flatten().tolist()) == [2, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_capacity_drops_the_lowest_weights_of_each_sequence(dtype) -> None:
    """(7 tokens x 2 / 6 experts) x 1.0 -> 3 copies an expert and sequence."""
    full, bounded = build().to(dtype), build(capacity_factor=1.0).to(dtype)
    x = tokens(dtype=dtype)
    (all_indices, all_weights), (indices, weights) = full.router(x), bounded.router(x)
    for sequence in range(2):
        for expert in range(6):
            wanted = all_weights[sequence][all_indices[sequence] == expert].sort(descending=True).values
            kept = weights[sequence][indices[sequence] == expert].sort(descending=True).values
            torch.testing.assert_close(kept, wanted[:3])
    assert (indices == 6).any() and not weights[indices == 6].any()
    bounded(x).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in bounded.parameters())
    assert x.grad.isfinite().all()


def test_router_scores_in_fp32_at_least() -> None:
    router = Router(16, SPEC).bfloat16()
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    router.init_buffers()
    assert router(tokens().bfloat16())[1].dtype == torch.float32
