"""Memory that compressed gradients take: what they have lost so far, beside the state."""

from __future__ import annotations

from trainspec_cli.spec.results.plan import Plan

FEEDBACK_BYTES = 2 * 2
"""Bytes of a value: in bf16, as of the last update and as of the step that is being made."""


def feedback_bytes(plan: Plan) -> float:
    """Return the bytes of one rank's error feedback: of whole gradients where shards are summed, of its own shard where
    replicas are, and again where replica groups are."""
    if not {plan.comm.gradients, plan.comm.across_nodes} & {"int8", "int4"}:
        return 0.0
    layout = plan.layout
    whole = plan.params / (layout.tp * layout.pp)
    exchanges = [whole] if layout.shards > 1 else []
    exchanges += [whole / layout.shards] * sum(groups > 1 for groups in (layout.dp_replicate, plan.replica_groups))
    return FEEDBACK_BYTES * sum(exchanges)
