"""Trace a rank's real step of a plan with fake tensors.

Fake tensors have shapes but no memory, and collectives use a process group that does not send anything. So the memory
and compute of one rank among thousands can be counted on a laptop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.digest import MicroBatch, held_part
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models.experts import Experts
from trainspec_cli.engine.parallel.expert import SpreadDispatch, even_splits
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.shares import local_part
from trainspec_cli.engine.tools.ledger import Ledger
from trainspec_cli.planner.memory.caching_allocator import GROWS_SEGMENTS
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.model import TextModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import TraceRequest, TraceResult

CPU = torch.device("cpu")


def run(request: TraceRequest) -> TraceResult:
    started = time.perf_counter()
    traced = trace_rank(request.plan, request.rank)
    return replace(traced, seconds=time.perf_counter() - started)


def trace_rank(plan: Plan, rank: int) -> TraceResult:
    """Return the counts of a rank's step. All micro-batches have the same cost. So if there are many, it follows from
    the difference between a shorter and a longer step. Blocks are traced eagerly with the default kernels, because
    other kernels compute the same and do not keep more."""
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
            # Name the tensors that persist between steps, and each gradient, sharded or full, once it is attached
            # to its parameter.
            ledger.name((share.local for share in state.shares), "parameters")
            ledger.name((buffer for part in state.parts for buffer in part.buffers()), "parameters")
            moments = (value for moments in state.optimizer.state.values() for value in moments.values())
            ledger.name(moments, "optimizer")

            def name_gradient(parameter: Any) -> None:
                ledger.name([local_part(parameter.grad)], "gradients")

            watched: set[int] = set()

            def watch(parameters: Iterable[Any]) -> None:
                for parameter in (parameter for parameter in parameters if id(parameter) not in watched):
                    watched.add(id(parameter))
                    if id(parameter) not in lasting:
                        ledger.name([local_part(parameter)], "gathered")
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(name_gradient)

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
                    ],  # not kept, so that they are freed before the next count
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
    """Return the mesh axes by process group name. Sharding parameters and summing over replicas count as two axes."""
    mesh = state.mesh
    lines = state.stages.lines
    groups = {axis: mesh.group(axis) for axis in MESH_AXES}
    groups |= {axis: mesh.expert_group(axis) for axis in ("ep", "expert_shard")} if mesh.experts else {}
    groups |= {"pp": lines.up, "dp_shard": mesh.shard.get_group()}
    named = {str(group.group_name): axis for axis, group in groups.items() if group.size() > 1}
    return named | ({str(lines.down.group_name): "pp"} if mesh.layout.pp > 1 else {})


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Trace norms as `device` computes them: with one kernel on a GPU, and with several kernels, which save more, on a
    CPU."""
    plain = F.rms_norm
    if device != "cpu":
        F.rms_norm = lambda x, _shape, weight=None, eps=None: _FusedNorm.apply(x, weight)  # type: ignore[assignment]
    try:
        yield
    finally:
        F.rms_norm = plain


class _FusedNorm(torch.autograd.Function):
    """The shapes and the memory traffic of torch's `_fused_rms_norm` on CUDA, which has no fake version for a CPU.

    The kernel reads x and writes the result, as a copy does; its backward reads dy and x and writes dx, as a sum does.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        x, weight, _ = ctx.saved_tensors
        return torch.add(x, dy), None if weight is None else torch.empty_like(weight)


def traced_micro_batches(plan: Plan) -> tuple[int, ...]:
    """Return the micro-batch counts to trace: the count of a step or, if it is large, two smaller counts that fill the
    pipeline."""
    most = 3 * plan.layout.pp if plan.layout.pp > 1 else 2
    return (plan.grad_accum_steps,) if plan.grad_accum_steps <= most else (most - plan.layout.pp, most)


def extrapolate(plan: Plan, counted: dict[int, TraceResult]) -> TraceResult:
    """Return the counts of a complete step, given the counts for one or two numbers of micro-batches.

    The traced micro-batches already reach the peak, except with GPipe, which holds all micro-batches at the same time.
    """
    (longer, second), *others = sorted(counted.items(), reverse=True)
    if not others:
        return second
    ((shorter, first),) = others
    times = (plan.grad_accum_steps - longer) / (longer - shorter)
    grows = plan.layout.pp > 1 and plan.layout.pipeline_schedule == "gpipe"
    peak_times = times if grows else 0.0

    def each(before: dict[str, float], after: dict[str, float], times: float) -> dict[str, float]:
        """Extrapolate from the values of `after` by adding their difference from `before` this number of times."""
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
    """Assign the same number of tokens to every rank, because fake tokens do not determine their expert. torch knows
    the grouped product's shapes only for bf16; a single product of all rows has the same cost."""
    for module in part.modules():
        if isinstance(module, Experts):
            module.grouped_matmul = _GroupedProduct.multiply  # type: ignore[method-assign, assignment]
        if isinstance(module, SpreadDispatch):
            module.read_splits = even_splits


class _GroupedProduct(torch.autograd.Function):
    """The shapes and FLOPs of a grouped product, where every row is multiplied by one matrix."""

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
