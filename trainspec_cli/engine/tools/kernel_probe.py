"""`torchrun -m trainspec_cli.engine.tools.kernel_probe FOLDER`: try every backend at the
shapes of FOLDER/plan.json, with all of a run's processes at work at once. Each leaves FOLDER/kernels.rank*.json, its
`KernelTrials`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from trainspec_cli.engine.build.kernel_loading import load_kernel
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.kernels.inputs import Call, describe_call
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.tools.kernel_calls import Calls, calls_of
from trainspec_cli.engine.tools.kernel_trial import Kernel, Workload, operation, try_kernels
from trainspec_cli.engine.tools.optimizer_trial import optimizer_update
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import from_plain, to_plain
from trainspec_cli.spec.recipe.kernels import IN_BLOCKS, KERNELS, TORCH, KernelTrial, KernelTrials
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.rules.kernels import why_untried


def main() -> None:
    folder, rank, here = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = from_plain(Plan, read_json(folder / "plan.json"))
    device = torch.device("cpu") if plan.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)  # Triton launches on the current one, whatever its arguments lie on
    calls = calls_of(plan, stand_in(rank, here, plan.world_size))
    write_json(folder / f"kernels.rank{rank}.json", to_plain(try_all(plan, calls, device)))


def stand_in(rank: int, processes: int, world_size: int) -> int:
    """Whose shapes a process of one host takes: those of ranks all over the run, so that each stage of a pipeline and
    the last, which has the loss, are among them."""
    return rank * (world_size - 1) // max(1, processes - 1)


def try_all(plan: Plan, calls: Calls, device: torch.device) -> KernelTrials:
    """Every backend of every operation that the run uses."""
    workloads = workloads_of(plan, calls, device)
    described = {op: _describe(calls.by_op[op]) for op in workloads if op in calls.by_op}
    if "adamw" in workloads:
        described["adamw"] = _describe_parameters(calls.parameters)
    return KernelTrials(described, {op: try_backends(plan, op, workload) for op, workload in workloads.items()})


def workloads_of(plan: Plan, calls: Calls, device: torch.device) -> dict[str, Workload]:
    """By operation."""
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
    """Where blocks are compiled, as the compiler makes it."""
    kernel = load_kernel(op, name)
    return torch.compile(kernel, dynamic=False) if plan.spec.compile and op in IN_BLOCKS else kernel


def _workload(plan: Plan, op: str, numbers: Mapping[Call, int], device: torch.device) -> Workload:
    chunk = ChunkCrossEntropy()
    if plan.spec.compile:
        chunk.compile()
    return operation(op, numbers, DTYPES[plan.compute], device, chunk)


def _describe(numbers: Counter[Call]) -> tuple[str, ...]:
    return tuple(f"{count} x {describe_call(call)}" for call, count in numbers.most_common())


def _describe_parameters(parameters: Counter[tuple[int, ...]]) -> tuple[str, ...]:
    return tuple(f"{count} x {shape}" for shape, count in parameters.most_common())


if __name__ == "__main__":
    main()
