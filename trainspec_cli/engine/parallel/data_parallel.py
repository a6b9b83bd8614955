"""Data parallelism: FSDP2 over the shard axes, and an all-reduce over replicas in a hook. The same mechanism serves
every data-parallel layout: dp_shard=1 is plain DDP, dp_replicate=1 is plain FSDP, and everything else is HSDP. The hook
makes it possible to time, compress or replace the all-reduce. `comm.gradients` compresses both exchanges
(`comm/compressed.py`). With NCCL they run on FSDP2's streams, and with gloo in a thread (`gradient_sums.py`). Gradients
are sums, never means. The loss is divided by the global number of tokens before the backward pass, so the sum is exact
for any division of samples among ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from trainspec_cli.engine.accelerators import on_chip
from trainspec_cli.engine.comm.codec import Codec
from trainspec_cli.engine.comm.compressed import CompressedSum, Compression, Feedback, GroupWire, decode_parts
from trainspec_cli.engine.comm.exchange import (
    Peers,
    Purpose,
    TimeCollective,
    all_gather,
    all_reduce_,
    reduce_scatter,
    sent_bytes,
)
from trainspec_cli.engine.parallel.gradient_sums import GradientSums, ModuleSums, Route, sum_over_replicas_
from trainspec_cli.engine.parallel.noise import Columns, Held, NoiseProbe

Look = Callable[[Tensor], None]
TimeExchange = Callable[[Purpose, str, dist.ProcessGroup], TimeCollective]
"""Returns the timer and byte counter of a group's exchanges for (purpose, axis, group)."""


@dataclass(frozen=True)
class DataParallel:
    """Settings for storing and exchanging parameters and gradients."""

    compute: torch.dtype
    reduce: torch.dtype
    free_after_forward: bool
    """True for ZeRO-3; otherwise parameters are gathered once per step."""
    offload: bool
    """True if shards, gradients and optimizer state are in host memory and the update runs there."""
    replicas: Peers
    time: TimeExchange
    time_wait: TimeCollective
    """Returns a context manager that times one wait of the compute stream for FSDP2's exchanges."""
    noise: NoiseProbe
    held: Mapping[str, Held]
    """How each parameter's gradient is distributed over ranks, by parameter name."""
    compression: Compression = field(default_factory=Compression)
    parameter_codec: Codec | None = None
    """The format in which parameters are gathered; None for the compute format."""
    sums: GradientSums | None = None
    """The gradient sums on gloo; None if FSDP2 and its hooks compute them."""
    routes: Mapping[str, Route | None] = field(default_factory=dict)
    """Routes of `sums` by shard axis (dp_shard or expert_shard); None if one rank holds everything."""
    losses: list[ModuleLosses] = field(default_factory=list)
    """The errors of compressed exchanges, by module. Each module adds an entry when it is sharded."""
    name: str = "stage0"
    """A name that distinguishes the exchanges of this module from those of other modules on the same rank."""


def apply_data_parallel(
    model: Any, experts: Sequence[nn.Module], shard: DeviceMesh, expert_shard: DeviceMesh | None, how: DataParallel
) -> None:
    """Shard `model` (on meta) in place. `experts` that are spread over ranks are sharded over the remaining axes."""
    if expert_shard is not None:
        for number, module in enumerate(experts):
            if not list(module.parameters()):  # all in 4 bits, without adapters
                continue
            # FSDP2 pads only the first dimension, so an uneven number of experts is padded. If the experts cannot be
            # divided evenly among the ranks but the rows of each expert can, the rows are divided.
            even = [
                all(parameter.shape[dim] % expert_shard.size() == 0 for parameter in module.parameters())
                for dim in (0, 1)
            ]
            by_row = even[1] and not even[0]
            axis = "expert_shard"
            _shard(module, f"experts{number}", axis, expert_shard, how, free=how.free_after_forward, dim=int(by_row))
    for number, block in enumerate(model.block_modules()):
        _shard(block, f"block{number}", "dp_shard", shard, how, free=how.free_after_forward)
    _shard(model, "rest", "dp_shard", shard, how, free=False)


def _shard(
    module: nn.Module, name: str, axis: str, mesh: DeviceMesh, how: DataParallel, *, free: bool, dim: int = 0
) -> None:
    ranks = mesh.size()
    group = mesh.get_group()
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=how.compute, reduce_dtype=how.reduce),
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if how.offload else OffloadPolicy(),
        reshard_after_forward=free and ranks > 1,
        shard_placement_fn=(lambda _parameter: Shard(dim)) if dim else None,
    )
    assert isinstance(module, FSDPModule)
    sizes = tuple(_columns(parameter, ranks) for parameter in trained(module))

    @cache
    def columns() -> Columns:
        """FSDP2 does not know the parameters' names until the first forward pass has started."""
        held = tuple(how.held[parameter._param_fqn] for parameter in trained(module))
        return Columns(ranks, sizes, held, experts=axis == "expert_shard")

    def look(gradients: Tensor) -> None:
        """Pass the module's gradients to the noise probe before their first sum."""
        how.noise.add(gradients, columns())

    row = sum(sizes)
    replicas = how.compression.of_group(f"{how.name}.{name}.replicas", row, how.replicas.group)
    shards = how.compression.of_group(f"{how.name}.{name}.shards", row * ranks, group)
    over_shards, over_replicas = (None if one is None else one.feedback for one in (shards, replicas))
    if over_shards is not None or over_replicas is not None:
        how.losses.append(ModuleLosses(module, group, how.replicas.group, over_shards, over_replicas))
    if ranks > 1:  # with one rank, FSDP2 divides by 1, and setting a divisor would cost a pass over the data
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    route = how.routes.get(axis)
    if how.sums is not None and route is not None:
        own = ModuleSums(how.sums, route, partial(_parameters, module), look, shards, replicas)
        module.set_custom_reduce_scatter(own)  # type: ignore[arg-type]
        module.set_all_reduce_hook(own.add)
    else:
        _sum_in_hooks(module, ranks, how.time("gradients", axis, group), how.replicas, look, shards, replicas)
    if mesh.device_type != "cpu":
        _time_waits(module, how.time_wait)
    if ranks == 1:
        return
    time_parameters = how.time("parameters", axis, group)
    if how.parameter_codec is not None:
        gathered = [(_columns(one, ranks), len(one._orig_size) > 1) for one in _sharded(module)]
        gather = partial(_gather_compressed, how.parameter_codec, gathered)
        module.set_custom_all_gather(_TimedCollective(gather, time_parameters, encodes=True))  # type: ignore[arg-type]
    else:
        module.set_custom_all_gather(_TimedCollective(all_gather, time_parameters))  # type: ignore[arg-type]


def _sum_in_hooks(
    module: FSDPModule,
    ranks: int,
    time_gradients: TimeCollective,
    replicas: Peers,
    look: Look,
    over_shards: CompressedSum | None,
    over_replicas: CompressedSum | None,
) -> None:
    """Let FSDP2 sum over the shards and a hook over the replicas; on a GPU this happens during the backward pass."""

    def sum_over_replicas(gradient: Tensor) -> None:
        if ranks == 1:
            look(gradient)
        if replicas.size > 1:
            sum_over_replicas_(gradient, replicas, over_replicas)
        _keep_for_this_stream(gradient)

    def reduce_compressed(output: Tensor, gradients: Tensor, group: dist.ProcessGroup, **_options: Any) -> None:
        assert over_shards is not None
        output.copy_(over_shards.reduce_scatter(gradients.view(ranks, -1), GroupWire(group)))

    if ranks == 1 or replicas.size > 1:
        module.set_all_reduce_hook(sum_over_replicas)
    if ranks == 1:
        module.set_custom_reduce_scatter(_NothingToReduce())  # type: ignore[arg-type]
        return
    reduce = reduce_scatter if over_shards is None else reduce_compressed
    timed = _TimedCollective(reduce, time_gradients, look, encodes=over_shards is not None)
    module.set_custom_reduce_scatter(timed)  # type: ignore[arg-type]


def _gather_compressed(
    codec: Codec,
    columns: Sequence[tuple[int, bool]],
    output: Tensor,
    own: Tensor,
    group: dist.ProcessGroup,
    **_options: Any,
) -> None:
    """Gather like FSDP2's all-gather, but with encoded matrices. This rank's matrices are encoded too, so that all
    ranks compute with the same values. Norms and biases are not encoded. `columns`: for each parameter, (number of
    columns, whether it is a matrix)."""
    sizes = [size for size, _ in columns]
    parts = list(zip(own.split(sizes), columns, strict=True))
    matrices = torch.cat([part for part, (_, is_matrix) in parts if is_matrix] or [own[:0]])
    others = torch.cat([part for part, (_, is_matrix) in parts if not is_matrix] or [own[:0]])
    encoded_1B = codec.encode(matrices.float()[None])
    gathered_RB = GroupWire(group).gather_rows(torch.cat([encoded_1B[0], others.view(torch.uint8)]))
    encoded_RB, others_RB = gathered_RB.split([encoded_1B.shape[1], others.nbytes], dim=1)
    of_matrices = own.new_empty((group.size(), len(matrices)))
    for start, values in decode_parts(codec, encoded_RB, len(matrices)):
        of_matrices.view(-1)[start : start + len(values)] = values
    of_others = others_RB.contiguous().view(own.dtype)
    starts = {True: 0, False: 0}
    for part, (size, is_matrix) in zip(output.view(group.size(), -1).split(sizes, dim=1), columns, strict=True):
        source = of_matrices if is_matrix else of_others
        part.copy_(source[:, starts[is_matrix] : starts[is_matrix] + size])
        starts[is_matrix] += size


def _keep_for_this_stream(buffer: Tensor) -> None:
    """Keep `buffer` in memory until this stream has read it. On a GPU, casts and offloading may still be reading it
    when FSDP2 frees it."""
    if on_chip(buffer.device):
        buffer.record_stream(torch.accelerator.current_stream(buffer.device))


class _TimedCollective:
    """An FSDP2 collective with a timer around it. On a CPU, the call returns when the collective is done; on an
    accelerator, it runs in one of FSDP2's streams."""

    def __init__(
        self, collective: Any, time_collective: TimeCollective, look: Look | None = None, *, encodes: bool = False
    ):
        """`encodes`: whether the collective also encodes values, in which case its time does not reflect a link's
        speed."""
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
    """The reduction if there is only one rank. FSDP2 copies the gradients into one input buffer, and later the result
    to its destination. Here, input and output are the same buffer, so the second copy does nothing."""

    def __init__(self) -> None:
        self._input: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate a buffer for FSDP2: in the first call for the input, in the second for the output."""
        if self._input is not None:
            output = self._input
            self._input = None
            _keep_for_this_stream(output)
            return output
        self._input = torch.empty(*size, dtype=dtype, device=device)
        return self._input

    def __call__(self, *_arguments: Any, **_options: Any) -> Any:
        raise AssertionError("with one rank, nothing is reduced")


# When gradients are exchanged


def exchange_in_backward(model: FSDPModule, exchange: bool) -> None:
    """Set whether the following backward passes exchange gradients or only accumulate them."""
    model.set_requires_gradient_sync(exchange)
    model.set_is_last_backward(exchange)


def keep_parameters(model: FSDPModule, keep: bool) -> None:
    """Set whether the following backward passes leave parameters gathered for the next micro-batch."""
    model.set_reshard_after_backward(not keep)


def exchange_now(model: Any) -> None:
    """Exchange accumulated gradients after a split pipeline schedule has computed weight gradients later than their
    backward pass. FSDP2 has no public API for this; torch's pipeline schedules do the same (as of torch 2.13)."""
    exchange_in_backward(model, True)
    keep_parameters(model, False)
    root = fully_shard.state(model)  # type: ignore[attr-defined]
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups_of(module):
            # Gradients from a backward pass are in the exchange format; gradients computed after it are in the compute
            # format.
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            group.post_backward()
    root._root_post_backward_final_callback()


def abandon_passes(model: Any) -> None:
    """Reset FSDP2 to the beginning of a step after an error has interrupted its passes; their gradients are lost."""
    model.reset_iter_state()
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in _groups_of(module):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None
            if group.mesh_info.mesh.size() == 1:
                module.set_custom_reduce_scatter(_NothingToReduce())  # type: ignore[arg-type]


# FSDP2's internal records, for which there is no public API (as of torch 2.13).


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP2's parameter groups that belong to `module` itself. In torch 2.11 there is at most one; a stage may
    have none."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def _sharded(module: nn.Module) -> list[Any]:
    return [parameter for group in _groups_of(module) for parameter in group.fsdp_params]


def _time_waits(module: FSDPModule, time_wait: TimeCollective) -> None:
    """Let the compute stream wait for FSDP2's exchanges slightly earlier than FSDP2 does, inside `time_wait`: for
    parameters before they are copied out, for an earlier module's gradients before the next gradients are reduced, and
    for all gradients at the end of the backward pass. In FSDP2's own hooks, the measured time would include its
    copies."""

    def after_waiting(proceed: Callable[..., None], events: Callable[[], list[torch.Event | None]]) -> Any:
        def wait_and_proceed(*arguments: Any) -> None:
            awaited = [event for event in events() if event is not None]
            if awaited:
                with time_wait():
                    for event in awaited:
                        torch.accelerator.current_stream().wait_event(event)
            proceed(*arguments)

        return wait_and_proceed

    def gathered(group: Any) -> list[torch.Event | None]:
        return [] if group._all_gather_result is None else [group._all_gather_result.all_gather_event]

    def reduced(group: Any) -> list[torch.Event | None]:
        if not group.reduce_grads:
            return []
        context = group.comm_ctx
        if hasattr(context, "reduce_scatter_states"):
            states = context.reduce_scatter_states
            reclaimed = states[: max(0, len(states) - context.reduce_scatter_max_input_buffers + 1)]
        else:  # before torch 2.13
            reclaimed = [context.reduce_scatter_state] if context.reduce_scatter_state is not None else []
        return [*(state.event for state in reclaimed), group._post_reduce_event]

    def all_reduced(group: Any) -> list[torch.Event | None]:
        return [*getattr(group.comm_ctx, "_last_post_reduce_events", {}).values(), group._post_reduce_event]

    for group in _groups_of(module):
        group.wait_for_unshard = after_waiting(group.wait_for_unshard, partial(gathered, group))
        group.post_backward = after_waiting(group.post_backward, partial(reduced, group))
        group.finalize_backward = after_waiting(group.finalize_backward, partial(all_reduced, group))


def share_streams(stages: Iterable[nn.Module]) -> None:
    """Make FSDP2 exchange the parameters and gradients of all pipeline stages of a rank in the same streams.

    Each stage is a root module of FSDP2, which creates streams for it in its first forward pass. The caching allocator
    keeps the buffers of each stream in a pool that other streams cannot use. torch's `share_comm_ctx` shares too much:
    the next stage's first pass would reset the lists of exchanges in progress and of the backward order (as of torch
    2.13).
    """
    streams: dict[str, torch.Stream] = {}

    def share(context: Any, lazy_init: Callable[[torch.device], None]) -> Callable[[torch.device], None]:
        def init(device: torch.device) -> None:
            lazy_init(device)
            made = {name: value for name, value in vars(context).items() if isinstance(value, torch.Stream)}
            for name, stream in made.items():
                setattr(context, name, streams.setdefault(name, stream))

        return init

    for stage in stages:
        context = fully_shard.state(stage)._comm_ctx  # type: ignore[attr-defined]
        context.lazy_init = share(context, context.lazy_init)


def trained(module: nn.Module) -> list[Any]:
    """Return FSDP2's records of the trained parameters that belong to `module` itself."""
    return [parameter for parameter in _sharded(module) if parameter.sharded_param.requires_grad]


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter.sharded_param for parameter in trained(module)]


def _columns(parameter: Any, ranks: int) -> int:
    """Return the number of columns that a parameter takes up in a row. A parameter that is split along its first
    dimension is padded to complete rows on each rank."""
    size: torch.Size = parameter._orig_size
    if parameter.fsdp_placement.dim or not size:
        return -(-size.numel() // ranks)
    return -(-size[0] // ranks) * size[1:].numel()


# The errors of a module's compressed exchanges can be stored as shares of its parameters, a form that suits any layout.
#
# Each rank keeps the encoding error of the gradients that it sent (`comm/compressed.py`), which belongs to the rows of
# one layout. The sum of these errors over the ranks is missing from the gradient sums and has the shape of the
# gradients. A rank's share of this sum can therefore be moved to another layout like a moment. In the new layout, each
# rank keeps the errors of its own row, which an exchange over shards does not encode.


@dataclass(frozen=True)
class ModuleLosses:
    """This rank's error-feedback buffers for a module's gradient exchanges: over shards, then over replicas."""

    module: nn.Module
    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup
    over_shards: Feedback | None
    over_replicas: Feedback | None

    @torch.no_grad()
    def sum_up(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with this rank's share of the errors that are missing from its gradient sums, flattened,
        in fp32. Called collectively by all ranks of both groups."""
        feedback = self.over_shards or self.over_replicas
        assert feedback is not None, "a module without error feedback has no errors"
        own_N = torch.zeros(sum(self._sizes), device=feedback.committed.device)
        if self.over_shards is not None:
            reduce_scatter(own_N, self.over_shards.committed.float().view(self.shards.size(), -1), self.shards)
        if self.over_replicas is not None:
            own_N += self.over_replicas.committed
        if self.replicas.size() > 1:
            all_reduce_(own_N, self.replicas)
        yield from zip(_parameters(self.module), own_N.split(self._sizes), strict=True)

    @torch.no_grad()
    def take(self, share_of: Callable[[nn.Parameter], Tensor]) -> None:
        """Replace each parameter's errors with the result of `share_of`, divided equally among the replicas."""
        parts = []
        for parameter, columns in zip(_parameters(self.module), self._sizes, strict=True):
            share = share_of(parameter).float().flatten() / self.replicas.size()
            parts.append(F.pad(share, (0, columns - len(share))))
        own_N = torch.cat(parts)
        if self.over_shards is not None:
            self.over_shards.clear()
            self.over_shards.committed.view(self.shards.size(), -1)[self.shards.rank()] = own_N.bfloat16()
        if self.over_replicas is not None:
            self.over_replicas.clear()
            if self.over_shards is None:
                self.over_replicas.committed.copy_(own_N)

    @property
    def _sizes(self) -> list[int]:
        return [_columns(parameter, self.shards.size()) for parameter in trained(self.module)]
