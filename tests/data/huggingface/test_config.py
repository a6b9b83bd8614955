from dataclasses import replace

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.config import differences, model_type, read_model, write_config
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, RopeScaling
from trainspec_cli.recipe.records import build

LLAMA = DecoderModel(2, 64, 4, 2, 16, 160, 512, rope_theta=5e5)
MODELS = {
    "llama": replace(LLAMA, rope_scaling=RopeScaling("llama3", 8.0, 8192)),
    "mistral": replace(LLAMA, sliding_window=4096, global_attention_every=0),
    "qwen2": replace(LLAMA, attention_bias="qkv", tied_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, rope_scaling=RopeScaling("yarn", 4.0, 4096)),
    "mixtral": replace(LLAMA, ffn_size=48, experts=ExpertSpec(8, 2, 48)),
    "qwen3_moe": replace(LLAMA, qk_norm=True, experts=ExpertSpec(8, 2, 48, normalise_weights=False)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_written_is_read_back(kind):
    config = write_config(MODELS[kind], 1024, "bfloat16")
    assert config["model_type"] == kind
    read, problems = build(DecoderModel, read_model(config, "config.json"))
    assert problems == []
    assert differences(read, MODELS[kind]) == {}


def test_configs_of_transformers_5_keep_the_rotation_in_one_place():
    config = write_config(LLAMA, 1024, "bfloat16")
    new = {key: value for key, value in config.items() if not key.startswith("rope_")}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    assert read_model(new, "config.json") == read_model(config, "config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, "x has model_type 'bloom'; supported are llama, mistral"),
        ({"hidden_act": "tanh"}, "x has hidden_act 'tanh'"),
        ({"rope_scaling": {"type": "dynamic"}}, "x has rotary embeddings scaled by 'dynamic'"),
        ({"quantization_config": {"bits": 4}}, "x has quantization_config"),
    ],
)
def test_another_model_is_refused_by_name(change, words):
    with pytest.raises(RecipeError, match=words):
        read_model(write_config(LLAMA, 1024, "bfloat16") | change, "x")


def test_a_key_that_is_missing_is_named():
    config = write_config(LLAMA, 1024, "bfloat16")
    del config["intermediate_size"]
    with pytest.raises(RecipeError, match="'intermediate_size'"):
        read_model(config, "x")


@pytest.mark.parametrize(
    ("kind", "key"),
    [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts_per_tok"), ("qwen3_moe", "moe_intermediate_size")],
)
def test_a_key_that_only_this_type_needs_is_named(kind, key):
    config = {name: value for name, value in write_config(MODELS[kind], 1024, "bfloat16").items() if name != key}
    with pytest.raises(RecipeError, match=f"x has no '{key}'"):
        read_model(config, "x")


@pytest.mark.parametrize(
    ("rope", "key"),
    [({"type": "yarn"}, "factor"), ({"type": "yarn", "factor": 2.0}, "max_position_embeddings"),
     ({"type": "llama3", "factor": 2.0}, "original_max_position_embeddings")],
)  # fmt: skip
def test_a_key_that_only_this_scaling_needs_is_named(rope, key):
    with pytest.raises(RecipeError, match=f"x has no '{key}'"):
        read_model(LEAST | {"rope_scaling": rope}, "x")


def test_models_that_have_no_place_there_name_every_key():
    strange = replace(LLAMA, attention_softcap=3.0, experts=ExpertSpec(8, 2, 48, bias=True, score="sigmoid", every=3))
    with pytest.raises(RecipeError) as raised:
        model_type(strange)
    paths = [problem.path for problem in raised.value.problems]
    assert {"model.attention_softcap", "model.experts.bias", "model.experts.every"} <= set(paths)
    with pytest.raises(RecipeError, match=r"`model.family`.* hybrid"):
        model_type(HybridModel(64, 512, 1, expert_layers=1, experts=ExpertSpec(4, 2, 32)))


def test_what_only_steers_training_may_differ():
    mine = replace(MODELS["mixtral"], name="mine", experts=ExpertSpec(8, 2, 48, balance_loss=0.01))
    assert differences(mine, MODELS["mixtral"]) == {}
    other = replace(mine, experts=ExpertSpec(8, 4, 48), norm_eps=1e-6)
    assert differences(other, mine) == {"norm_eps": (1e-6, 1e-5), "experts.top_k": (4, 2)}


def test_the_whole_config_of_each_type():
    """Keys and values as transformers names them."""
    shared = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 160, "vocab_size": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "max_position_embeddings": 1024, "rope_theta": 5e5, "rope_scaling": None,
        "torch_dtype": "bfloat16", "use_cache": True,
    }  # fmt: skip
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    llama3 = {
        "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }  # fmt: skip
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": True,
    }  # fmt: skip
    special = {
        "llama": ("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False, "rope_scaling": llama3}),
        "mistral": ("MistralForCausalLM", {"sliding_window": 4096}),
        "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "use_sliding_window": False}),
        "qwen3": (
            "Qwen3ForCausalLM", {"attention_bias": False, "use_sliding_window": False, "rope_scaling": yarn}
        ),
        "mixtral": ("MixtralForCausalLM", {"sliding_window": None, "intermediate_size": 48, **experts}),
        "qwen3_moe": (
            "Qwen3MoeForCausalLM",
            {"attention_bias": False, **experts, "num_experts": 8, "moe_intermediate_size": 48,
             "use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        ),
    }  # fmt: skip
    for kind, (architecture, own) in special.items():
        expected = shared | {"model_type": kind, "architectures": [architecture]} | own
        assert write_config(MODELS[kind], 1024, "bfloat16") == expected


LEAST = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
    "intermediate_size": 160, "vocab_size": 512,
}  # fmt: skip


def test_keys_that_are_left_out_have_transformers_defaults():
    read, problems = build(DecoderModel, read_model(LEAST, "x"))
    assert problems == []
    assert read == DecoderModel(2, 64, 4, 4, 16, 160, 512, name="llama", norm_eps=1e-6, hf_type="llama")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"_name_or_path": "mine", "tie_word_embeddings": True}, {"name": "mine", "tied_embeddings": True}),
        ({"_name_or_path": ""}, {"name": "llama"}),
        ({"num_key_value_heads": 2, "head_dim": 8}, {"num_kv_heads": 2, "head_dim": 8}),
        ({"attention_bias": True}, {"attention_bias": "all"}),
        ({"model_type": "qwen2"}, {"attention_bias": "qkv"}),
        ({"model_type": "qwen3"}, {"attention_bias": "none", "qk_norm": True}),
        ({"model_type": "mistral", "sliding_window": 9}, {"sliding_window": 9, "global_attention_every": 0}),
        ({"rope_theta": 5.0}, {"rope_theta": 5.0}),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 7.0}}, {"rope_theta": 7.0}),
        (
            {"max_position_embeddings": 99, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_seq_len": 99, "beta_fast": 32.0,
                              "beta_slow": 1.0, "whole_bounds": True}},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50,
                              "beta_fast": 9.0, "beta_slow": 3.0, "truncate": False}},
            {"rope_scaling": {"kind": "yarn", "factor": 2.0, "original_seq_len": 50, "beta_fast": 9.0,
                              "beta_slow": 3.0, "whole_bounds": False}},
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            {"experts": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 160, "normalise_weights": True}},
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
            {"experts": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 48, "normalise_weights": False}},
        ),
    ],
)  # fmt: skip
def test_each_key_is_read(given, read):
    found = read_model(LEAST | given, "x")
    assert {key: found[key] for key in read} == read


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [("hidden_size", -1, "-1 as `hidden_size`"), ("vocab_size", "9", "'9' as `vocab_size`"),
     ("num_key_value_heads", 1.5, "1.5 as `num_key_value_heads`"),
     ("rms_norm_eps", float("inf"), "inf as `rms_norm_eps`"), ("tie_word_embeddings", 1, "1 as `tie_word_embeddings`")],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(key, value, shown):
    with pytest.raises(RecipeError) as raised:
        read_model(LEAST | {key: value}, "x")
    (problem,) = raised.value.problems
    assert (problem.code, problem.file) == ("wrong_type", "x") and shown in problem.message


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (replace(LLAMA, gate_limit=7.0), "model.gate_limit"),
        (replace(LLAMA, learned_positions=64), "model.learned_positions"),
        (replace(LLAMA, attention_sinks=True), "model.attention_sinks"),
        (replace(LLAMA, attention_bias="qkv", experts=ExpertSpec(8, 2, 48)), "model.attention_bias"),
        (replace(LLAMA, sliding_window=8, global_attention_every=0, qk_norm=True), "model.qk_norm"),
        (replace(LLAMA, experts=ExpertSpec(8, 2, 48, normalise_weights=False)), "model.experts.normalise_weights"),
        (replace(LLAMA, experts=ExpertSpec(8, 2, 48, weight_scale=2.0)), "model.experts.weight_scale"),
        (replace(LLAMA, experts=ExpertSpec(8, 2, 48, num_groups=2)), "model.experts.num_groups"),
    ],
)
def test_each_key_without_a_place_is_named(model, path):
    with pytest.raises(RecipeError) as raised:
        model_type(model)
    assert [problem.path for problem in raised.value.problems] == [path]


def test_the_width_of_dense_layers_counts_where_there_are_any():
    experts = ExpertSpec(8, 2, 48)
    sparse, mixed = (replace(LLAMA, experts=replace(experts, first_dense_layers=dense)) for dense in (0, 1))
    assert differences(replace(sparse, ffn_size=99), sparse) == {}
    assert differences(replace(mixed, ffn_size=99), mixed) == {"ffn_size": (99, LLAMA.ffn_size)}


def test_keys_that_are_not_used_may_differ():
    mine = replace(LLAMA, name="mine", global_attention_every=5, experts=ExpertSpec(8, 2, 48, capacity_factor=3.0))
    theirs = replace(LLAMA, experts=ExpertSpec(8, 2, 48))
    assert differences(mine, theirs) == {}
    windowed = replace(mine, sliding_window=8)
    assert differences(windowed, replace(windowed, global_attention_every=1)) == {"global_attention_every": (5, 1)}
    assert differences(windowed, theirs)["sliding_window"] == (8, None)
