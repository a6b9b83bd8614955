"""Every model type of transformers that folders are read from and written to: the same logits and losses as
transformers at random weights, and the same bytes after a round trip."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.config import MODEL_TYPES, differences, model_type, read_model, write_config
from trainspec_cli.data.huggingface.folder import open_weights, read_config
from trainspec_cli.data.huggingface.safetensors import parameters, places_of, read_header
from trainspec_cli.engine.build.initial import MappedTensors, buffer_shares, load_tensors
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.models.hybrid import Hybrid
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.tools.export import assemble
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel, TextModel
from trainspec_cli.recipe.records import build

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

SEQ_LEN = 40
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
WIDE_HEADS = SIZES | {"head_dim": 16}
WINDOW = WIDE_HEADS | {"sliding_window": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SCALES = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 3.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "beta_fast": 4.0,
}  # fmt: skip
EXPERTS_EVERYWHERE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SCAN = {"hidden_size": 32, "vocab_size": 96, "chunk_size": 8, "pad_token_id": 0}
NEMOTRON_H = SCAN | {
    "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "ssm_state_size": 8,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
}  # fmt: skip
CASES: dict[str, list[dict[str, Any]]] = {
    "llama": [SIZES, SIZES | {"attention_bias": True, "mlp_bias": True}],
    "mistral": [WINDOW, WINDOW | {"sliding_window": None}],
    "ministral": [WINDOW],
    "qwen2": [SIZES],
    "qwen3": [WIDE_HEADS],
    "gemma": [WIDE_HEADS],
    "gemma2": [WINDOW | {"query_pre_attn_scalar": 20}],
    "gemma3_text": [
        WINDOW | {"num_hidden_layers": 7, "query_pre_attn_scalar": 20},
        WINDOW | {"num_hidden_layers": 7, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ],
    "phi3": [SIZES, SIZES | {"partial_rotary_factor": 0.5, "sliding_window": 8}],
    "olmo2": [SIZES],
    "olmo3": [
        SIZES | {"sliding_window": 8},
        SIZES | {"sliding_window": 8, "rope_parameters": {"full_attention": YARN, "sliding_attention": LOCAL}},
    ],
    "granite": [SIZES | SCALES | {"attention_bias": True, "mlp_bias": True}],
    "glm": [WIDE_HEADS | {"attention_bias": True}],
    "glm4": [WIDE_HEADS],
    "smollm3": [SIZES],
    "starcoder2": [SIZES | {"sliding_window": 8}],
    "stablelm": [
        SIZES | {"partial_rotary_factor": 0.5},
        SIZES | {"use_qkv_bias": True, "use_parallel_residual": True, "partial_rotary_factor": 0.25},
    ],
    "gpt2": [{"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64}],
    "gpt_neox": [SIZES | {"rotary_pct": 0.5}, SIZES | {"use_parallel_residual": False, "rotary_pct": 0.5}],
    "falcon": [
        SIZES,
        SIZES | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        SIZES | {"multi_query": False, "parallel_attn": False},
    ],
    "cohere": [SIZES],
    "cohere2": [WINDOW],
    "nemotron": [WIDE_HEADS],
    "exaone4": [WINDOW, WIDE_HEADS | {"sliding_window": None, "layer_types": ["full_attention"] * 5}],
    "ernie4_5": [WIDE_HEADS, WIDE_HEADS | {"use_bias": True}],
    "seed_oss": [WIDE_HEADS | {"mlp_bias": True}],
    "arcee": [WIDE_HEADS | {"mlp_bias": True}],
    "mixtral": [SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "qwen3_moe": [WIDE_HEADS | MOE],
    "qwen2_moe": [SIZES | MOE | {"shared_expert_intermediate_size": 24}],
    "olmoe": [SIZES | MOE],
    "granitemoe": [SIZES | SCALES | {"num_local_experts": 4, "num_experts_per_tok": 2}],
    "gpt_oss": [
        WINDOW | EXPERTS_EVERYWHERE | {"rope_parameters": YARN | {"truncate": False}},
        WINDOW | EXPERTS_EVERYWHERE | {"attention_bias": False, "swiglu_limit": 1.0, "rope_parameters": LOCAL},
    ],
    "mamba2": [
        SCAN | {"num_hidden_layers": 3, "state_size": 8, "head_dim": 16, "num_heads": 4, "n_groups": 2},
        SCAN | {
            "num_hidden_layers": 2, "state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1,
            "time_step_limit": [0.5, 0.7], "tie_word_embeddings": True,
        },
    ],
    "nemotron_h": [
        NEMOTRON_H | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        NEMOTRON_H | {
            "layers_block_type": ["linear_attention", "full_attention"], "time_step_min": 0.7, "mamba_num_heads": 6,
        },
    ],
    "bamba": [
        WIDE_HEADS | {
            "hidden_size": 64, "attn_layer_indices": [1, 3], "mamba_d_state": 8, "mamba_n_heads": 8,
            "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8,
        },
        SIZES | {
            "mamba_d_state": 8, "mamba_n_heads": 4, "tie_word_embeddings": True, "mamba_expand": 1,
            "rope_parameters": LOCAL | {"rope_theta": 100.0}, "attn_layer_indices": [0],
        },
    ],
}  # fmt: skip
LATENT = SIZES | {
    "kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
    "n_shared_experts": 2, "first_k_dense_replace": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
}  # fmt: skip
CASES |= {
    "deepseek_v3": [
        LATENT,
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
        LATENT | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ],
    "deepseek_v2": [
        LATENT | {"topk_method": "group_limited_greedy"},
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ],
}
SIGMOID = WIDE_HEADS | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
CASES |= {
    "glm4_moe": [SIGMOID, SIGMOID | {"use_qk_norm": True, "attention_bias": True, "n_group": 2, "topk_group": 1}],
    "glm4_moe_lite": [{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}],
    "solar_open": [SIGMOID],
    "dots1": [SIGMOID | {"norm_topk_prob": True}],
    "exaone_moe": [WINDOW | MOE | {"num_shared_experts": 2, "first_k_dense_replace": 2}],
    "hy_v3": [WIDE_HEADS | MOE | {"num_shared_experts": 2}],
    "minimax_m2": [
        WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2},
        WIDE_HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    ],
    "ernie4_5_moe": [
        SIZES | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16},
        SIZES | {
            "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 0,
            "moe_layer_start_index": 2, "moe_layer_interval": 2,
        },
    ],
}  # fmt: skip
NUMBERED = [(kind, number) for kind, cases in CASES.items() for number in range(len(cases))]


def test_every_type_has_a_case() -> None:
    assert set(CASES) == set(MODEL_TYPES)


def make(kind: str, number: int, folder: Path) -> torch.nn.Module:
    """Write a folder as transformers does, with weights that show every norm and bias."""
    torch.manual_seed(number)
    config = transformers.AutoConfig.for_model(kind, **CASES[kind][number])
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        biases = (buffer for name, buffer in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
        for tensor in (*theirs.parameters(), *biases):
            tensor.add_(torch.randn_like(tensor) * 0.1)
    theirs.save_pretrained(folder)
    return theirs


def described(config: dict[str, Any]) -> TextModel:
    content = read_model(config, "config.json")
    kinds: dict[Any, type[Any]] = {"decoder": DecoderModel, "hybrid": HybridModel}
    model, problems = build(kinds[content["family"]], content)
    assert problems == []
    return model


def load(folder: Path) -> tuple[TextModel, Decoder]:
    model = described(read_config(folder))
    ours = Hybrid(model, 64) if isinstance(model, HybridModel) else Decoder(model, 64)
    ours.init_buffers()
    shares = [Share(name, parameter) for name, parameter in ours.named_parameters()]
    load_tensors(folder, open_weights(folder, model), model, [*shares, *buffer_shares([ours])])
    return model, ours


@pytest.mark.parametrize(("kind", "number"), NUMBERED)
def test_logits_and_tensors_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    theirs = make(kind, number, tmp_path).eval()
    model, ours = load(tmp_path)
    # The biases of the choice of experts are not trained. Most types hold them in buffers, and ernie4_5_moe does not.
    trained = (parameter for parameter in theirs.parameters() if parameter.requires_grad)
    assert count_params(model) == sum(parameter.numel() for parameter in trained)
    tokens = torch.randint(1, 96, (2, SEQ_LEN))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    stored = read_header(tmp_path / "model.safetensors")
    full = ours.state_dict()
    for name, places in places_of(parameters(model)).items():
        tensor = assemble(places, full).contiguous()
        entry = stored[name]
        content = entry.file.read_bytes()[entry.start : entry.start + entry.bytes]
        assert hashlib.sha256(tensor.numpy().tobytes()).digest() == hashlib.sha256(content).digest(), name


@pytest.mark.parametrize(("kind", "number"), NUMBERED)
def test_a_written_config_means_the_same_to_transformers(kind: str, number: int, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(kind, **CASES[kind][number]).save_pretrained(tmp_path)
    model = described(read_config(tmp_path))
    assert model_type(model) == kind
    written = write_config(model, 64, "float32")
    transformers.AutoConfig.for_model(**written).save_pretrained(tmp_path)
    assert differences(model, described(read_config(tmp_path))) == {}


@pytest.mark.parametrize("kind", CASES)
def test_keys_that_are_left_out_mean_what_transformers_takes(kind: str, tmp_path: Path) -> None:
    """A config.json need not have keys whose values are the type's defaults."""
    sizes = {**CASES[kind][0], **({"head_dim": 8} if kind in ("gemma", "gemma2", "gemma3_text", "ernie4_5") else {})}
    transformers.AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path)
    whole = described(read_config(tmp_path))
    assert differences(whole, described({"model_type": kind, **sizes})) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "number"), NUMBERED)
def test_losses_of_training_are_those_of_transformers(kind: str, number: int, tmp_path: Path) -> None:
    """25 steps of SGD on the same tokens, without the auxiliary losses of routers."""
    theirs = make(kind, number, tmp_path).eval()  # without dropout
    _, ours = load(tmp_path)
    losses: list[list[float]] = [[], []]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in (theirs, ours)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(25):
        tokens = torch.randint(1, 96, (2, SEQ_LEN + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        logits = theirs(inputs).logits
        both = [
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
            ours(inputs, targets) / targets.numel(),
        ]
        for loss, optimizer, found in zip(both, optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_experts_in_mxfp4_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """The layout of the published gpt-oss folders: the experts' matrices in MXFP4, everything else in full."""
    sizes = CASES["gpt_oss"][0] | {"hidden_size": 64, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    torch.manual_seed(0)
    tensors = transformers.AutoModelForCausalLM.from_config(config).float().state_dict()
    for name, stack in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, rows, columns = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 124, (experts, columns, rows // 32), dtype=torch.uint8)
        else:
            tensors[name] = stack.contiguous()
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config.save_pretrained(tmp_path)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        attn_implementation="eager",
        dtype=torch.float32,
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    _, ours = load(tmp_path)
    tokens = torch.randint(1, 96, (2, SEQ_LEN))
    with torch.no_grad():
        expected, found = theirs(tokens).logits, ours(tokens)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # A rank of expert parallelism reads the same matrices of its experts.
    model = described(read_config(tmp_path))
    full = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    for name in ("blocks.0.ffn.experts.up", "blocks.0.ffn.experts.down"):
        part = full[name][2:4]
        share = SimpleNamespace(offsets=[2, 0, 0], local=torch.zeros_like(part))
        (pieces,) = [one.pieces for one in parameters(model) if one.name == name]
        assert list(MappedTensors(open_weights(tmp_path, model)).fill(share, pieces)) == []  # type: ignore[arg-type]
        assert torch.equal(share.local, part)


def test_weights_quantised_otherwise_are_refused() -> None:
    with pytest.raises(RecipeError) as refused:
        read_model({"model_type": "gpt_oss", **SIZES, "quantization_config": {"quant_method": "bitsandbytes"}}, "")
    assert refused.value.problems[0].code == "unsupported"
    assert "bitsandbytes" in refused.value.problems[0].message


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("mamba2", "use_bias", True),
        ("mamba2", "conv_kernel", 3),
        ("mamba2", "num_heads", 5),
        ("mamba2", "use_conv_bias", False),
        ("nemotron_h", "layers_block_type", ["linear_attention", "moe"]),
        ("nemotron_h", "hybrid_override_pattern", "M?"),
        ("nemotron_h", "num_nextn_predict_layers", 1),
        ("bamba", "attention_bias", True),
        ("bamba", "rope_parameters", LINEAR),
        ("gpt_oss", "swiglu_alpha", 1.5),
    ],
)
def test_variants_that_the_engine_does_not_have_are_refused_by_name(kind: str, key: str, value: object) -> None:
    content = {"model_type": kind, **CASES[kind][0]}
    if key == "hybrid_override_pattern":
        del content["layers_block_type"]
    with pytest.raises(RecipeError) as refused:
        read_model({**content, key: value}, "config.json")
    assert [problem.code for problem in refused.value.problems] == ["unsupported"]


def test_patterns_of_earlier_folders_mean_the_same() -> None:
    new = {"model_type": "nemotron_h", **CASES["nemotron_h"][0]}
    old = {key: value for key, value in new.items() if key != "layers_block_type"}
    assert read_model({**old, "hybrid_override_pattern": "M-*M"}, "") == read_model(new, "")
    kinds = ["mamba", "mlp", "attention", "mamba"]
    assert read_model({**old, "layers_block_type": kinds}, "") == read_model(new, "")
