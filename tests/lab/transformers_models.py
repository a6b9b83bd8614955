"""Small models of transformers whose types the engine's decoder does not have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainspec_cli.engine.tools.count_module import run
from trainspec_cli.recipe.keys.model import TransformersModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.tools import ModuleCount, ModuleRequest

VOCABULARY = 256
SEQ_LEN = 32
CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {  # learned positions, tied embeddings, dropout
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32,
        "max_position_embeddings": 64, "pad_token_id": 1, "dropout": 0.1,
    },
    "gptj": {  # parallel residual, a buffer of rotations, a head with a bias
        "n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "recurrent_gemma": {  # two kinds of blocks, a limit on logits
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1,
        "intermediate_size": 64, "lru_width": 32, "attention_window_size": 8,
    },
}  # fmt: skip


def config_of(kind: str, vocabulary: int = VOCABULARY) -> str:
    return json.dumps({"model_type": kind, "vocab_size": vocabulary, **CONFIGS[kind]})


def counted(
    config: str,
    folder: Path | None = None,
    lora: LoraSpec = LoraSpec(),  # noqa: B008
    *,
    seq_len: int = SEQ_LEN,
    compute: Literal["bf16", "fp32"] = "fp32",
    trusts: bool = False,
) -> ModuleCount:
    return run(ModuleRequest(config, str(folder or ""), seq_len, compute, lora, folder is not None, trusts))


@cache
def model_of(kind: str, lora: LoraSpec = LoraSpec(), compute: Literal["bf16", "fp32"] = "fp32") -> TransformersModel:  # noqa: B008
    found = counted(config_of(kind), lora=lora, compute=compute)
    assert found.model is not None, found.problems
    return found.model


def written(kind: str, folder: Path, vocabulary: int = VOCABULARY) -> Any:
    """Write a folder as transformers does; return the model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.loads(config_of(kind, vocabulary))))
    model.save_pretrained(folder)
    return model
