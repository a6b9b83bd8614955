"""Check whether a plan fits the machine at hand, and find what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.spec.results.local import LocalPrediction
from trainspec_cli.spec.results.plan import Plan

Predict = Callable[[Plan], LocalPrediction]


def suggest(plan: Plan, predict: Predict, limit_bytes: float) -> str:
    """The first change, of those that keep the result the same, with which the plan fits; "" where none does.

    `limit_bytes` is what one process may take.
    """
    per_rank = plan.micro_batch_size * plan.grad_accum_steps
    ranks = plan.layout.data_parallel_size
    sharded = replace(plan.layout, dp_replicate=1, dp_shard=ranks, zero_stage=3)
    for layout, words in ((plan.layout, ""), (sharded, f"layout.dp_replicate=1 layout.dp_shard={ranks}")):
        for micro in (size for size in range(plan.micro_batch_size, 0, -1) if per_rank % size == 0):
            other = replace(plan, layout=layout, micro_batch_size=micro, grad_accum_steps=per_rank // micro)
            if predict(other).needed_bytes <= limit_bytes:
                return " ".join(filter(None, (words, f"batching.micro_batch_size={micro}")))
    return ""
