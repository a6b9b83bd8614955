"""Map a layout to the groups of ranks that work together.

Ranks are numbered according to `MESH_AXES`, outermost first. Parameters are sharded over dp_shard and cp together,
because the ranks of both process different tokens. Experts have a separate mesh over the same ranks: ep is innermost,
and the experts of each rank are sharded over the rest of dp_shard x cp x tp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainspec_cli.engine.comm.codec import Connection, open_connections
from trainspec_cli.engine.comm.exchange import is_on_gloo
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout

SUMMED_OVER = ("dp_replicate", "dp_shard", "expert_shard")
"""The axes over which gradients are summed; `dp_shard` includes cp, as in `Mesh.links`."""


@dataclass(frozen=True)
class Mesh:
    layout: Layout
    axes: DeviceMesh
    """All axes of `MESH_AXES`, including those of size 1, so that code does not have to check which axes exist."""
    shard: DeviceMesh
    """dp_shard x cp, flattened."""
    experts: DeviceMesh | None
    """(pp, dp_replicate, expert_shard, ep); None if experts are not spread over ep."""
    stage: DeviceMesh
    """All axes except pp, flattened: the ranks that hold the same layers."""
    upstream: dist.ProcessGroup
    """A second group of the pipeline's ranks, for messages to earlier stages."""
    ends: dist.ProcessGroup
    """The ranks of the pipeline's first and last stage, if both have a tied embedding."""
    sums: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """On gloo, additional process groups for those axes of `SUMMED_OVER` that have several ranks. They are used only
    for gradients, which are summed in a separate thread: if two threads used the same group, the order of their calls
    could differ between ranks."""
    connections_of_sums: frozenset[Connection] = frozenset()

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    def expert_group(self, axis: str) -> dist.ProcessGroup:
        assert self.experts is not None, "experts are not spread over ranks"
        return self.experts[axis].get_group()

    def rank(self, axis: str) -> int:
        return int(self.axes[axis].get_local_rank())

    def links(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the process groups along each axis with several ranks, except pp. `dp_shard` includes cp, and
        `expert_shard` is the axis over which the experts of each rank of ep are sharded."""
        whole = self.axes.mesh  # (pp, dp_replicate, dp_shard, cp, tp)
        found = {
            "dp_replicate": _rows(whole, 1),
            "dp_shard": _rows(whole, 2, 3),
            "cp": _rows(whole, 3),
            "tp": _rows(whole, 4),
        }
        if self.experts is not None:
            found |= {"ep": _rows(self.experts.mesh, 3), "expert_shard": _rows(self.experts.mesh, 2)}
        return {axis: links for axis, links in found.items() if len(links[0]) > 1}

    @property
    def device_type(self) -> str:
        return str(self.axes.device_type)

    @property
    def data_rank(self) -> int:
        """Return which part of each batch this rank gets: 0 .. data_parallel_size - 1."""
        return self.rank("dp_replicate") * self.layout.dp_shard + self.rank("dp_shard")

    @property
    def expert_data_ranks(self) -> range:
        """The data-parallel ranks whose tokens reach this rank's experts; without ep, only this rank itself."""
        together = max(1, self.layout.ep // (self.layout.cp * self.layout.tp))
        first = self.data_rank - self.rank("dp_shard") % together
        return range(first, first + together)


def _rows(ranks: Tensor, *along: int) -> list[tuple[int, ...]]:
    """Return this rank's peers, which differ from it only in the dimensions `along`. NumPy is used because, unlike
    torch, it also works in a trace with fake tensors."""
    others = [dim for dim in range(ranks.ndim) if dim not in along]
    grid = np.array(ranks.tolist()).transpose(*others, *along)
    rows = grid.reshape(-1, math.prod(grid.shape[len(others) :]))
    return [tuple(row) for row in rows.tolist()]


def split_by_tier(
    rows: Sequence[Sequence[int]], place_of: Callable[[int], int], sizes: Sequence[int]
) -> list[list[list[int]]] | None:
    """Return the groups for a sum over each row of ranks, tier by tier and innermost first: the ranks inside each
    element (e.g. below a switch), then those at the same position in the elements that the next tier connects, and so
    on.

    `place_of`: position of a rank's device among all devices. `sizes`: number of devices per element of each tier,
    innermost first. None if fewer than two levels have several ranks, or if elements of a tier have different numbers
    of ranks.
    """
    if not sizes:
        return None
    levels = list[list[list[int]]]()
    columns = [list(row) for row in rows]
    for size in sizes:
        inside = []
        for column in columns:
            elements: dict[int, list[int]] = {}
            for rank in column:
                elements.setdefault(place_of(rank) // size, []).append(rank)
            inside.append(list(elements.values()))
        if len({(len(of_row), len(ranks)) for of_row in inside for ranks in of_row}) > 1:
            return None
        if len(inside[0][0]) > 1:
            levels.append([ranks for of_row in inside for ranks in of_row])
            columns = [list(number) for of_row in inside for number in zip(*of_row, strict=True)]
    if len(columns[0]) > 1:
        levels.append(columns)
    return levels if len(levels) > 1 else None


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Create the groups of a layout. Called collectively by all ranks."""
    sizes = tuple(getattr(layout, axis) for axis in MESH_AXES)
    axes = init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)
    upstream = ends = axes["pp"].get_group()
    if layout.pp > 1:
        last = layout.rank_of_stage(layout.num_stages - 1)
        pipelines = ranks_of_pipelines(layout)
        upstream, _ = dist.new_subgroups_by_enumeration(pipelines)
        ends, _ = dist.new_subgroups_by_enumeration([sorted({ranks[0], ranks[last]}) for ranks in pipelines])
    shard = axes["dp_shard", "cp"]._flatten("shard")
    experts = None
    if layout.ep > 1:
        sizes = (layout.pp, layout.dp_replicate, layout.expert_ranks // layout.ep, layout.ep)
        experts = init_device_mesh(device_type, sizes, mesh_dim_names=("pp", "dp_replicate", "expert_shard", "ep"))
    mesh = Mesh(
        layout=layout,
        axes=axes,
        shard=shard,
        experts=experts,
        stage=axes["dp_replicate", "dp_shard", "cp", "tp"]._flatten("stage"),
        upstream=upstream,
        ends=ends,
    )
    if not is_on_gloo():
        return mesh
    others = set(open_connections())
    links = {axis: ranks for axis, ranks in mesh.links().items() if axis in SUMMED_OVER}
    sums = {axis: dist.new_subgroups_by_enumeration([*map(list, ranks)])[0] for axis, ranks in links.items()}
    return replace(mesh, sums=sums, connections_of_sums=frozenset(open_connections()) - others)


def ranks_of_pipelines(layout: Layout) -> list[list[int]]:
    """Return the ranks of each pipeline, starting with the first stage; pp is the outermost axis."""
    apart = math.prod(getattr(layout, axis) for axis in MESH_AXES if axis != "pp")
    return [[first + apart * rank for rank in range(layout.pp)] for first in range(apart)]
