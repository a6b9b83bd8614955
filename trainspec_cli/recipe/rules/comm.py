"""Rules for the formats in which gradients and parameters travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

GRADIENTS, PARAMETERS, ACROSS = "comm.gradients", "comm.parameters", "comm.across_nodes"
BUCKETS = "comm.bucket_bytes"
LEFT_OPEN = ("full", AUTO, None)
"""Values that ask for no fewer bits."""


def fp32_sums(spec: RunSpec) -> Iterator[Problem]:
    """Compressed gradients are summed in fp32."""
    asked = [path for path in (GRADIENTS, ACROSS) if getattr(spec.comm, path.rpartition(".")[2]) not in ("full", None)]
    if asked and spec.precision.reduce != "fp32":
        value = getattr(spec.comm, asked[0].rpartition(".")[2])
        message = f"`{asked[0]}` is {value}, whose sums are made in fp32, and `precision.reduce` is bf16"
        yield Problem("unsupported", message, "precision.reduce", f"type precision.reduce=fp32, or {asked[0]}=full")


def parameter_format(spec: RunSpec) -> Iterator[Problem]:
    """Four bits hold differences from the weights of the step before, which each rank would have to keep whole."""
    if spec.comm.parameters == "int4":
        message = (
            f"`{PARAMETERS}` is int4; whole weights lose too much in 4 bits, and no rank keeps those of a step ago"
        )
        yield Problem("unsupported", message, PARAMETERS, f"type {PARAMETERS}=int8")


def several_nodes(spec: RunSpec) -> Iterator[Problem]:
    if spec.comm.across_nodes is not None and spec.cluster.num_nodes == 1 and not spec.cluster.pools:
        message = f"`{ACROSS}` is {spec.comm.across_nodes}, and `cluster.num_nodes` is 1"
        yield Problem("unsupported", message, ACROSS, f"type {ACROSS}=null, or {GRADIENTS}={spec.comm.across_nodes}")


def exchanged(spec: RunSpec, layout: Layout, replica_groups: int) -> Iterator[Problem]:
    """Refuse formats of exchanges that the layout does not have."""
    comm, described = spec.comm, layout.describe()
    fewer_bits = [
        path for path, value in ((GRADIENTS, comm.gradients), (ACROSS, comm.across_nodes)) if value not in LEFT_OPEN
    ]
    if fewer_bits and layout.shards * layout.dp_replicate * replica_groups == 1:
        value = getattr(comm, fewer_bits[0].rpartition(".")[2])
        message = f"`{fewer_bits[0]}` is {value}, and in this layout ({described}) no ranks sum gradients"
        hint = f"type {fewer_bits[0]}=full, or choose a layout with dp_shard or dp_replicate of 2 or more"
        yield Problem("unsupported", message, fewer_bits[0], hint)
    if comm.parameters != "full" and layout.shards == 1:
        message = f"`{PARAMETERS}` is {comm.parameters}, and in this layout ({described}) no rank gathers parameters"
        yield Problem("unsupported", message, PARAMETERS, f"type {PARAMETERS}=full, or layout=fsdp")


def joined(spec: RunSpec, layout: Layout, device: str) -> Iterator[Problem]:
    """Refuse a size of buckets where the gradients of several blocks never go together."""
    size, why = spec.comm.bucket_bytes, ""
    if not size:
        return
    if device == "cuda":
        why = "on GPUs FSDP2 sums the gradients of each block by themselves"
    elif layout.shards * layout.dp_replicate == 1:
        why = f"in this layout ({layout.describe()}) no ranks sum gradients"
    elif spec.comm.gradients not in LEFT_OPEN or spec.comm.across_nodes not in LEFT_OPEN:
        why = "in fewer bits each block's gradients travel by themselves"
    if why:
        yield Problem("unsupported", f"`{BUCKETS}` is {size:,}, and {why}", BUCKETS, f"type {BUCKETS}=null")


COMM_RULES = (fp32_sums, parameter_format, several_nodes)
