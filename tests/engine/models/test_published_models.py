"""The decoders and hybrids against the public implementations of the models that they stand for, on tiny sizes in fp64.

`tests/engine/build/test_initial.py` compares the other decoders, whose checkpoints can be loaded. `pip install
transformers` runs them; the project itself does not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, LatentAttentionSpec, RopeScaling

transformers = pytest.importorskip("transformers", reason="pip install transformers to compare with its models")

SIZES = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48, "vocab_size": 61}
PUBLIC = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
ATTENTION = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
}
Weights = dict[str, torch.Tensor]
Translate = Callable[[str, Weights], torch.Tensor]


def logits_of_both(public: Any, model: Any, translate: Translate) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (public, ours), of the same random weights."""
    generator = torch.Generator().manual_seed(0)
    public = public.double().eval()
    for parameter in public.parameters():
        parameter.data.normal_(0.1, 0.3, generator=generator)
    weights = {**dict(public.named_parameters()), **dict(public.named_buffers())}
    ours = build_model(model, 24).double()
    ours.init_buffers()
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            parameter.copy_(translate(name, weights))
        tokens = torch.randint(0, model.vocab_size, (2, 21), generator=generator)
        return public(tokens).logits, ours(tokens)


def assert_same(public: Any, model: Any, translate: Translate) -> None:
    """Its scans and rotations are in fp32 whatever the rest is in."""
    expected, found = logits_of_both(public, model, translate)
    expected = expected.double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def dense(name: str, weights: Weights) -> torch.Tensor:
    """A decoder's parameter in the names of Hugging Face's llama."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return weights[f"{NAMES[parts[0]]}.weight"]
    prefix = f"model.layers.{parts[1]}"
    if parts[2] == "attention":
        return weights[f"{prefix}.self_attn.{ATTENTION[parts[3]]}.{parts[4]}"]
    if parts[2] == "ffn":
        return weights[f"{prefix}.mlp.{parts[3]}_proj.weight"]
    return weights[f"{prefix}.{NAMES[parts[2]]}.weight"]


def with_experts(name: str, weights: Weights) -> torch.Tensor:
    """Hugging Face holds experts' matrices as (out, in)."""
    parts = name.split(".")
    if parts[2:3] != ["ffn"]:
        return dense(name, weights)
    prefix = f"model.layers.{parts[1]}.mlp"
    if parts[3] == "router":
        return weights[f"{prefix}.gate.weight"]
    if parts[3] == "shared":
        return weights[f"{prefix}.shared_experts.{parts[4]}_proj.weight"]
    if parts[3] != "experts":
        return weights[f"{prefix}.{parts[3]}_proj.weight"]
    matrix = {"up": "gate_up_proj", "down": "down_proj"}[parts[4]]
    return weights[f"{prefix}.experts.{matrix}"].transpose(1, 2)


def gpt_oss(name: str, weights: Weights) -> torch.Tensor:
    """Its gates and linear halves alternate; its experts' matrices are (in, out)."""
    parts = name.split(".")
    prefix = f"model.layers.{parts[1]}" if parts[0] == "blocks" else ""
    if name.endswith("attention.sinks"):
        return weights[f"{prefix}.self_attn.sinks"]
    if name.endswith("attention_bias"):
        return weights[f"{prefix}.self_attn.o_proj.bias"]
    if parts[2:3] != ["ffn"]:
        return dense(name, weights)
    if parts[3] == "router":
        return weights[f"{prefix}.mlp.router.{parts[4]}"]
    public = {
        "up": "gate_up_proj",
        "down": "down_proj",
        "up_bias": "gate_up_proj_bias",
        "down_bias": "down_proj_bias",
    }[parts[4]]
    found = weights[f"{prefix}.mlp.experts.{public}"]
    return torch.cat((found[..., ::2], found[..., 1::2]), dim=-1) if parts[4].startswith("up") else found


LATENT = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q": "q_b_proj", "kv_norm": "kv_a_layernorm"}
LATENT |= {"kv_down": "kv_a_proj_with_mqa", "kv": "kv_b_proj", "out": "o_proj"}


def deepseek(name: str, weights: Weights) -> torch.Tensor:
    """Its rotated pairs are neighbours; ours are halves."""
    parts = name.split(".")
    if parts[2:3] != ["attention"]:
        return with_experts(name, weights)
    found = weights[f"model.layers.{parts[1]}.self_attn.{LATENT[parts[3]]}.weight"]
    if parts[3] == "q":
        heads = found.unflatten(0, (4, 12))
        return torch.cat((heads[:, :8], halves(heads[:, 8:], 1)), dim=1).flatten(0, 1)
    if parts[3] == "kv_down":
        return torch.cat((found[:16], halves(found[16:], 0)))
    return found


def halves(rows: torch.Tensor, dim: int) -> torch.Tensor:
    index = torch.arange(rows.shape[dim])
    return torch.cat((rows.index_select(dim, index[::2]), rows.index_select(dim, index[1::2])), dim=dim)


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 16}
DECODERS: dict[str, tuple[dict[str, Any], dict[str, Any], Translate]] = {
    "GptOss": (
        {
            "intermediate_size": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": YARN | {"truncate": False},
        },
        {
            "rope_scaling": RopeScaling("yarn", 4.0, 16, beta_fast=4.0, whole_bounds=False),
            "sliding_window": 6,
            "global_attention_every": 2,
            "gate_limit": 7.0,
            "attention_bias": "all",
            "attention_sinks": True,
            "experts": ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=12, bias=True),
        },
        gpt_oss,
    ),
    "DeepseekV3": (
        {
            "num_key_value_heads": 4,
            "head_dim": 4,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        },
        {
            "num_kv_heads": 4,
            "rope_scaling": RopeScaling("yarn", 4.0, 16, beta_fast=4.0),
            "mla": LatentAttentionSpec(16, 20, 8, 4, 6),
            "experts": ExpertSpec(
                num_experts=8,
                top_k=3,
                expert_ffn_size=12,
                shared_experts=1,
                first_dense_layers=1,
                score="sigmoid",
                weight_scale=2.5,
                num_groups=4,
                top_groups=2,
            ),
        },
        deepseek,
    ),
}
"""The public class -> (its configuration, our model's, how our parameters are named there)."""


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str) -> None:
    theirs, ours, translate = DECODERS[name]
    config = getattr(transformers, f"{name}Config")(**PUBLIC | {"num_hidden_layers": 2} | theirs)
    model = DecoderModel(**SIZES | {"num_layers": 2, "rope_theta": 100.0} | ours)
    assert_same(getattr(transformers, f"{name}ForCausalLM")(config), model, translate)


def mamba(prefix: str, inner: int, states: int) -> Translate:
    """The one matrix and the one convolution of the public layer, in parts."""

    def translate(name: str, weights: Weights) -> torch.Tensor:
        leaf = name.partition(".mamba.")[2]
        first, _, last = leaf.partition(".")
        if first in PARTS:
            rows = {"z": inner, "x": inner, "b": states, "c": states, "dt": None}
            return part(weights[f"{prefix}.in_proj.weight"], rows, first)
        if first.startswith("conv_"):
            found = part(weights[f"{prefix}.conv1d.{last}"], {"x": inner, "b": states, "c": states}, first[-1])
            return found.flatten(1) if last == "weight" else found
        public = {"a_log": "A_log", "skip": "D", "norm": "norm.weight", "out": "out_proj.weight"}
        return weights[f"{prefix}.{public.get(first, first)}"]

    return translate


PARTS = ("z", "x", "b", "c", "dt")


def part(whole: torch.Tensor, rows: dict[str, int | None], wanted: str) -> torch.Tensor:
    known = sum(size for size in rows.values() if size)
    sizes = [len(whole) - known if size is None else size for size in rows.values()]
    return dict(zip(rows, whole.split(sizes), strict=True))[wanted]


def test_mamba2() -> None:
    config = transformers.Mamba2Config(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=61,
        state_size=8,
        expand=2,
        head_dim=16,
        num_heads=4,
        n_groups=1,
        chunk_size=8,
        tie_word_embeddings=True,
        layer_norm_epsilon=1e-5,
        residual_in_fp32=False,
    )
    model = HybridModel(
        hidden_size=32,
        vocab_size=61,
        mamba_layers=2,
        mamba_head_dim=16,
        mamba_state_size=8,
        mamba_groups=1,
        tied_embeddings=True,
    )

    def translate(name: str, weights: Weights) -> torch.Tensor:
        parts = name.split(".")
        if parts[0] != "blocks":
            return weights[{"embed": "backbone.embeddings.weight", "norm": "backbone.norm_f.weight"}[parts[0]]]
        if parts[2] == "norm":
            return weights[f"backbone.layers.{parts[1]}.norm.weight"]
        return mamba(f"backbone.layers.{parts[1]}.mixer", 64, 8)(name, weights)

    assert_same(transformers.Mamba2ForCausalLM(config), model, translate)


def test_nemotron_h() -> None:
    config = transformers.NemotronHConfig(
        hidden_size=32,
        layers_block_type=["mamba", "mlp", "attention", "mamba"],
        vocab_size=61,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=8,
        expand=2,
        tie_word_embeddings=False,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        attn_implementation="eager",
    )
    model = HybridModel(
        hidden_size=32,
        vocab_size=61,
        mamba_layers=2,
        attention_layers=1,
        mlp_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        mamba_head_dim=16,
        mamba_num_heads=4,
        mamba_state_size=8,
        mamba_groups=2,
        activation="relu2",
        layer_pattern="M-*M",
    )

    def translate(name: str, weights: Weights) -> torch.Tensor:
        parts = name.split(".")
        ends = {"embed": "model.embeddings.weight", "norm": "model.norm_f.weight", "head": "lm_head.weight"}
        if parts[0] != "blocks":
            return weights[ends[parts[0]]]
        prefix = f"model.layers.{parts[1]}"
        if parts[2] == "mamba":
            return mamba(f"{prefix}.mixer", 64, 16)(name, weights)
        return weights[f"{prefix}.norm.weight" if parts[2] == "norm" else f"{prefix}.mixer.{parts[3]}_proj.weight"]

    def renamed(name: str, weights: Weights) -> torch.Tensor:
        return translate(name.replace("attention.out", "attention.o"), weights)

    assert_same(transformers.NemotronHForCausalLM(config), model, renamed)
