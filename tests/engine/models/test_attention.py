"""Windows, sinks and documents against scores written out, in fp64, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch

from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.attention import CausalCore, MultiHeadLatentAttention, carry_sinks
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.models.rope import rope_angles, score_factor
from trainspec_cli.recipe.keys.model import DecoderModel, LatentAttentionSpec, RopeScaling


def written_out(q, k, v, window, sinks, documents=None):
    """Over (B, S, H, E): every score, the mask, the softmax with the sink."""
    seq, heads, size = q.shape[1:]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(size)
    ahead = torch.arange(seq)[:, None] - torch.arange(seq)
    hidden = (ahead < 0) | (ahead >= (window or seq))
    if documents is not None:
        hidden = hidden | (documents[:, None, :, None] != documents[:, None, None, :])
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1)[..., :seq], v)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 5 + [1] * 6, [0] * 2 + [1] * 8 + [2]])])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 11, 50])
def test_core_equals_the_scores_written_out(window, with_sinks, documents) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 11, 4, 8), (2, 11, 2, 8), (2, 11, 2, 8), (4,))
    q, k, v, sinks = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
    core = CausalCore(window=window, scale=1 / math.sqrt(8), sinks=with_sinks)
    wide_q, wide_k = carry_sinks(q, k, sinks, 1 / math.sqrt(8)) if with_sinks else (q, k)
    inputs = (q, k, v, sinks) if with_sinks else (q, k, v)
    mask = None if documents is None else (documents[:, :, None] == documents[:, None]).tril()[:, None]
    found = core(wide_q, wide_k, v, mask)
    expected = written_out(q, k, v, window, sinks if with_sinks else None, documents)
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


@pytest.mark.parametrize("latent", [None, LatentAttentionSpec(16, 0, 8, 8, 8)], ids=["plain", "latent"])
def test_the_loss_of_packed_documents_is_the_sum_of_their_own(latent) -> None:
    """Whatever their positions are in the row, and padding changes nothing."""
    model = Decoder(DecoderModel(2, 32, 4, 2, 8, 48, 61, mla=latent), 24).double()
    for number, parameter in enumerate(model.parameters()):
        parameter.data.normal_(0.0, 0.3, generator=torch.Generator().manual_seed(number))
    model.init_buffers()
    tokens = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    lengths = [7, 9, 4]
    documents = torch.repeat_interleave(torch.arange(-1, 2).roll(-1), torch.tensor(lengths))[None]
    targets = torch.where(documents >= 0, tokens.roll(-1, dims=1), IGNORED_TARGET)
    alone = [model(*part) for part in zip(tokens.split(lengths, 1), targets.split(lengths, 1), strict=True)]
    assert model(tokens, targets, documents).item() == pytest.approx(sum(loss.item() for loss in alone[:2]), rel=1e-6)
    assert model(tokens, targets).item() != pytest.approx(sum(loss.item() for loss in alone[:2]), rel=1e-4)
