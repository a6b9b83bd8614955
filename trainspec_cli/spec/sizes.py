"""The largest accepted numbers, so that loops over them end and their products stay in range."""

from __future__ import annotations

LARGEST_WHOLE = 10**15
LARGEST = 1e30
"""The limit of numbers that need not be whole."""

LARGEST_OF = {
    "num_layers": 10_000,
    "mamba_layers": 10_000,
    "attention_layers": 10_000,
    "mlp_layers": 10_000,
    "expert_layers": 10_000,
    "prediction_layers": 1_000,
    "first_dense_layers": 10_000,
    "blocks": 10_000,
    "num_experts": 65_536,
    "top_k": 65_536,
    "num_groups": 65_536,
    "top_groups": 65_536,
    "shared_experts": 65_536,
    "hidden_size": 10**7,
    "ffn_size": 10**8,
    "expert_ffn_size": 10**8,
    "shared_expert_ffn_size": 10**8,
    "num_heads": 10**6,
    "num_kv_heads": 10**6,
    "head_dim": 10**6,
    "vocab_size": 10**9,
    "widths": 10**6,
    "input_size": 10**6,
    "seq_len": 10**9,
    "max_steps": 10**12,
    "global_batch_size": 10**9,
    "micro_batch_size": 10**9,
    "num_nodes": 10**6,
    "devices_per_node": 10**5,
    "scaleup_devices": 10**6,
    "spare_nodes": 10**6,
    "replica_groups": 10**6,
    "min_groups": 10**6,
    "max_restarts_per_hour": 10**6,
    "samples": 10**9,
    "max_new_tokens": 10**6,
    "dp_replicate": 10**6,
    "dp_shard": 10**6,
    "cp": 10**6,
    "tp": 10**6,
    "pp": 10**4,
    "ep": 10**6,
    "etp": 10**6,
    "virtual_stages": 10**4,
    "rank": 10**6,
}
"""A key's last word -> its largest value: far beyond any real run, and small enough to loop over."""


def largest_of(path: str, value: int | float) -> int | float:
    general = LARGEST_WHOLE if isinstance(value, int) else LARGEST
    return LARGEST_OF.get(path.rpartition(".")[2], general)
