"""Layout -> the groups of ranks that work together.

Ranks count with `MESH_AXES` outermost first. Parameters are sharded over dp_shard and cp together, since the ranks of
both see different tokens. Experts have a mesh of their own over the same ranks: ep innermost, and what ep leaves of
dp_shard x cp x tp shards each rank's experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainspec_cli.spec.recipe.layout import MESH_AXES, Layout


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    axes: DeviceMesh
    """Every axis of `MESH_AXES`, those of size 1 too, so that code need not ask which there are."""
    shard: DeviceMesh
    """dp_shard x cp, flat."""
    experts: DeviceMesh | None
    """(pp, dp_replicate, expert_shard, ep), where ep spreads experts."""
    stage: DeviceMesh
    """All axes but pp, flat: the ranks that hold the same layers."""
    upstream: dist.ProcessGroup
    """The pipeline's ranks once more: what flows against the stages' order has a group of its own."""
    ends: dist.ProcessGroup
    """The ranks of the pipeline's first and last stage, where a tied embedding stands on both."""

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    def expert_group(self, axis: str) -> dist.ProcessGroup:
        assert self.experts is not None, "experts are not spread"
        return self.experts[axis].get_group()

    def rank(self, axis: str) -> int:
        return int(self.axes[axis].get_local_rank())

    @property
    def device_type(self) -> str:
        return str(self.axes.device_type)

    @property
    def data_rank(self) -> int:
        """Which part of each batch this rank reads: 0 .. data_parallel_size - 1."""
        return self.rank("dp_replicate") * self.layout.dp_shard + self.rank("dp_shard")

    @property
    def expert_data_ranks(self) -> range:
        """The data ranks whose tokens this rank's experts get, where whole ones share them; without ep its own."""
        together = max(1, self.layout.ep // (self.layout.cp * self.layout.tp))
        first = self.data_rank - self.rank("dp_shard") % together
        return range(first, first + together)


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Called by every rank together."""
    sizes = tuple(getattr(layout, axis) for axis in MESH_AXES)
    axes = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
    upstream, ends = _pipeline_groups(layout, axes["pp"].get_group())
    return Mesh(
        layout=layout,
        axes=axes,
        shard=axes["dp_shard", "cp"]._flatten("shard"),
        experts=_expert_mesh(layout, device_type),
        stage=axes["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage"),
        upstream=upstream,
        ends=ends,
    )


def _expert_mesh(layout: Layout, device_type: str) -> DeviceMesh | None:
    if layout.ep == 1:
        return None
    ranks = layout.expert_ranks
    sizes = (layout.pp, layout.dp_replicate, ranks // layout.ep, layout.ep)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))


def _pipeline_groups(layout: Layout, own: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """-> (upstream, ends)"""
    if layout.pp == 1:
        return own, own
    last = layout.rank_of_stage(layout.num_stages - 1)
    pipelines = ranks_of_pipelines(layout)
    upstream, _ = dist.new_subgroups_by_enumeration(pipelines)
    ends, _ = dist.new_subgroups_by_enumeration([sorted({ranks[0], ranks[last]}) for ranks in pipelines])
    return upstream, ends


def ranks_of_pipelines(layout: Layout) -> list[list[int]]:
    """Each from its first rank on; pp is the outermost axis."""
    apart = math.prod(getattr(layout, axis) for axis in MESH_AXES if axis != "pp")
    return [[first + apart * rank for rank in range(layout.pp)] for first in range(apart)]
