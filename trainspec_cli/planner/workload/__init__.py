"""What each family of models costs: parameters, model FLOPs, and the work of its layers."""

from __future__ import annotations

from trainspec_cli.planner.workload import cnn, ssm, transformer
from trainspec_cli.planner.workload.adapters import adapter_params, trained_share
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import ConvModel, HybridModel, ModelSpec


def count_params(model: ModelSpec) -> int:
    """Every parameter once."""
    if isinstance(model, ConvModel):
        return cnn.count_params(model)
    if isinstance(model, HybridModel):
        return ssm.count_params(model)
    return transformer.count_params(model)


def count_active_params(model: ModelSpec) -> int:
    """Those that one token meets."""
    if isinstance(model, ConvModel):
        return cnn.count_params(model)
    if isinstance(model, HybridModel):
        return ssm.count_params(model, active=True)
    return transformer.count_active_params(model)


WHOLE = LoraSpec()


def flops_per_token(model: ModelSpec, seq_len: int, lora: LoraSpec = WHOLE) -> float:
    """Model FLOPs of forward and backward, a token (a sample, for images). Weights that adapters freeze have no
    gradients: 4 each instead of 6."""
    if isinstance(model, ConvModel):
        return cnn.flops_per_sample(model)
    if isinstance(model, HybridModel):
        return ssm.flops_per_token(model, seq_len)
    whole = transformer.flops_per_token(model, seq_len)
    if not lora.rank:
        return whole
    core = transformer.core_flops_per_token(model, seq_len)
    return 4 / 6 * (whole - core) + 6 * adapter_params(model, lora) + core


def attention_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    """The part of the model FLOPs that no weight takes part in: scores and values, or the state-space scan."""
    if isinstance(model, ConvModel):
        return 0.0
    if isinstance(model, HybridModel):
        return ssm.mixing_flops_per_token(model, seq_len)
    return transformer.core_flops_per_token(model, seq_len)


__all__ = ["attention_flops_per_token", "count_active_params", "count_params", "flops_per_token", "trained_share"]
