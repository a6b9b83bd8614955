"""The same work in replica groups: what a run that is planned to restart could be instead."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.planner.capacity import describe_fabric, efficiency_of, find_fastest
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate


def in_replica_groups(spec: RunSpec, machine: Machine | None, best: Candidate) -> Candidate | None:
    """`best` with its data parallelism cut into groups that each hold the whole state, the fastest that fits.

    None where it is in groups already, there is one node alone, or no group holds the state.
    """
    if spec.resilience.mode != "restart" or best.layout.dp_replicate > 1 or spec.cluster.num_nodes == 1:
        return None
    pinned = replace(
        spec,
        layout=_open_data_parallelism(spec.layout, best),
        recompute=best.recompute,  # type: ignore[arg-type]
        batching=replace(spec.batching, micro_batch_size=best.micro_batch_size),
        resilience=replace(spec.resilience, mode="elastic"),
    )
    return find_fastest(pinned, describe_fabric(pinned.cluster, machine), efficiency_of(pinned.cluster))


def _open_data_parallelism(wanted: LayoutSpec, best: Candidate) -> LayoutSpec:
    layout = best.layout
    return replace(
        wanted,
        dp_replicate=AUTO,
        dp_shard=AUTO,
        zero_stage=AUTO,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        pipeline_schedule=layout.pipeline_schedule,
        virtual_stages=layout.virtual_stages,
    )
