"""Published families, tiny: the fields of their config.json."""

from __future__ import annotations

from typing import Any

SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 300,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 100.0, "rope_scaling": LLAMA3_ROPE},
    "llama_biased": {"model_type": "llama", "attention_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, "rope_theta": 1e6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
}
