"""Run a plan's step as one rank would, but with fake tensors, and record it. Fake tensors have shapes but no memory,
and collectives use a process group that sends nothing. So a laptop can count the memory and compute of one rank among
thousands.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trainspec_cli.engine.accelerators import KINDS
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.digest import MicroBatch, held_part
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models.experts import Experts
from trainspec_cli.engine.models.layers import all_but_channels
from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.shares import local_part
from trainspec_cli.planner.memory.caching_allocator import GROWS_SEGMENTS, CachingAllocator, MemoryBlock
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.model import TextModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import TraceRequest, TraceResult

# Measure the resource usage of a piece of code: bytes of live tensors, floating-point operations and bytes of
# collectives.

_aten = torch.ops.aten
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "receive",
    "broadcast_": "broadcast",
}


EXCHANGING_STATE = ("dp_shard", "dp_replicate", "expert_shard", "pp")
"""Axes whose exchange buffers count as collectives. The exchange buffers of other axes count as activations."""


class Ledger(TorchDispatchMode):
    """Records all memory, computation and communication in its context.

    A storage is counted at its current size, from the operation that creates it until it is freed, because FSDP2 frees
    parameters by resizing their storages to zero. Each tensor is counted under exactly one cause: activations (saved by
    autograd), gathered (by FSDP2), collectives (exchanged by data parallelism and pipelines), the cause set with
    `name`, or otherwise temporaries.
    """

    def __init__(self, *, expandable_segments: bool = False) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.flops = 0.0
        self.comm_bytes: Counter[str] = Counter()
        self.axes: dict[str, str] = {}
        """Maps names of process groups to their mesh axes."""
        self.by_cause: Counter[str] = Counter()
        self.peak_by_cause: Counter[str] = Counter()
        self.vocabulary: int | None = None
        """Size of a rank's part of the vocabulary. A matrix returned by an operation contains logits if its rows have
        this length, and gradients of the embedding or the head if it has this number of rows."""
        self.allocator = CachingAllocator(expandable=expandable_segments)
        """The memory that PyTorch's CUDA allocator would reserve for the same storages."""
        self._blocks: dict[int, MemoryBlock] = {}
        self._sizes: dict[int, int] = {}
        self._causes: dict[int, str] = {}
        self._births: dict[int, int] = {}
        self._time = self._peak_time = 0
        """Number of storages created so far, and the number at the time of the peak."""
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor)

    def begin(self) -> None:
        """Reset the counts here. Memory that is in use now is still counted."""
        self.peak_bytes, self.flops, self.comm_bytes = self.live_bytes, 0.0, Counter()
        self.peak_by_cause = Counter(self.by_cause)
        self._peak_time = self._time

    def name(self, tensors: Iterable[Tensor], cause: str) -> None:
        """Count the memory of `tensors` as `cause` from now on. If they were alive at the peak, change the cause there
        too, because a buffer is created before the operation that shows its purpose."""
        for tensor in _tensors(list(tensors)):
            self._rename(tensor.untyped_storage()._cdata, cause)

    def _rename(self, key: int, cause: str) -> None:
        if key in self._sizes:
            counters = [self.by_cause]
            if self._births[key] <= self._peak_time:
                counters.append(self.peak_by_cause)
            for counter in counters:
                counter[self._causes[key]] -= self._sizes[key]
                counter[cause] += self._sizes[key]
            self._causes[key] = cause

    def __enter__(self) -> Ledger:
        self._resize = torch.UntypedStorage.resize_
        ledger = self
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            ledger._hold(storage)
            ledger._rename(storage._cdata, "gathered")
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        self._saving.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._saving.__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def _save(self, tensor: Tensor) -> Tensor:
        cause = self._causes.get(tensor.untyped_storage()._cdata)
        if not isinstance(tensor, DTensor) and cause in ("temporaries", "collectives"):
            owner = tensor if tensor._base is None else tensor._base
            self.name([tensor], "gathered" if isinstance(owner, nn.Parameter) else "activations")
        return tensor

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            # Count the larger of input and output, which a rank holds before or after the exchange.
            kind = COLLECTIVES.get(func._overloadpacket.__name__)
            if kind:
                sides = [sum(t.nbytes for t in _tensors(argument)) for argument in args]
                group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
                axis = self.axes.get(dist.ProcessGroup.unbox(group).group_name, "all")
                self.comm_bytes[f"{axis} {kind}"] += max(sides, default=0)
                if axis in EXCHANGING_STATE:
                    for tensor in _tensors(args):
                        if self._causes.get(tensor.untyped_storage()._cdata) == "temporaries":
                            self.name([tensor], "collectives")
        else:
            packet = func._overloadpacket
            if packet in _CPU_ATTENTION:
                count, tensors, causal = _CPU_ATTENTION[packet]
                half = len(args) > causal and args[causal]  # causal attention computes half of the scores
                self.flops += count(*(tensor.shape for tensor in args[:tensors])) * (0.5 if half else 1.0)
            elif packet in flop_registry:
                self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
            for tensor in _tensors(result):
                cause = "temporaries"
                if func is _aten._to_copy.default and self._causes.get(args[0].untyped_storage()._cdata) == "gradients":
                    cause = "gradients"  # these are full gradients in the exchange format
                elif self.vocabulary is not None and tensor.dim() == 2:
                    if tensor.shape[1] == self.vocabulary:
                        cause = "logits"
                    elif tensor.shape[0] == self.vocabulary:
                        cause = "gradients"
                self._hold(tensor.untyped_storage(), cause)
        return result

    def _hold(self, storage: torch.UntypedStorage, cause: str = "temporaries") -> None:
        """Count a storage's current size. New storages are tracked until they are freed."""
        key = storage._cdata
        size = storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._drop, key)
            self._causes[key] = cause
            self._time += 1
            self._births[key] = self._time
        grown = size - self._sizes.get(key, 0)
        if grown:
            self._reserve(key, size)
        self._sizes[key] = size
        self.live_bytes += grown
        self.by_cause[self._causes[key]] += grown
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_by_cause = self.live_bytes, Counter(self.by_cause)
            self._peak_time = self._time

    def _reserve(self, key: int, size: int) -> None:
        """Replace the allocator's block for a storage with one of the storage's current size."""
        if key in self._blocks:
            self.allocator.free(self._blocks.pop(key))
        if size:
            self._blocks[key] = self.allocator.allocate(size)

    def _drop(self, key: int) -> None:
        self._reserve(key, 0)
        size = self._sizes.pop(key, 0)
        self.live_bytes -= size
        self.by_cause[self._causes.pop(key)] -= size


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors that have memory. A DTensor is a wrapper whose content is counted separately, and meta tensors
    have no memory."""
    found = (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor))
    return (tensor for tensor in found if tensor.device.type != "meta")


_CPU_ATTENTION: dict[Any, tuple[Callable[..., int], int, int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (sdpa_flop_count, 3, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (sdpa_backward_flop_count, 4, 7),
}
"""Attention on a CPU, by operation: its FLOP count, its number of tensor arguments, and the index of `is_causal`."""


CPU = torch.device("cpu")


def run(request: TraceRequest) -> TraceResult:
    started = time.perf_counter()
    traced = trace_rank(request.plan, request.rank)
    return replace(traced, seconds=time.perf_counter() - started)


def trace_rank(plan: Plan, rank: int) -> TraceResult:
    """Return the counts of a rank's step. All micro-batches have the same cost. So if there are many, that cost is
    derived from the difference between a shorter and a longer step. Blocks are traced eagerly with the default kernels,
    because other kernels compute the same values and keep no more memory."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec())
    with fake_world(rank, plan.world_size):
        mesh = build_mesh(plan.layout, "cpu")
        chip = plan.spec.cluster.accelerator
        ledger = Ledger(expandable_segments=chip is None or chip.vendor in GROWS_SEGMENTS)
        with FakeTensorMode(allow_non_fake_inputs=True), ledger, kernels_of(plan.device):
            state = build_train_state(plan, CPU, mesh)
            for part in state.parts:
                even_out(part)
            state.clock.on_gpu = False
            ledger.axes = axes_of_groups(state)
            # Assign a cause to the tensors that persist between steps, and to each gradient, sharded or full, once it
            # is attached to its parameter.
            ledger.name((share.local for share in state.shares), "parameters")
            ledger.name((buffer for part in state.parts for buffer in part.buffers()), "parameters")
            moments = (value for moments in state.optimizer.state.values() for value in moments.values())
            ledger.name(moments, "optimizer")

            watched: set[int] = set()

            def watch(parameters: Iterable[Any]) -> None:
                for parameter in (parameter for parameter in parameters if id(parameter) not in watched):
                    watched.add(id(parameter))
                    if id(parameter) not in lasting:
                        ledger.name([local_part(parameter)], "gathered")
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(
                            lambda parameter: ledger.name([local_part(parameter.grad)], "gradients")
                        )

            lasting = {id(share.parameter) for share in state.shares}
            watch(share.parameter for share in state.shares)
            for part in state.parts:  # during a forward pass, modules hold the gathered parameters
                part.register_forward_pre_hook(lambda part, _: watch(part.parameters()))
                for module in part.modules():
                    module.register_forward_pre_hook(lambda module, _: watch(module.parameters(recurse=False)))
            if isinstance(plan.spec.model, TextModel):
                ledger.vocabulary = plan.spec.model.vocab_size // plan.layout.tp
            state_bytes = float(ledger.live_bytes)
            counted: dict[int, TraceResult] = {}
            for count in traced_micro_batches(plan):
                ledger.begin()
                train_step(
                    state,
                    [
                        fake_batch(plan, state) for _ in range(count)
                    ],  # no references remain, so the modules are freed before the next count
                    global_tokens=plan.tokens_per_step,
                    clip_norm=plan.spec.optim.grad_clip_norm,
                )
                causes = {cause: float(size) for cause, size in ledger.peak_by_cause.items() if size}
                comm_bytes = {exchange: float(size) for exchange, size in ledger.comm_bytes.items()}
                counted[count] = TraceResult(0, 0.0, float(ledger.peak_bytes), causes, ledger.flops, comm_bytes)
            reserved = float(ledger.allocator.peak_reserved_bytes)
            found = replace(extrapolate(plan, counted), rank=rank, state_bytes=state_bytes)
            return replace(found, peak_reserved_bytes=reserved)


def axes_of_groups(state: TrainState) -> dict[str, str]:
    """Return the mesh axes by process group name. Parameter sharding and summing over replicas are treated as two
    axes."""
    mesh = state.mesh
    lines = state.stages.lines
    groups = {axis: mesh.group(axis) for axis in MESH_AXES}
    groups |= {axis: mesh.expert_group(axis) for axis in ("ep", "expert_shard")} if mesh.experts else {}
    groups |= {"pp": lines.up, "dp_shard": mesh.shard.get_group()}
    named = {str(group.group_name): axis for axis, group in groups.items() if group.size() > 1}
    return named | ({str(lines.down.group_name): "pp"} if mesh.layout.pp > 1 else {})


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Trace norms as `device` computes them: with one kernel on a GPU, and with several kernels, which save more
    tensors, on a CPU."""
    if device == "cpu":
        yield
        return
    plain = [getattr(module, name) for module, name in STAND_INS]
    kind = KINDS["cpu"]
    for (module, name), stand_in in STAND_INS.items():
        setattr(module, name, stand_in)
    KINDS["cpu"] = replace(kind, has_norm_kernels=True)
    try:
        yield
    finally:
        KINDS["cpu"] = kind
        for (module, name), function in zip(STAND_INS, plain, strict=True):
            setattr(module, name, function)


class _FusedNorm(torch.autograd.Function):
    """Stands in for torch's CUDA `_fused_rms_norm`, which has no fake version for CPUs; shapes and memory traffic are
    the same. The kernel reads x and writes the result, like a copy; its backward pass reads dy and x and writes dx,
    like an addition.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.add(x, dy), None if weight is None else torch.empty_like(weight)


def _statistics_of(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    mean = x.mean(dim=all_but_channels(x), dtype=torch.float32)
    return mean, torch.empty_like(mean)


def _sums_of_gradients(dy: Tensor, x: Tensor, mean: Tensor, _inverse_std: Tensor, weight: Tensor, *_: bool) -> Any:
    torch.dot(dy.flatten(), x.flatten())
    return torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(weight), torch.empty_like(weight)


STAND_INS: dict[tuple[Any, str], Callable[..., Any]] = {
    (F, "rms_norm"): lambda x, _shape, weight=None, eps=None: _FusedNorm.apply(x, weight),
    (torch, "batch_norm_update_stats"): _statistics_of,
    (torch, "batch_norm_elemt"): lambda x, *_: x.clone(),
    (torch, "batch_norm_backward_reduce"): _sums_of_gradients,
    (torch, "batch_norm_backward_elemt"): lambda dy, x, *_: torch.add(x, dy),
}
"""Stand-ins, with the same shapes and memory traffic, for GPU kernels that have no fake version for CPUs."""


def traced_micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batch counts to trace: the step's own count or, if that is large, two smaller counts that fill
    the pipeline."""
    most = 3 * plan.layout.pp if plan.layout.pp > 1 else 2
    return (plan.grad_accum_steps,) if plan.grad_accum_steps <= most else (most - plan.layout.pp, most)


def extrapolate(plan: Plan, counted: dict[int, TraceResult]) -> TraceResult:
    """Return the totals of a complete step, given those of the traced steps, by number of micro-batches. The traced
    micro-batches already reach the memory peak, except with GPipe, which holds all micro-batches at the same time.
    """
    (longer, second), *others = sorted(counted.items(), reverse=True)
    if not others:
        return second
    ((shorter, first),) = others
    times = (plan.grad_accum_steps - longer) / (longer - shorter)
    grows = plan.layout.pp > 1 and plan.layout.pipeline_schedule == "gpipe"
    peak_times = times if grows else 0.0

    def each(before: dict[str, float], after: dict[str, float], times: float) -> dict[str, float]:
        """Extrapolate: `after` plus `times` the difference between `after` and `before`."""
        return {key: value + times * (value - before.get(key, 0.0)) for key, value in after.items()}

    return replace(
        second,
        peak_memory_bytes=second.peak_memory_bytes + peak_times * (second.peak_memory_bytes - first.peak_memory_bytes),
        peak_by_cause=each(first.peak_by_cause, second.peak_by_cause, peak_times),
        flops=second.flops + times * (second.flops - first.flops),
        comm_bytes=each(first.comm_bytes, second.comm_bytes, times),
    )


@contextmanager
def fake_world(rank: int, world_size: int, backends: str = "fake") -> Iterator[None]:
    FakeWork.is_completed = lambda _work: True  # type: ignore[method-assign, assignment]
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def even_out(part: Any) -> None:
    """Assign the same number of tokens to every rank, because fake tokens have no values to route by. torch can infer
    the shapes of a grouped matmul only for bf16, so it is replaced by a single matmul of all rows, which has the same
    cost."""
    for module in part.modules():
        if isinstance(module, Experts):
            module.grouped_matmul = _GroupedProduct.multiply  # type: ignore[method-assign, assignment]
        if isinstance(module, SpreadDispatch):
            module.read_splits = even_splits


class _GroupedProduct(torch.autograd.Function):
    """Has the shapes and FLOPs of a grouped matmul: every row is multiplied by one matrix."""

    @classmethod
    def multiply(cls, x_MD: Tensor, weight_EDF: Tensor, _counts_E: Tensor) -> Tensor:
        return cls.apply(x_MD, weight_EDF)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return x @ weight[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        if x is None:
            return dy @ weight[0].T, None
        _ = x.T @ dy
        return dy @ weight[0].T, torch.empty_like(weight)


def fake_batch(plan: Plan, state: TrainState) -> MicroBatch:
    model = plan.spec.model
    samples = plan.micro_batch_size
    if model.unit == "samples":
        images = torch.zeros(samples, model.in_channels, *model.input_size)
        labels = (samples, *model.input_size) if model.segments else (samples,)
        return images, torch.zeros(labels, dtype=torch.int64)
    tokens = torch.zeros(samples, plan.spec.data.seq_len, dtype=torch.int64)
    return held_part((tokens, tokens), state.positions_S)
