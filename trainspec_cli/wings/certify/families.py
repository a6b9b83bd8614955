"""The models that the clauses are measured on: small models with every feature of their families."""

from __future__ import annotations

from functools import partial

from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    ModelSpec,
)
from trainspec_cli.recipe.keys.run import TrainSection

SEQ_LEN = 64
SAMPLES = 8

_decoder = partial(
    DecoderModel, num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=256
)
_hybrid = partial(HybridModel, hidden_size=64, vocab_size=256, mamba_head_dim=16, mamba_state_size=16, mamba_groups=2)

FAMILIES: dict[str, ModelSpec] = {
    # Llama and Qwen3: grouped-query attention, query and key norms
    "dense": _decoder(qk_norm=True),
    "tied": _decoder(tied_embeddings=True),
    # Mixtral and Qwen3-MoE, balanced by a bias and by a loss
    "moe": _decoder(
        experts=ExpertSpec(num_experts=8, top_k=2, expert_ffn_size=48, balance_rate=0.001, balance_loss=0.01),
    ),
    # DeepSeek-V3: latent attention, expert groups, a shared expert
    "latent": _decoder(
        num_kv_heads=4,
        rotary_pairs="neighbours",
        mla=LatentAttentionSpec(
            kv_lora_rank=32, q_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16
        ),
        experts=ExpertSpec(
            num_experts=8,
            top_k=2,
            expert_ffn_size=48,
            shared_experts=1,
            first_dense_layers=1,
            score="sigmoid",
            num_groups=4,
            top_groups=2,
            weight_scale=2.5,
            balance_rate=0.001,
        ),
    ),
    # gpt-oss: windows, sinks, biases
    "windowed": _decoder(
        sliding_window=16,
        global_attention_every=2,
        attention_sinks=True,
        attention_bias="all",
        gate_limit=7.0,
        experts=ExpertSpec(num_experts=8, top_k=2, expert_ffn_size=48, bias=True),
    ),
    # Gemma 2 and 3, Granite: norms on both sides, limits of scores and logits, frequencies of windowed layers, scales
    "capped": _decoder(
        norm_offset=True,
        norm_places="both",
        qk_norm=True,
        sliding_window=16,
        global_attention_every=2,
        local_rope_theta=1e3,
        attention_softcap=5.0,
        logit_softcap=3.0,
        attention_scale=0.3,
        embedding_scale=8.0,
        residual_scale=0.5,
        logit_scale=0.5,
        activation="gelu_tanh",
        tied_embeddings=True,
    ),
    # GPT-NeoX, Cohere 2: LayerNorm, attention beside the feed-forward, biases, layers and parts that are not rotated
    "parallel": _decoder(
        norm="layer",
        norm_bias=True,
        parallel_residual="two_norms",
        gated_mlp=False,
        mlp_bias=True,
        attention_bias="all",
        rotary_fraction=0.5,
        rotary_pairs="neighbours",
        unrotated_every=2,
        activation="gelu",
    ),
    "mamba": _hybrid(mamba_layers=4),
    # Nemotron-H
    "hybrid": _hybrid(
        mamba_layers=2,
        attention_layers=1,
        mlp_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
    ),
    "resnet": ConvModel("resnet", input_size=(32, 32), widths=(8, 16), blocks=(1, 1), in_channels=1, num_classes=4),
    "unet": ConvModel("unet", input_size=(16, 16, 16), widths=(4, 8), in_channels=1, num_classes=4),
}

LOSSES: dict[str, TrainSection] = {}
"""Families with a user-defined loss, and the recipe section that specifies the loss."""


PLAIN_DECODER = _decoder()
"""A plain Llama, which every engine supports."""


def measure_alone(name: str, model: ModelSpec, loss: TrainSection | None = None) -> None:
    """Use only this model for all measurements in this process. `loss`: the recipe section that may specify a
    user-defined loss."""
    FAMILIES.clear()
    LOSSES.clear()
    FAMILIES[name] = model
    if loss is not None:
        LOSSES[name] = loss
