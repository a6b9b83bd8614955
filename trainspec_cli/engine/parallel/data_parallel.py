"""Data parallelism: FSDP2 over the shard axes, an all-reduce of our own across replicas.

One mechanism serves every data-parallel layout: dp_shard=1 is plain DDP, dp_replicate=1 plain FSDP, else HSDP. The hook
is ours so that it can be timed, compressed or replaced by another transport. `comm.gradients` compresses both exchanges
(`comm/compressed.py`). With NCCL they go on FSDP2's streams, with gloo in a thread (`gradient_sums.py`).

Gradients are sums, never means: the loss is divided by the global number of tokens before the backward, which is
exact however samples are divided over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.comm.codec import Codec
from trainspec_cli.engine.comm.compressed import CompressedSum, Compression, GroupWire
from trainspec_cli.engine.comm.exchange import (
    Peers,
    Purpose,
    TimeCollective,
    all_gather,
    reduce_scatter,
    sent_bytes,
)
from trainspec_cli.engine.parallel.expert import ModuleLosses
from trainspec_cli.engine.parallel.gradient_sums import GradientSums, Route
from trainspec_cli.engine.parallel.noise import (
    Columns,
    HeldBy,
    NoiseProbe,
    columns_of,
    gathered_columns,
    trained,
    trained_columns,
)

Look = Callable[[Tensor], None]
TimeExchange = Callable[[Purpose, str, dist.ProcessGroup], TimeCollective]
"""(purpose, axis, group) -> what times and counts its exchanges."""


@dataclass(frozen=True)
class DataParallel:
    """How parameters and gradients are held and exchanged."""

    compute: torch.dtype
    reduce: torch.dtype
    free_after_forward: bool
    """ZeRO-3; without it, parameters are gathered once a step."""
    offload: bool
    """Shards, gradients and optimizer state live in host memory; the update runs there."""
    replicas: Peers
    time: TimeExchange
    noise: NoiseProbe
    held_by: HeldBy
    compression: Compression = field(default_factory=Compression)
    parameter_codec: Codec | None = None
    """None: parameters are gathered as they are computed with."""
    sums: GradientSums | None = None
    """The sums of gradients on gloo; None: FSDP2 and its hooks make them."""
    route: Callable[[str], Route | None] = lambda axis: None
    """Returns how `sums` goes from the shards' axis (dp_shard or expert_shard) on; None where one rank has all."""
    losses: list[ModuleLosses] = field(default_factory=list)
    """The losses of the modules' compressed exchanges; they are added here as they are sharded."""
    name: str = "stage0"
    """A name that tells the exchanges of this module from those of others on the same rank."""

    def offload_policy(self, device_type: str) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=device_type != "cpu") if self.offload else OffloadPolicy()


def apply_data_parallel(
    model: Any, experts: Sequence[nn.Module], shard: DeviceMesh, expert_shard: DeviceMesh | None, how: DataParallel
) -> None:
    """Shard `model` (on meta) in place; `experts`, where they are spread, over what their spreading leaves."""
    if expert_shard is not None:
        for number, module in enumerate(experts):
            dim = _shardable_dim(module, expert_shard)
            name = f"experts{number}"
            _shard(module, name, expert_shard, how, free=how.free_after_forward, dim=dim, experts=True)
    for number, block in enumerate(model.block_modules()):
        _shard(block, f"block{number}", shard, how, free=how.free_after_forward)
    _shard(model, "rest", shard, how, free=False)


def _shard(
    module: nn.Module,
    name: str,
    mesh: DeviceMesh,
    how: DataParallel,
    *,
    free: bool,
    dim: int = 0,
    experts: bool = False,
) -> None:
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=how.compute, reduce_dtype=how.reduce),
        offload_policy=how.offload_policy(mesh.device_type),
        reshard_after_forward=free and mesh.size() > 1,
        shard_placement_fn=(lambda _parameter: Shard(dim)) if dim else None,
    )
    assert isinstance(module, FSDPModule)
    look = _Look(module, mesh.size(), how, experts)
    row = sum(trained_columns(module, mesh.size()))
    replicas = how.compression.of_group(f"{how.name}.{name}.replicas", row, how.replicas.group)
    shards = how.compression.of_group(f"{how.name}.{name}.shards", row * mesh.size(), mesh.get_group())
    over_shards, over_replicas = (None if one is None else one.feedback for one in (shards, replicas))
    if over_shards is not None or over_replicas is not None:
        how.losses.append(ModuleLosses(module, mesh.get_group(), how.replicas.group, over_shards, over_replicas))
    axis = "expert_shard" if experts else "dp_shard"
    route = how.route(axis)
    if how.sums is not None and route is not None:
        _leave_undivided(module, mesh)
        own = how.sums.of_module(route, partial(_parameters, module), look, shards, replicas)
        module.set_custom_reduce_scatter(own)  # type: ignore[arg-type]
        module.set_all_reduce_hook(own.add)
    else:
        _sum_in_hooks(module, mesh, how, look, shards, replicas, axis)
    if mesh.size() > 1:
        _gather_parameters(module, mesh, how, axis)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in trained(module)]


def _sum_in_hooks(
    module: FSDPModule,
    mesh: DeviceMesh,
    how: DataParallel,
    look: Look,
    shards: CompressedSum | None,
    replicas: CompressedSum | None,
    axis: str,
) -> None:
    """Let FSDP2 sum over the shards, and a hook over the replicas: on a GPU beside the backward."""
    _sum_gradients(module, mesh, how, look, replicas)
    if mesh.size() == 1:
        module.set_custom_reduce_scatter(_NothingToReduce())  # type: ignore[arg-type]
        return
    time_gradients = how.time("gradients", axis, mesh.get_group())
    reduce = reduce_scatter if shards is None else partial(_reduce_compressed, shards)
    timed = _TimedCollective(reduce, time_gradients, look, encodes=shards is not None)
    module.set_custom_reduce_scatter(timed)  # type: ignore[arg-type]


def _gather_parameters(module: Any, mesh: DeviceMesh, how: DataParallel, axis: str) -> None:
    time_parameters = how.time("parameters", axis, mesh.get_group())
    if how.parameter_codec is not None:
        gather = partial(_gather_compressed, how.parameter_codec, gathered_columns(module, mesh.size()))
        module.set_custom_all_gather(_TimedCollective(gather, time_parameters, encodes=True))
    elif mesh.device_type == "cpu":
        module.set_custom_all_gather(_TimedCollective(all_gather, time_parameters))


def _reduce_compressed(
    exchange: CompressedSum, output: Tensor, gradients: Tensor, group: dist.ProcessGroup, **_options: Any
) -> None:
    """Sum as FSDP2's reduce-scatter does."""
    output.copy_(exchange.reduce_scatter(gradients.view(group.size(), -1), GroupWire(group)))


def _gather_compressed(
    codec: Codec,
    columns: Sequence[tuple[int, bool]],
    output: Tensor,
    own: Tensor,
    group: dist.ProcessGroup,
    **_options: Any,
) -> None:
    """Gather as FSDP2's all-gather does: matrices encoded, this rank's own too, so that all compute with the same
    values; norms and biases as they are. `columns`: (number, whether they are a matrix's), by parameter."""
    sizes = [size for size, _ in columns]
    parts = list(zip(own.split(sizes), columns, strict=True))
    matrices = torch.cat([part for part, (_, is_matrix) in parts if is_matrix] or [own[:0]])
    others = torch.cat([part for part, (_, is_matrix) in parts if not is_matrix] or [own[:0]])
    encoded_1B = codec.encode(matrices.float()[None])
    gathered_RB = GroupWire(group).gather_rows(torch.cat([encoded_1B[0], others.view(torch.uint8)]))
    encoded_RB, others_RB = gathered_RB.split([encoded_1B.shape[1], others.nbytes], dim=1)
    of_matrices = codec.decode(encoded_RB.contiguous(), len(matrices)).to(own.dtype)
    of_others = others_RB.contiguous().view(own.dtype)
    starts = {True: 0, False: 0}
    for part, (size, is_matrix) in zip(output.view(group.size(), -1).split(sizes, dim=1), columns, strict=True):
        source = of_matrices if is_matrix else of_others
        part.copy_(source[:, starts[is_matrix] : starts[is_matrix] + size])
        starts[is_matrix] += size


class _Look:
    """Shows the noise probe a module's gradients before the first sum that they go into."""

    def __init__(self, module: nn.Module, ranks: int, how: DataParallel, experts: bool):
        self._module = module
        self._ranks = ranks
        self._how = how
        self._experts = experts

    def __call__(self, gradients: Tensor) -> None:
        self._how.noise.add(gradients, self._columns)

    @cached_property
    def _columns(self) -> Columns:
        """FSDP2 knows the parameters' names from the first forward on."""
        return columns_of(self._module, self._ranks, self._how.held_by, experts=self._experts)


def _shardable_dim(module: nn.Module, mesh: DeviceMesh) -> int:
    """Experts are few: where they do not divide over the ranks, each expert's rows do."""
    return 0 if all(parameter.shape[0] % mesh.size() == 0 for parameter in module.parameters()) else 1


def _sum_gradients(
    module: FSDPModule, mesh: DeviceMesh, how: DataParallel, look: Look, compressed: CompressedSum | None
) -> None:
    _leave_undivided(module, mesh)
    if mesh.size() == 1 or how.replicas.size > 1:
        first = look if mesh.size() == 1 else None
        module.set_all_reduce_hook(partial(_sum_over_replicas, how.replicas, first, compressed))


def _leave_undivided(module: FSDPModule, mesh: DeviceMesh) -> None:
    if mesh.size() > 1:  # over one rank there is nothing to divide by, and setting it costs a pass
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _sum_over_replicas(replicas: Peers, look: Look | None, compressed: CompressedSum | None, gradient: Tensor) -> None:
    """Sum `gradient` over the replicas, in place; `look` where this is the first sum that it goes into."""
    if look is not None:
        look(gradient)
    if replicas.size > 1 and compressed is not None:
        with replicas.time():
            compressed.all_reduce_(gradient, GroupWire(replicas.group))
    elif replicas.size > 1:
        replicas.sum_(gradient)
    _keep_for_this_stream(gradient)


def _keep_for_this_stream(buffer: Tensor) -> None:
    """Keep `buffer` until this stream has read it: on a GPU, casts and offloading still do when FSDP2 lets it go."""
    if on_chip(buffer.device):
        buffer.record_stream(torch.accelerator.current_stream(buffer.device))


class _TimedCollective:
    """A collective of FSDP2 with a stopwatch around it; on a CPU the call returns when it is done."""

    def __init__(
        self, collective: Any, time_collective: TimeCollective, look: Look | None = None, *, encodes: bool = False
    ):
        """`encodes`: it computes beside the transfer, and so shows no link's speed."""
        self._collective = collective
        self._time_collective = time_collective
        self._look = look
        self._encodes = encodes

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        if self._look is not None:
            self._look(input_tensor)
        whole = max(output_tensor, input_tensor, key=torch.numel)
        with self._time_collective(None if self._encodes else sent_bytes(whole.nbytes, group.size())):
            return self._collective(output_tensor, input_tensor, group=group, **options)


class _NothingToReduce:
    """A reduction over one rank: FSDP2 copies gradients together and the result to where it stays. Here both are one
    buffer, and the second copy, of a tensor onto itself, does nothing."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """FSDP2 asks for the input, then for the output."""
        if self._input is not None:
            output = self._input
            self._input = None
            _keep_for_this_stream(output)
            return output
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(self, *_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("one rank reduces nothing")


# When gradients are exchanged


def exchange_in_backward(model: FSDPModule, exchange: bool) -> None:
    """Set whether the backwards that follow exchange gradients or only add them up."""
    model.set_requires_gradient_sync(exchange)
    model.set_is_last_backward(exchange)


def keep_parameters(model: FSDPModule, keep: bool) -> None:
    """Set whether the backwards that follow leave parameters gathered for the next micro-batch."""
    model.set_reshard_after_backward(not keep)


def exchange_now(model: FSDPModule) -> None:
    """Exchange what was added up, where weights' gradients came after their backward (split pipeline schedules).

    FSDP2 has no public call for it; this is what torch's own pipeline schedules do (as of torch 2.13).
    """
    exchange_in_backward(model, True)
    keep_parameters(model, False)
    root = fully_shard.state(model)  # type: ignore[attr-defined]
    for state in root._state_ctx.all_states:
        for group in _groups_of(state):
            _same_format(group)
            group.post_backward()
    root._root_post_backward_final_callback()


def abandon_passes(model: Any) -> None:
    """Bring FSDP2 back to where a step begins, after passes that an error has cut short; their gradients are lost."""
    model.reset_iter_state()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups_of(fully_shard.state(module)):  # type: ignore[attr-defined]
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
            if group.mesh_info.mesh.size() == 1:
                module.set_custom_reduce_scatter(_NothingToReduce())  # type: ignore[arg-type]


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of a module's state; torch 2.11 has one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _same_format(group: Any) -> None:
    """Gradients that a backward left are in the format of the exchange, those that came after it still as computed."""
    for parameter in group.fsdp_params:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
