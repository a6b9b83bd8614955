"""Pools as the planner sees them: each one's devices and links, what joins them, and each as a cluster of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.planner.hardware.cluster import describe_fabric
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.memory.frameworks import memory_limit_bytes
from trainspec_cli.recipe.keys.cluster import ClusterSpec, PoolSpec
from trainspec_cli.recipe.keys.run import RunSpec


@dataclass(frozen=True)
class Pool:
    """Some nodes of one kind."""

    name: str
    devices: int
    fabric: Fabric
    """Its devices and links, as if all devices of the cluster were of its kind."""
    link_gbit_per_s: float | None
    """A device's share of what joins the pools; None: the pools' own NICs."""

    @property
    def limit_bytes(self) -> float:
        return memory_limit_bytes(self.fabric.chip)


def describe_pools(cluster: ClusterSpec) -> tuple[Pool, ...]:
    """Raises RecipeError for accelerators and links that nothing can be computed with."""
    devices = [pool.num_nodes * pool.devices_per_node for pool in cluster.pools]
    link = cluster.pool_link_gbit_per_s
    if link is not None and cluster.oversubscription is not None:
        link /= cluster.oversubscription
    fabrics = [replace(_fabric(cluster, place), num_devices=sum(devices)) for place in range(len(devices))]
    names = pool_names(cluster.pools)
    return tuple(Pool(*described, link) for described in zip(names, devices, fabrics, strict=True))


def _fabric(cluster: ClusterSpec, place: int) -> Fabric:
    """Return the fabric of a pool by itself. What is wrong with it is said of the pool's own keys."""
    try:
        return describe_fabric(cluster_of(cluster, cluster.pools[place]), None)
    except RecipeError as error:
        own = f"cluster.pools.{place}.accelerator"
        raise RecipeError([_of_pool(problem, own) for problem in error.problems]) from error


def _of_pool(problem: Problem, own: str) -> Problem:
    message, path, hint = (
        text.replace("cluster.accelerator", own) for text in (problem.message, problem.path, problem.hint)
    )
    return replace(problem, message=message, path=path, hint=hint)


def pool_names(pools: Sequence[PoolSpec]) -> list[str]:
    """Return the name of each pool; pools that would have the same one are numbered."""
    names = [pool.name or pool.accelerator.name for pool in pools]
    return [
        f"{name} ({names[: place + 1].count(name)})" if names.count(name) > 1 else name
        for place, name in enumerate(names)
    ]


def cluster_of(cluster: ClusterSpec, pool: PoolSpec) -> ClusterSpec:
    """Return a pool as a cluster of its own; what it leaves open is the whole cluster's."""
    price = pool.price_usd_per_device_hour
    cost = cluster.cost if price is None else replace(cluster.cost, price_usd_per_device_hour=price)
    return replace(
        cluster,
        name=pool.name or cluster.name,
        accelerator=pool.accelerator,
        pools=(),
        pool_link_gbit_per_s=None,
        num_nodes=pool.num_nodes,
        devices_per_node=pool.devices_per_node,
        scaleup_devices=pool.scaleup_devices,
        link_gb_per_s=pool.link_gb_per_s,
        nic_gbit_per_s=pool.nic_gbit_per_s or cluster.nic_gbit_per_s,
        nic_kind=pool.nic_kind or cluster.nic_kind,
        cost=cost,
    )


def on_pools(spec: RunSpec, pools: Sequence[PoolSpec]) -> RunSpec:
    """Return the recipe on these pools alone; on one it is that of an ordinary cluster, and on none as it is."""
    if not pools:
        return spec
    if len(pools) == 1:
        return replace(spec, cluster=cluster_of(spec.cluster, pools[0]))
    nodes = sum(pool.num_nodes for pool in pools)
    return replace(spec, cluster=replace(spec.cluster, pools=tuple(pools), num_nodes=nodes))
