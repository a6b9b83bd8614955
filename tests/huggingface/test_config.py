from dataclasses import replace

import pytest

from trainspec_cli.errors import RecipeError
from trainspec_cli.huggingface.config import differences, model_type, read_model, write_config
from trainspec_cli.spec.recipe.model import DecoderModel, HybridModel
from trainspec_cli.spec.recipe.model_parts import ExpertSpec, LatentAttentionSpec, RopeScaling
from trainspec_cli.spec.structure import build

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
        ({"model_type": "gpt2"}, "x has model_type 'gpt2'; supported are llama, mistral"),
        ({"hidden_act": "gelu"}, "x has hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "dynamic"}}, "x scales its rotary positions by 'dynamic'"),
        ({"quantization_config": {"bits": 4}}, "x has quantization_config"),
    ],
)
def test_another_model_is_refused_by_name(change, words):
    with pytest.raises(RecipeError, match=words):
        read_model(write_config(LLAMA, 1024, "bfloat16") | change, "x")


def test_a_key_that_is_missing_is_named():
    config = write_config(LLAMA, 1024, "bfloat16")
    del config["intermediate_size"]
    with pytest.raises(RecipeError, match="x has no 'intermediate_size'"):
        read_model(config, "x")


def test_models_that_have_no_place_there_name_every_key():
    strange = replace(
        LLAMA, mla=LatentAttentionSpec(8), experts=ExpertSpec(8, 2, 48, shared_experts=1, balance_rate=0.1)
    )
    with pytest.raises(RecipeError) as raised:
        model_type(strange)
    paths = [problem.path for problem in raised.value.problems]
    assert paths == ["model.mla", "model.experts.shared_experts", "model.experts.balance_rate"]
    with pytest.raises(RecipeError, match=r"`model.family` is hybrid"):
        model_type(HybridModel(64, 512, 2))


def test_what_only_steers_training_may_differ():
    mine = replace(MODELS["mixtral"], name="mine", experts=ExpertSpec(8, 2, 48, balance_loss=0.01))
    assert differences(mine, MODELS["mixtral"]) == {}
    other = replace(mine, experts=ExpertSpec(8, 4, 48), norm_eps=1e-6)
    assert differences(other, mine) == {"norm_eps": (1e-6, 1e-5), "experts.top_k": (4, 2)}
