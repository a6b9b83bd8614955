"""The decoder against an independent reference: loops and complex rotations in fp64."""

import math

import pytest
import torch

from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.planner.workload.transformer import count_params, flops_per_token
from trainspec_cli.recipe.keys.model import DecoderModel

GROUPED = DecoderModel(
    num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=61, rope_theta=500.0
)
TIED = DecoderModel(
    num_layers=1,
    hidden_size=24,
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    ffn_size=40,
    vocab_size=50,
    tied_embeddings=True,
)


def build(model: DecoderModel, seq_len: int = 16) -> Decoder:
    decoder = Decoder(model, seq_len)
    for name, parameter in decoder.named_parameters():
        decoder.init_parameter(name, parameter.data, torch.Generator().manual_seed(len(name)))
        parameter.data.mul_(3)  # away from the near-linear start
    decoder.init_buffers()
    return decoder.double()


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(vector, position, theta):
    """Pairs (i, i + E/2) as complex numbers, turned by position * theta^(-2i/E)."""
    half = len(vector) // 2
    angles = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat((turned.real, turned.imag))


def reference_attention(weights, prefix, x, model):
    seq_len, size = len(x), model.head_dim
    q, k, v = (x @ weights[f"{prefix}.{name}.weight"].T for name in ("q", "k", "v"))
    out = torch.zeros(seq_len, model.num_heads * size, dtype=torch.float64)
    for head in range(model.num_heads):
        shared = head // (model.num_heads // model.num_kv_heads)
        mine, theirs = slice(head * size, (head + 1) * size), slice(shared * size, (shared + 1) * size)
        for i in range(seq_len):
            query = rotate(q[i, mine], i, model.rope_theta)
            scores = torch.stack([query @ rotate(k[j, theirs], j, model.rope_theta) for j in range(i + 1)])
            out[i, mine] = (scores / math.sqrt(size)).softmax(0) @ v[: i + 1, theirs]
    return out @ weights[f"{prefix}.out.weight"].T


def reference_logits(decoder: Decoder, tokens):
    model, weights = decoder.model, dict(decoder.named_parameters())
    x = weights["embed.weight"][tokens]
    for layer in range(model.num_layers):
        block = f"blocks.{layer}"
        normed = rms_norm(x, weights[f"{block}.attention_norm.weight"], model.norm_eps)
        x = x + reference_attention(weights, f"{block}.attention", normed, model)
        normed = rms_norm(x, weights[f"{block}.ffn_norm.weight"], model.norm_eps)
        gate, up = (normed @ weights[f"{block}.ffn.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + (-gate).exp()) * up) @ weights[f"{block}.ffn.down.weight"].T
    x = rms_norm(x, weights["norm.weight"], model.norm_eps)
    return x @ weights["embed.weight" if model.tied_embeddings else "head.weight"].T


@pytest.mark.parametrize("model", [GROUPED, TIED], ids=["grouped", "tied"])
def test_logits_equal_the_reference(model):
    decoder = build(model)
    decoder.init_buffers()  # the tables in the model's own fp64
    tokens = torch.randint(0, model.vocab_size, (1, 11), generator=torch.Generator().manual_seed(0))
    expected = reference_logits(decoder, tokens[0])
    torch.testing.assert_close(decoder(tokens)[0], expected, rtol=1e-5, atol=1e-6)


def test_loss_is_the_summed_cross_entropy_of_the_logits():
    decoder = build(GROUPED).float()
    tokens = torch.randint(0, GROUPED.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    targets = tokens.roll(-1, 1)
    expected = torch.nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(decoder(tokens, targets), expected)


def test_a_later_token_changes_nothing_before_it():
    decoder = build(GROUPED)
    tokens = torch.randint(0, GROUPED.vocab_size, (1, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % GROUPED.vocab_size
    before, after = decoder(tokens)[0], decoder(changed)[0]
    assert torch.equal(before[:8], after[:8])
    assert not torch.allclose(before[8:], after[8:])


@pytest.mark.parametrize("model", [GROUPED, TIED], ids=["grouped", "tied"])
def test_the_planner_counts_its_parameters(model):
    assert count_params(model) == sum(parameter.numel() for parameter in build(model).parameters())


def test_flops_per_token_equal_those_that_torch_counts():
    """Forward and backward; attention is counted over the causal half, torch's counter over the full square."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    decoder, seq_len = build(GROUPED).float(), 16
    tokens = torch.zeros(2, seq_len, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        decoder(tokens).sum().backward()
    attention = 6.0 * GROUPED.num_layers * GROUPED.num_heads * GROUPED.head_dim * seq_len
    assert counter.get_total_flops() == (flops_per_token(GROUPED, seq_len) + attention) * tokens.numel()
