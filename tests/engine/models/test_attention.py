"""Windows and sinks against scores written out, in fp64, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from trainspec_cli.engine.models.attention import CausalCore, MultiHeadLatentAttention, carry_sinks
from trainspec_cli.engine.models.rope import rope_angles, score_factor
from trainspec_cli.recipe.keys.model import DecoderModel, LatentAttentionSpec, RopeScaling


def written_out(q, k, v, window, sinks):
    """Over (B, S, H, E): every score, the mask, the softmax with the sink beside it."""
    seq, heads, size = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(size)
    ahead = torch.arange(seq)[:, None] - torch.arange(seq)
    hidden = (ahead < 0) | (ahead >= (window or seq))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1)[..., :seq], v)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 11, 50])
def test_core_equals_the_scores_written_out(window, with_sinks) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8), (4,))
    q, k, v, sinks = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
    core = CausalCore(window=window, scale=1 / math.sqrt(8), sinks=with_sinks)
    wide_q, wide_k = carry_sinks(q, k, sinks, 1 / math.sqrt(8)) if with_sinks else (q, k)
    inputs = (q, k, v, sinks) if with_sinks else (q, k, v)
    found, expected = core(wide_q, wide_k, v), written_out(q, k, v, window, sinks if with_sinks else None)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    found_gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for found_gradient, gradient in zip(
        found_gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found_gradient, gradient)


def test_values_may_be_narrower_than_keys() -> None:
    q, k, v = (torch.randn(1, 5, 2, size, dtype=torch.float64) for size in (8, 8, 6))
    torch.testing.assert_close(CausalCore()(q, k, v), written_out(q, k, v, None, None))


@pytest.mark.parametrize("scaling", [None, RopeScaling("yarn", 4.0, 16)], ids=["plain", "yarn"])
def test_latent_scores_are_of_whole_heads_the_rotated_part_included(scaling) -> None:
    """The heads' 12 numbers, 4 of which are rotated, divide the scores; YaRN multiplies them."""
    latent = LatentAttentionSpec(kv_lora_rank=16, q_lora_rank=0, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
    model = DecoderModel(1, 24, 2, 2, 12, 32, 50, mla=latent, rope_scaling=scaling)
    module = MultiHeadLatentAttention(model).double()
    angles = torch.cat([rope_angles(7, 4, 1e4)] * 2, dim=-1).double()
    x, cos, sin = torch.randn(2, 7, 24, dtype=torch.float64), angles.cos(), angles.sin()
    q, (k, v) = module._queries(x, cos, sin), module._keys_values(x, cos, sin)
    assert (q.shape, k.shape, v.shape) == ((2, 7, 2, 12), (2, 7, 2, 12), (2, 7, 2, 6))
    mixed = written_out(q * score_factor(scaling), k, v, None, None)
    torch.testing.assert_close(module(x, cos, sin), module.out(mixed.flatten(2)))
