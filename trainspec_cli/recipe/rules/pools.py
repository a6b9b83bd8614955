"""Rules for a cluster of several pools: what nothing is said beside, and what they cannot be joined with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

PATH = "cluster.pools"
MOST = 4
"""Pipelines go through the pools in every order, of which there are 24 for four."""


def instead_of_nodes(spec: RunSpec) -> Iterator[Problem]:
    """Pools say what the cluster's nodes are; the keys of an ordinary cluster say nothing beside them."""
    cluster = spec.cluster
    if not cluster.pools:
        if cluster.pool_link_gbit_per_s is not None:
            path = "cluster.pool_link_gbit_per_s"
            message = f"`{path}` is {cluster.pool_link_gbit_per_s:g}, and the cluster has no pools"
            yield Problem("unsupported", message, path, f"type {path}=null, or {PATH}=[...]")
        return
    if cluster.accelerator is not None:
        message = f"`{PATH}` names the accelerators, and `cluster.accelerator` is {cluster.accelerator.name} besides"
        yield Problem("unsupported", message, PATH, "type cluster=auto, and say in each pool what it has")
        return
    set_besides = {
        "num_nodes": (cluster.num_nodes, 1),
        "devices_per_node": (cluster.devices_per_node, AUTO),
        "scaleup_devices": (cluster.scaleup_devices, None),
        "link_gb_per_s": (cluster.link_gb_per_s, None),
    }
    for key, (value, usual) in set_besides.items():
        if value != usual:
            message = f"`cluster.{key}` is {value}, and each of `{PATH}` says its own"
            yield Problem("unsupported", message, f"cluster.{key}", f"type cluster=auto, or leave out {PATH}")


def number(spec: RunSpec) -> Iterator[Problem]:
    if len(spec.cluster.pools) > MOST:
        message = f"`{PATH}` has {len(spec.cluster.pools)} pools; at most {MOST} are planned together"
        yield Problem("out_of_range", message, PATH, "join those that are alike")


def half_precision(spec: RunSpec) -> Iterator[Problem]:
    for place, pool in enumerate(spec.cluster.pools):
        path = f"{PATH}.{place}.accelerator.bf16_tflops"
        if pool.accelerator.bf16_tflops == pool.accelerator.fp16_tflops == 0:
            message = f"`{path}` is 0, and fp16_tflops too; one of them is needed"
            yield Problem("missing_value", message, path, "write the rate of the chip's data sheet")


def joined_with(spec: RunSpec) -> Iterator[Problem]:
    """Refuse keys that describe nodes which are alike."""
    cluster = spec.cluster
    if not cluster.pools:
        return
    if cluster.fabric.tiers or cluster.fabric.planes:
        message = f"the fabric {cluster.fabric.name or 'of this recipe'} has tiers, and `{PATH}` are joined by one link"
        hint = "type fabric=flat, and cluster.pool_link_gbit_per_s=<Gbit/s of a device> for what joins the pools"
        yield Problem("unsupported", message, "cluster.fabric.tiers", hint)
    if cluster.nic_gbit_per_s == 0:
        path = "cluster.nic_gbit_per_s"
        message = f"`{path}` is 0, and the nodes of `{PATH}` exchange data over their NICs"
        yield Problem("out_of_range", message, path, f"type {path}=null, and write it in each pool")
    if cluster.reliability.spare_nodes:
        path = "cluster.reliability.spare_nodes"
        message = f"`{path}` is {cluster.reliability.spare_nodes}, and does not say of which of `{PATH}`"
        yield Problem("unsupported", message, path, f"type {path}=null, or count the spare nodes in a pool")
    if cluster.cost.owned:
        message = f"`cluster.cost.owned` has one price of a device, and `{PATH}` have several kinds"
        hint = f"type cost=rented, and write price_usd_per_device_hour in each of {PATH}"
        yield Problem("unsupported", message, "cluster.cost.owned", hint)


def only_planned(spec: RunSpec) -> Iterator[Problem]:
    """The engine does not place ranks by pools."""
    if not spec.cluster.pools:
        return
    sizes = {pool.devices_per_node for pool in spec.cluster.pools}
    nodes = sum(pool.num_nodes for pool in spec.cluster.pools)
    message = f"`{PATH}` are planned (trainspec plan) and not launched: no layout is placed on nodes by their kind"
    if len(sizes) > 1:
        hint = "launch on the nodes of one pool: ~cluster.pools cluster.num_nodes=<its nodes>"
    else:
        hint = (
            f"type ~{PATH} cluster.num_nodes={nodes} cluster.devices_per_node={sizes.pop()}: every rank then has "
            "an equal share of the work"
        )
    yield Problem("unsupported", message, PATH, hint)


POOL_RULES = (instead_of_nodes, number, half_precision, joined_with)
