"""LoRA adapters under PEFT's names, and their adapter_config.json."""

from __future__ import annotations

from typing import Any

from trainspec_cli.huggingface.tensors import Parameter, Piece
from trainspec_cli.spec.recipe.lora import LoraSpec

ADAPTERS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_PROJECTIONS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def adapters_of(parameter: Parameter, lora: LoraSpec) -> list[Parameter]:
    """Return the two halves of a matrix's adapter, (R, D) and (F, R); none if it has no adapter."""
    owner, _, leaf = parameter.name.rpartition(".")
    if not lora.rank or leaf != "weight" or not owner.startswith("blocks."):
        return []
    if owner.rpartition(".")[2] not in lora.targets or len(parameter.shape) != 2:
        return []
    outputs, inputs = parameter.shape
    name = f"{_PREFIX}{parameter.pieces[0].tensor.removesuffix('.weight')}"
    shapes = {"lora_a": ("lora_A", (lora.rank, inputs)), "lora_b": ("lora_B", (outputs, lora.rank))}
    return [
        Parameter(f"{owner}.{ours}", shape, (Piece(f"{name}.{theirs}.weight", (0, 0), shape),))
        for ours, (theirs, shape) in shapes.items()
    ]


def adapter_config(lora: LoraSpec, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json. `base` names the frozen weights, as from_pretrained takes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": [_PROJECTIONS[target] for target in lora.targets],
        "bias": "none",
        "inference_mode": True,
    }
