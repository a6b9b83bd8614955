"""Memory that compressed gradients take: what they have lost so far, beside the state."""

from __future__ import annotations

from trainspec_cli.planner.workload.factors import block_factors
from trainspec_cli.spec.results.plan import Plan

LOW_RANK_BYTES = 2 * 4
"""The same in fp32, of a value of the matrices in low rank and of their Q; vectors are few."""
FEEDBACK_BYTES = 2 * 2
"""Bytes of a value: in bf16, as of the last update and as of the step that is being made."""


def feedback_bytes(plan: Plan) -> float:
    """Return the bytes of one rank's error feedback: of whole gradients where shards are summed, of its own shard where
    replicas are, and again where replica groups are."""
    if plan.comm.uses_low_rank:
        return _low_rank_bytes(plan)
    if not {plan.comm.gradients, plan.comm.across_nodes} & {"int8", "int4"}:
        return 0.0
    layout = plan.layout
    whole = plan.params / (layout.tp * layout.pp)
    exchanges = [whole] if layout.shards > 1 else []
    exchanges += [whole / layout.shards] * sum(groups > 1 for groups in (layout.dp_replicate, plan.replica_groups))
    return FEEDBACK_BYTES * sum(exchanges)


def _low_rank_bytes(plan: Plan) -> float:
    if plan.layout.dp_replicate == 1:
        return 0.0
    factors = block_factors(plan.spec.model, plan.comm.rank, plan.layout.tp)
    return LOW_RANK_BYTES * plan.spec.model.num_layers / plan.layout.pp * (factors.values + factors.right)
