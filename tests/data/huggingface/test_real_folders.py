"""The small files of folders as transformers and well-known repositories write them: what is supported is read with the
published sizes, and every other type is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.huggingface.chat_template import find_template
from trainspec_cli.data.huggingface.config import MODEL_TYPES, read_model
from trainspec_cli.data.huggingface.folder import read_config
from trainspec_cli.data.huggingface.safetensors import _read_index, parameters
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.records import build

transformers = pytest.importorskip("transformers")

NO_LIMIT = int(1e30)
"""`model_max_length` of a tokenizer without a limit, as transformers writes it: 31 digits."""


def facts(
    layers: int, hidden: int, heads: int, kv_heads: int | None, ffn: int, vocab: int, **more: Any
) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab, **more}


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}

PUBLISHED = {
    "meta-llama/Llama-2-7b": (
        "llama", facts(32, 4096, 32, 32, 11008, 32000, pretraining_tp=1, rope_scaling=None), 6_738_415_616),
    "meta-llama/Llama-2-7b, first form": (
        "llama", facts(32, 4096, 32, None, 11008, 32000, torch_dtype="float16", pad_token_id=None), 6_738_415_616),
    "meta-llama/Llama-3.1-8B": (
        "llama", facts(32, 4096, 32, 8, 14336, 128256, rope_scaling=LLAMA3, eos_token_id=[128001, 128008, 128009],
                       rope_theta=500000.0, mlp_bias=False), 8_030_261_248),
    "meta-llama/Llama-3.2-1B": (
        "llama", facts(16, 2048, 32, 8, 8192, 128256, rope_scaling=LLAMA3 | {"factor": 32}, head_dim=64,
                       tie_word_embeddings=True), 1_235_814_400),
    "TinyLlama/TinyLlama-1.1B": ("llama", facts(22, 2048, 32, 4, 5632, 32000, attention_bias=None), 1_100_048_384),
    "HuggingFaceTB/SmolLM2-135M": (
        "llama", facts(30, 576, 9, 3, 1536, 49152, tie_word_embeddings=True, rope_theta=100000, torch_dtype="auto",
                       **{"transformers.js_config": {"dtype": {"int8": "auto"}}}), 134_515_008),
    "01-ai/Yi-6B": ("llama", facts(32, 4096, 32, 4, 11008, 64000, rope_theta=5000000.0), 6_061_035_520),
    "mistralai/Mistral-7B-v0.1": ("mistral", facts(32, 4096, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": (
        "mistral", facts(32, 4096, 32, 8, 14336, 32768, sliding_window=None, head_dim=None), 7_248_023_552),
    "mistralai/Mixtral-8x7B": (
        "mixtral", facts(32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2,
                         sliding_window=None, router_aux_loss_coef=0.02), 46_702_792_704),
    "Qwen/Qwen2.5-0.5B": (
        "qwen2", facts(24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True, use_mrope=False, sliding_window=32768,
                       use_sliding_window=False), 494_032_768),
    "Qwen/Qwen2.5-7B, long": ("qwen2", facts(28, 3584, 28, 4, 18944, 152064, rope_scaling=YARN), 7_615_616_512),
    "Qwen/Qwen3-0.6B": (
        "qwen3", facts(28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True, attention_bias=False,
                       rope_theta=1000000, **NO_WINDOW), 596_049_920),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe", facts(48, 2048, 32, 4, 6144, 151936, head_dim=128, decoder_sparse_step=1, mlp_only_layers=[],
                           **MOE, **NO_WINDOW), 30_532_122_624),
    # The tensors without the layer that predicts a further token, and with the biases of the choice
    "deepseek-ai/DeepSeek-V3, bf16": (
        "deepseek_v3", facts(61, 7168, 128, 128, 18432, 129280, n_routed_experts=256, n_shared_experts=1, n_group=8,
                             topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", num_experts_per_tok=8,
                             moe_layer_freq=1, first_k_dense_replace=3, norm_topk_prob=True, rms_norm_eps=1e-6,
                             routed_scaling_factor=2.5, num_nextn_predict_layers=1, moe_intermediate_size=2048,
                             kv_lora_rank=512, q_lora_rank=1536, ep_size=1, aux_loss_alpha=0.001, seq_aux=True,
                             rope_scaling=YARN | MSCALE | {"factor": 40}), 671_026_404_352 + 14_848),
    "deepseek-ai/DeepSeek-V2-Lite": (
        "deepseek_v2", facts(27, 2048, 16, 16, 10944, 102400, n_routed_experts=64, n_shared_experts=2, n_group=1,
                             topk_group=1, topk_method="greedy", scoring_func="softmax", num_experts_per_tok=6,
                             first_k_dense_replace=1, norm_topk_prob=False, q_lora_rank=None, v_head_dim=128,
                             moe_intermediate_size=1408, rms_norm_eps=1e-6,
                             rope_scaling=YARN | MSCALE | {"factor": 40}), 15_706_484_224),
}  # fmt: skip
"""Repository: (model_type, keys of its config.json that differ or are odd, published number of parameters)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_with_their_sizes(tmp_path: Path, name: str) -> None:
    kind, content, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "rms_norm_eps": 1e-5, **content}))
    model, problems = build(DecoderModel, read_model(read_config(tmp_path), "config.json"))
    assert problems == []
    assert sum(math.prod(piece.tensor_shape) for one in parameters(model) for piece in one.pieces) == count


OTHERS = (
    "bert", "bloom", "gemma3", "llama4", "minimax", "mpt", "opt", "phi",
    "qwen3_next", "t5", "whisper",
)  # fmt: skip
UNSTATED = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
"""Keys without a default, and layers without experts."""


@pytest.mark.parametrize("kind", [*MODEL_TYPES, *OTHERS])
def test_configs_of_transformers_are_read_or_refused_by_name(tmp_path: Path, kind: str) -> None:
    config = transformers.AutoConfig.for_model(kind, **UNSTATED.get(kind, {}))
    config.save_pretrained(tmp_path)
    content = read_config(tmp_path)
    if kind in OTHERS:
        with pytest.raises(RecipeError) as error:
            read_model(content, "config.json")
        assert [(one.code, kind in one.message) for one in error.value.problems] == [("unsupported", True)]
        return
    described = read_model(content, "config.json")
    if described["family"] == "hybrid":
        hybrid, problems = build(HybridModel, described)
        assert problems == []
        assert (hybrid.hidden_size, hybrid.vocab_size) == (config.hidden_size, config.vocab_size)
        assert hybrid.num_layers == config.num_hidden_layers * (2 if kind == "bamba" else 1)
        return
    model, problems = build(DecoderModel, described)
    assert problems == []
    sizes = (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads, model.vocab_size)
    heads = config.num_attention_heads
    kv_heads = {"falcon": 1, "gpt2": heads}.get(kind) or getattr(config, "num_key_value_heads", None) or heads
    assert sizes == (config.num_hidden_layers, config.hidden_size, heads, kv_heads, config.vocab_size)
    rope = getattr(config, "rope_parameters", {"rope_theta": model.rope_theta})  # GPT-2 has none
    assert model.rope_theta == rope.get("full_attention", rope)["rope_theta"]


TALK = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "so."},
    {"role": "user", "content": "really?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes."},
]
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% else %}"
    "{% set loop_messages = messages %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA31 = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    "        {%- set date_string = strftime_now('%Y') %}\n    {%- endif %}\n{%- endif %}\n"
    "{{- '<|start_header_id|>system\\n' + date_string }}\n{%- if tools is not none and tools is defined %}\n"
    "    {{- tools | tojson(indent=4) }}\n{%- endif %}\n{%- for message in messages %}\n"
    "    {{- message.role + '\\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
)
QWEN3 = (
    "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}\n"
    "{%- for message in messages[::-1] %}\n{%- set index = (messages|length - 1) - loop.index0 %}\n"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and not "
    "(message.content.startswith('<tool_response>')) %}\n{%- set ns.multi_step_tool = false %}\n"
    "{%- set ns.last_query_index = index %}\n{%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n"
    "{%- if message.role == 'assistant' and loop.index0 < ns.last_query_index %}\n"
    "{{- message.content.split('</think>')[-1].lstrip('\\n') }}\n{%- else %}\n{{- message.content }}\n{%- endif %}\n"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
)
MACROS = (
    "{%- macro show(value, depth=0) %}{%- if value is mapping %}{%- for key, inner in value.items() %}"
    "{{- key }}={{ show(inner, depth + 1) }};{%- endfor %}{%- else %}{{- value }}{%- endif %}{%- endmacro %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}{%- continue %}{%- endif %}{{ show(m) }}{%- endfor %}"
)
DEEP = "{% if messages %}" * 60 + "{% for m in messages %}{{ m.content }};{% endfor %}" + "{% endif %}" * 60
LONG = "{# " + "a comment of a long template " * 10_000 + "#}" + QWEN3
TEMPLATES = {
    "Llama-2": LLAMA2, "Llama-3.1": LLAMA31, "Qwen3": QWEN3, "gpt-oss": MACROS, "deep": DEEP, "long": LONG,
}  # fmt: skip


def token(content: str, **more: Any) -> dict[str, Any]:
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": content, **plain, **more}


DECODER = {str(number): token(f"[control_{number}]", special=True) for number in range(770)}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2": {
        "bos_token": token("<s>", __type="AddedToken"), "eos_token": token("</s>", __type="AddedToken"),
        "pad_token": None, "sp_model_kwargs": {}, "legacy": False, "model_max_length": NO_LIMIT,
    },
    "Mistral": {
        "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_prefix_space": None, "legacy": None,
        "added_tokens_decoder": DECODER, "additional_special_tokens": [], "model_max_length": NO_LIMIT,
    },
    "as a float": {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 1e30},
    "Qwen2.5": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "errors": "replace", "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "model_max_length": 131072,
    },
    "null limit": {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": None, "auto_map": {"A": ["b.C", None]}},
}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_tokenizer_configs_are_read_with_their_special_tokens(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**CONFIGS[config], "chat_template": "{{ bos_token }}"}))
    template = find_template(tmp_path / "tokenizer.json", None)
    assert (template.tokens["bos_token"], template.tokens["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize("place", ["file", "text", "list"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_chat_templates_render_as_in_transformers(tmp_path: Path, name: str, place: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = TEMPLATES[name]
    config: dict[str, Any] = dict(CONFIGS["Llama-2"])
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(source)
    else:
        tools = {"name": "tool_use", "template": "{{ other }}"}
        config["chat_template"] = source if place == "text" else [{"name": "default", "template": source}, tools]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    # A template's process takes 0.1 s to start, so that one place alone renders.
    template = find_template(tmp_path / "tokenizer.json", None)
    assert template.source == source
    if place == "list":
        tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
        rendered, _ = render_jinja_template([TALK], chat_template=source, **tokens)
        assert [template.render(TALK)] == rendered


def test_special_tokens_of_older_folders_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "x"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": token("<s>"), "eos_token": "<old>"}))
    assert find_template(tmp_path / "tokenizer.json", None).tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("model", ["BPE", "Unigram", "WordPiece", "WordLevel"])
def test_tokenizers_as_transformers_saves_them(tmp_path: Path, model: str) -> None:
    from tokenizers import Tokenizer, models

    made = {
        "BPE": lambda: models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
        "Unigram": lambda: models.Unigram([("<unk>", 0.0), ("a", -1.5), ("b", -2.0)], 0),
        "WordPiece": lambda: models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}),
        "WordLevel": lambda: models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"),
    }
    tokenizer = Tokenizer(made[model]())
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding(length=512)
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = LLAMA2
    fast.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["model_max_length"] == NO_LIMIT
    loaded = bpe.load(tmp_path / "tokenizer.json")
    assert loaded.token_to_id("</s>") is not None and len(loaded.encode("ab").ids) < 512
    template = find_template(tmp_path / "tokenizer.json", None)
    assert template.source == LLAMA2 and template.tokens["bos_token"] == "<s>"


@pytest.mark.parametrize("metadata", [{"total_size": 13476835328}, {"total_size": 1.3476835328e10}, {}, None])
def test_indices_of_weights_are_read(tmp_path: Path, metadata: object) -> None:
    names = {f"model.layers.{layer}.mlp.experts.{one}.w1.weight": f"model-{layer:05d}-of-00061.safetensors"
             for layer in range(61) for one in range(64)}  # fmt: skip
    content = {"weight_map": names} if metadata is None else {"metadata": metadata, "weight_map": names}
    (tmp_path / "index.json").write_text(json.dumps(content))
    assert _read_index(tmp_path / "index.json") == names


def test_generation_configs_are_read(tmp_path: Path) -> None:
    config = transformers.GenerationConfig(eos_token_id=[128001, 128009], max_length=NO_LIMIT)
    config.save_pretrained(tmp_path)
    found = read_config(tmp_path, "generation_config.json")
    assert found["eos_token_id"] == [128001, 128009] and found["max_length"] == 1e30
