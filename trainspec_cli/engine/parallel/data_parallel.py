"""Data parallelism over the axes dp_replicate and dp_shard, as one mechanism.

FSDP2 shards each block over dp_shard (arXiv:1910.02054, stages 2 and 3); after its reduce-scatter a hook sums the
shards over dp_replicate. With dp_shard = 1 that is plain DDP, with dp_replicate = 1 plain FSDP, else HSDP. The hook
is ours so that it can be timed, compressed or replaced by another transport.

Gradients are sums, never means: the loss is divided by the global number of tokens before the backward, which is
exact however samples are divided over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

TimeCollective = Callable[[], AbstractContextManager[None]]

# torch 2.13 renamed them; 2.11 has the old names alone.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def apply_data_parallel(
    model: Any,
    mesh: DeviceMesh,
    *,
    compute: torch.dtype,
    reduce: torch.dtype,
    free_after_forward: bool,
    time_collective: TimeCollective,
) -> None:
    """Shard `model` (on meta) in place. `free_after_forward` is ZeRO-3; without it, ZeRO-2."""
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    shard_mesh = mesh["dp_shard"]
    free = free_after_forward and shard_mesh.size() > 1
    for block in model.block_modules():
        fully_shard(block, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=free)
    fully_shard(model, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=False)
    for module in _sharded_modules(model):
        _sum_gradients(module, shard_mesh, mesh["dp_replicate"], time_collective)
        if shard_mesh.size() > 1 and shard_mesh.device_type == "cpu":
            _time_shard_collectives(module, time_collective)


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _sum_gradients(
    module: FSDPModule, shard_mesh: DeviceMesh, replicate_mesh: DeviceMesh, time_collective: TimeCollective
) -> None:
    if shard_mesh.size() > 1:  # over one rank there is nothing to divide by, and setting it costs a pass
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if replicate_mesh.size() == 1:
        return
    group = replicate_mesh.get_group()

    def sum_over_replicas(gradient: Tensor) -> None:
        with time_collective():
            dist.all_reduce(gradient, group=group)

    module.set_all_reduce_hook(sum_over_replicas)


class _TimedCollective:
    """A collective of FSDP2 with a stopwatch around it; on a CPU the call returns when it is done."""

    def __init__(self, collective: Callable[..., Any], time_collective: TimeCollective):
        self._collective, self._time_collective = collective, time_collective

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        with self._time_collective():
            return self._collective(output_tensor, input_tensor, group=group, **options)


def _time_shard_collectives(module: FSDPModule, time_collective: TimeCollective) -> None:
    module.set_custom_all_gather(_TimedCollective(_all_gather, time_collective))  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(_TimedCollective(_reduce_scatter, time_collective))  # type: ignore[arg-type]
