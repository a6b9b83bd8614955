"""Every backend of every operation tried at the shapes of a plan, with all of a run's processes at work at once.

The shapes are found by making a step with fake tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trainspec_cli.engine.accelerators import enter
from trainspec_cli.engine.build.assemble import build_train_state, load_kernel, modules_with
from trainspec_cli.engine.build.train_state import DTYPES, TrainState
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.kernels.inputs import OPERATIONS, Call, describe_call
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.engine.tools.kernel_trial import Kernel, Workload, operation, optimizer_update, try_kernels
from trainspec_cli.engine.tools.trace import CPU, even_out, fake_batch, fake_world
from trainspec_cli.recipe.json_text import finite_or_none
from trainspec_cli.recipe.keys.kernels import IN_BLOCKS, KERNELS, TORCH, KernelSpec, KernelTrial, KernelTrials
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import KernelRequest, KernelResult
from trainspec_cli.recipe.rules.check import why_untried


def run(request: KernelRequest) -> KernelResult:
    plan = request.plan
    rank = int(os.environ["RANK"])
    here = int(os.environ["WORLD_SIZE"])
    device = enter(plan.device)  # Triton launches on the current one, whatever its arguments lie on
    calls = calls_of(plan, stand_in(rank, here, plan.world_size))
    trials = try_all(plan, calls, device)
    join_processes(plan.device)
    return KernelResult(tuple(gather_json(finite_or_none(to_plain(trials)), partial(from_plain, KernelTrials))))


def stand_in(rank: int, processes: int, world_size: int) -> int:
    """Return the rank whose shapes a process of one node takes: they lie all over the run, so that each stage of a
    pipeline and the last, which has the loss, are among them."""
    return rank * (world_size - 1) // max(1, processes - 1)


def try_all(plan: Plan, calls: Calls, device: torch.device) -> KernelTrials:
    """Every backend of every operation that the run uses."""
    workloads = workloads_of(plan, calls, device)
    described = {op: _describe(calls.by_op[op], describe_call) for op in workloads if op in calls.by_op}
    if "adamw" in workloads:
        described["adamw"] = _describe(calls.parameters, str)
    return KernelTrials(described, {op: try_backends(plan, op, workload) for op, workload in workloads.items()})


def workloads_of(plan: Plan, calls: Calls, device: torch.device) -> dict[str, Workload]:
    """Return the operations that the run uses."""
    workloads = {op: _workload(plan, op, numbers, device) for op, numbers in calls.by_op.items() if numbers}
    if plan.spec.optim.name == "adamw":
        where = device if plan.offload == "none" else torch.device("cpu")
        workloads["adamw"] = optimizer_update(calls.parameters, plan.spec.optim, where)
    return workloads


def try_backends(plan: Plan, op: str, workload: Workload) -> dict[str, KernelTrial]:
    untried = {name: why_untried(plan, op, name) for name in KERNELS[op] if name != TORCH}
    kernels = {name: _kernel(plan, op, name) for name in KERNELS[op] if not untried.get(name)}
    return try_kernels(kernels, workload) | {
        name: KernelTrial(untried=reason) for name, reason in untried.items() if reason
    }


def _kernel(plan: Plan, op: str, name: str) -> Kernel:
    """Return the kernel; where blocks are compiled, as the compiler makes it."""
    kernel = load_kernel(op, name)
    return torch.compile(kernel, dynamic=False) if plan.spec.compile and op in IN_BLOCKS else kernel


def _workload(plan: Plan, op: str, numbers: Mapping[Call, int], device: torch.device) -> Workload:
    chunk = ChunkCrossEntropy()
    if plan.spec.compile:
        chunk.compile()
    return operation(op, numbers, DTYPES[plan.compute], device, chunk)


def _describe(numbers: Counter[Any], show: Callable[[Any], str]) -> tuple[str, ...]:
    return tuple(f"{count} x {show(counted)}" for counted, count in numbers.most_common())


# The calls of a step


@dataclass
class Calls:
    """The calls of one rank's step with one micro-batch."""

    by_op: dict[str, Counter[Call]] = field(default_factory=dict)
    parameters: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shapes of what the optimizer updates."""


def calls_of(plan: Plan, rank: int) -> Calls:
    """Called where no process group is open yet."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec(), recompute="none")
    calls = Calls()
    with fake_world(rank, plan.group_size):
        mesh = build_mesh(plan.layout, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = build_train_state(plan, CPU, mesh)
            state.clock.on_gpu = False
            for part in state.parts:
                even_out(part)
                _listen(part, calls)
            calls.parameters.update(tuple(share.local.shape) for share in state.shares if share.is_trained)
            _step(plan, state)
    return calls


def _listen(part: Any, calls: Calls) -> None:
    for op in OPERATIONS:
        for module in modules_with(part, op):
            setattr(module, op, _noting(getattr(module, op), calls.by_op.setdefault(op, Counter())))


def _noting(function: Callable[..., Any], seen: Counter[Call]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        seen[tuple(map(_shape_or_number, arguments))] += 1
        return function(*arguments)

    return noted


def _shape_or_number(argument: Any) -> tuple[int, ...] | float | None:
    if isinstance(argument, Tensor):
        return tuple(map(int, argument.shape))
    return argument if isinstance(argument, (int, float)) else None


def _step(plan: Plan, state: TrainState) -> None:
    """One micro-batch goes through all stages; what the backward calls follows from it."""
    tokens, targets, *_ = fake_batch(plan, state)
    documents = [torch.zeros_like(tokens)] if plan.spec.data.masks_documents else []
    forward_only(state.stages, tokens, targets, *documents)
