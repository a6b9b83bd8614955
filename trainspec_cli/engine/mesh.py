"""Layout -> DeviceMesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainspec_cli.spec.layout import MESH_AXES, Layout


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """A mesh with every axis of `MESH_AXES`, those of size 1 too, so that code need not ask which there are."""
    sizes = tuple(getattr(layout, axis) for axis in MESH_AXES)
    return init_device_mesh(device_type, sizes, mesh_dim_names=MESH_AXES)


def data_parallel_rank(mesh: DeviceMesh, layout: Layout) -> int:
    """Which part of each batch this rank reads: 0 .. data_parallel_size - 1."""
    return mesh["dp_replicate"].get_local_rank() * layout.dp_shard + mesh["dp_shard"].get_local_rank()
