"""How the ranks of a layout can lie on pools: every pool with whole replicas, or each pipeline's stages on several.

The ranks of a tensor-, context- or expert-parallel group always stay in one pool. Data-parallel ranks over all pools
take samples by their speed; pipeline stages on pools of their own take layers by theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Crossing, Group, axis_groups, network_bytes_per_s, send_s
from trainspec_cli.planner.pools.describe import Pool
from trainspec_cli.recipe.keys.layout import Layout

DATA_AXES = ("dp", "dp_shard", "dp_replicate", "expert_dp")
NOT_WHOLE = "a pool's devices do not hold whole groups of the layout"
MESSAGE_BYTES = 1e6
"""A send between stages, by which the slowest of several links is found."""


@dataclass(frozen=True)
class Placement:
    ranks: tuple[int, ...]
    """Data-parallel ranks of each pool, or pipeline ranks (`order`)."""
    order: tuple[int, ...] = ()
    """The pools in the order in which each pipeline goes through them; empty: every pool has whole replicas."""

    @property
    def pool_of_stage_rank(self) -> list[int]:
        """Return the pool of each pipeline rank, where pipelines go through several."""
        return [pool for pool in self.order for _ in range(self.ranks[pool])]


def placements(layout: Layout, pools: Sequence[Pool]) -> Iterator[Placement]:
    """Yield the ways to place a layout of all devices of `pools`."""
    width = layout.tp * layout.cp * layout.data_parallel_size
    yield from _replicas(layout, pools)
    if layout.pp >= len(pools) and all(pool.devices % width == 0 for pool in pools):
        ranks = tuple(pool.devices // width for pool in pools)
        unlike = {
            tuple((pools[pool].fabric, ranks[pool]) for pool in order): order
            for order in reversed([*permutations(range(len(pools)))])
        }
        yield from (Placement(ranks, order) for order in unlike.values())


def _replicas(layout: Layout, pools: Sequence[Pool]) -> Iterator[Placement]:
    """Whole replicas on every pool: of a pipeline, each stage has whole nodes of every pool."""
    replica = layout.tp * layout.cp * layout.pp
    if any(pool.devices % replica for pool in pools):
        return
    for pool in pools:
        of_stage = pool.devices // layout.pp
        if layout.pp > 1 and of_stage % pool.fabric.devices_per_node:
            return
        if of_stage % (layout.ep * layout.etp):
            return
    ranks = tuple(pool.devices // replica for pool in pools)
    if 1 < layout.dp_shard < layout.data_parallel_size and any(own % layout.dp_shard for own in ranks):
        return
    yield Placement(ranks)


def groups_of(
    layout: Layout, placement: Placement, pools: Sequence[Pool], eff: Efficiency
) -> tuple[dict[str, Group], ...]:
    """Return the groups of each axis as the ranks of each pool see them; those that span pools are as fast as the
    slowest of their links."""
    own = [axis_groups(layout, pool.fabric, eff) for pool in pools]
    if placement.order:
        slowest = max((groups["pp"] for groups in own), key=lambda group: send_s(group, MESSAGE_BYTES, eff))
        joint = {"pp": _joined(slowest, placement, pools, eff)}
    else:
        axes = [axis for axis in DATA_AXES if axis != "dp_shard" or layout.dp_shard == layout.data_parallel_size]
        slow = {axis: min((groups[axis] for groups in own), key=lambda group: group.ring_bytes_per_s) for axis in axes}
        joint = {axis: _joined(group, placement, pools, eff) for axis, group in slow.items()}
    return tuple(groups | joint for groups in own)


def _joined(group: Group, placement: Placement, pools: Sequence[Pool], eff: Efficiency) -> Group:
    """Return a group that spans the pools, over what joins them where that is described apart."""
    link = pools[0].link_gbit_per_s
    if link is None or group.size == 1:
        return group
    kind = min((pool.fabric.nic_kind for pool in pools), key=lambda kind: network_bytes_per_s(1.0, kind, eff))
    smallest = min(pool.devices for pool in pools)
    devices = pools[0].fabric.num_devices
    inside = 1 if placement.order else max(1, group.size * smallest // devices)
    return replace(group, outer=(*group.outer, Crossing(inside, network_bytes_per_s(link, kind, eff))))
