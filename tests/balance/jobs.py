"""Jobs to simulate, put together from a step's parts rather than planned."""

from math import inf

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.cluster import Cluster
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.balance.ideal import RankRows
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.planner.time.samples import StageTime, StepParts
from trainspec_cli.recipe.keys.layout import Layout, ZeroStage
from trainspec_cli.recipe.keys.training import BatchingSpec

NONE = Speed(0.0, 0.0)
PER_NODE = 8


def parts_of(pp: int = 1, launch_s: float = 0.0, **changes: object) -> StepParts:
    """Each stage takes 0.1 s per micro-batch and 0.9 s per sample; exchanges take 0.2 s per step."""
    stage = StageTime(Speed(0.1, 0.9), NONE, NONE, launch_s)
    values = {
        "stages": (stage,) * pp,
        "bubble": 1.0 if pp > 1 else 0.0,
        "sends": NONE,
        "sends_tier": "network",
        "gradients_each_s": 0.0,
        "gradients_once_s": 0.2,
        "gradients_tier": "network",
        "optimizer_s": 0.0,
        "rest_s": 0.05,
    }
    return StepParts(**values | changes)  # type: ignore[arg-type]


def job_of(
    ranks: int = 8,
    each: int = 32,
    pp: int = 1,
    tp: int = 1,
    replica_groups: int = 1,
    largest: int = 1,
    on_loss: str = "keep",
    parts: StepParts | None = None,
    change_s: float = inf,
    zero_stage: ZeroStage = 1,
    shards: bool = True,
) -> DisturbedJob:
    """`ranks` data-parallel ranks of `each` samples per step, one a micro-batch."""
    whole = Layout(dp_replicate=replica_groups, dp_shard=ranks // replica_groups, pp=pp, tp=tp, zero_stage=zero_stage)
    own = Layout(dp_replicate=1, dp_shard=ranks // replica_groups, pp=pp, tp=tp, zero_stage=zero_stage)
    if not shards:
        whole = own = Layout(dp_replicate=ranks, pp=pp, tp=tp)
    nodes, size = max(1, whole.world_size // PER_NODE), ranks // replica_groups
    return DisturbedJob(
        cluster=Cluster(parts or parts_of(pp), whole, nodes, whole.world_size // nodes, replica_groups),
        layout=own,
        even=even_division(own, 1, keeps_micro_batches=False),
        batching=BatchingSpec(ranks * each, on_loss=on_loss),  # type: ignore[arg-type]
        groups=tuple(RankRows(slice(n * size, (n + 1) * size), size) for n in range(replica_groups)),
        largest_micro_batch=largest,
        change=0.1,
        change_s=change_s,
        keeps_micro_batches=False,
        num_nodes=nodes,
        devices_per_node=whole.world_size // nodes,
    )
