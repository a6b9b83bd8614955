"""A framework's facts and what a run chooses -> the software properties that time and memory depend on."""

from __future__ import annotations

from trainspec_cli.plan.setup import Software
from trainspec_cli.recipe.keys.framework import FrameworkSpec, StateFacts, SumFormat
from trainspec_cli.recipe.keys.layout import Sharding

SUM_BYTES: dict[SumFormat, float] = {"compute": 2.0, "fp32": 4.0}


def describe_software(
    facts: FrameworkSpec, sharding: Sharding, compiled: bool, accumulate: SumFormat, reduce: SumFormat
) -> Software:
    """Return the framework's properties in a run that shards so, and sums and exchanges gradients in these formats."""
    state: StateFacts = getattr(facts.states, sharding)
    sums_apart = facts.gradient_copy and accumulate == "fp32"
    copies = 0.0 if facts.steps_from_sums and sums_apart else state.step_copy_bytes
    return Software(
        counted=facts.counted,
        fused_attention=facts.fused_attention,
        attention_generation=facts.attention_generation,
        fused_kernels=compiled or facts.fused_kernels,
        fused_loss=(compiled and facts.compiles_loss) or facts.fused_loss,
        plain_loss=not facts.compiles_loss,
        cut_logit_bytes=facts.cut_logit_bytes,
        fused_accumulation=facts.fused_accumulation,
        overlap_dp=facts.overlap_dp,
        overlap_tp=facts.overlap_tp,
        split_sends=facts.split_sends,
        grouped_experts=facts.grouped_experts,
        expandable_segments=facts.expandable_segments,
        graphs=facts.graphs,
        unshards_pipelines=facts.unshards_pipelines,
        shards_states=sharding != "replicated",
        grad_bytes=SUM_BYTES[accumulate] + SUM_BYTES["compute"] * sums_apart,
        reduce_bytes=SUM_BYTES[reduce],
        master_bytes=state.master_bytes,
        bucket_bytes=state.bucket_bytes,
        step_bytes=copies,
        step_temporary_bytes=state.step_temporary_bytes,
        model_groups=facts.model_groups,
        shifted_logits=facts.shifted_logits,
        weight_bytes=state.weight_bytes,
    )
