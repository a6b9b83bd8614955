"""Try every backend of every operation with the shapes of a plan, while all of a run's processes are working.

The shapes are found by running a step with fake tensors.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainspec_cli.engine.accelerators import enter, synchronise
from trainspec_cli.engine.build.assemble import build_train_state, load_kernel, modules_with
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.optim.optimizer import build_optimizer
from trainspec_cli.engine.run.pipeline_run import forward_only
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.tools.trace import CPU, even_out, fake_batch, fake_world
from trainspec_cli.recipe.json_text import finite_or_none
from trainspec_cli.recipe.keys.kernels import IN_BLOCKS, KERNELS, TORCH, KernelSpec, KernelTrial, KernelTrials
from trainspec_cli.recipe.keys.training import OptimSpec
from trainspec_cli.recipe.records import from_plain, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import KernelRequest, KernelResult
from trainspec_cli.recipe.rules.check import why_untried

# How to test each operation: make inputs of given shapes, with random numbers similar to those of a run, and compute a
# reference.

Shape = tuple[int, ...]
Call = tuple[Shape | float | None, ...]
"""An operation's arguments: a shape for each tensor, each number's value, and None for anything else."""

CHECKED_TOKENS = 1024
"""Number of tokens per sample in the comparison with fp64; it is small because all scores and logits are in memory."""


@dataclass(frozen=True)
class Inputs:
    arguments: tuple[Any, ...]
    leaves: tuple[int, ...]
    """Indices of the arguments that need gradients."""

    def to(self, dtype: torch.dtype) -> Inputs:
        """Return the same values in a different format."""
        found = []
        for argument in self.arguments:
            is_number = isinstance(argument, Tensor) and argument.is_floating_point()
            found.append(argument.detach().to(dtype) if is_number else argument)
        return Inputs(tuple(found), self.leaves)

    def with_gradients(self) -> Inputs:
        for index in self.leaves:
            self.arguments[index].requires_grad_()
        return self


def make_inputs(op: str, call: Any, dtype: torch.dtype, device: torch.device, chunk: Any = None) -> Inputs:
    """Make random inputs for a call (`Call`), with values similar to those of a run. `chunk`: the module of the linear
    cross-entropy for the loss of one chunk."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(shape: Any, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * std).to(dtype)

    def uniform(shape: Any, low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=generator, device=device) * (high - low) + low

    if op == "attention":
        *heads, mask, scale = call
        # Place heads next to one another in memory, as in the output of projections.
        q, k, v = (normal((batch, tokens, number, size)).transpose(1, 2) for batch, number, tokens, size in heads)
        if mask is not None:  # a causal mask, aligned to the last query
            row, column = (torch.arange(size, device=device) for size in mask[-2:])
            mask = (column <= row[:, None] + mask[-1] - mask[-2]).expand(mask)
        return Inputs((q, k, v, mask, scale), (0, 1, 2))
    if op == "rope":
        tokens, size = call[1]
        x = normal(call[0])
        angles = uniform((tokens, size // 2), 0.0, 6.28).repeat(1, 2)
        return Inputs((x, angles.cos().to(dtype), angles.sin().to(dtype)), (0,))
    if op == "linear_cross_entropy":
        vocabulary, size = call[1]
        targets = uniform(call[2], 0, vocabulary).long().clamp_max(vocabulary - 1)
        targets[::16] = IGNORED_TARGET
        return Inputs((normal(call[0]), normal(call[1], size**-0.5), targets, chunk), (0, 1))
    if op == "grouped_matmul":
        rows = call[0][0]
        experts, inputs, _ = call[1]
        counts = torch.full((experts,), rows // experts, dtype=torch.int64, device=device)
        counts[: rows % experts] += 1
        return Inputs((normal(call[0]), normal(call[1], inputs**-0.5), counts), (0, 1))
    if op == "ssd_scan":
        x, b, c = (normal(call[index]) for index in (0, 3, 4))
        # Steps and decays are similar to their initial values (`models.mamba2`), in at least fp32.
        wide = torch.promote_types(dtype, torch.float32)
        dt = uniform(call[1], 0.001, 0.1).to(wide)
        a = -uniform(call[2], 1.0, 16.0).to(wide)
        return Inputs((x, dt, a, b, c), (0, 1, 2, 3, 4))
    return Inputs(tuple(normal(given) if isinstance(given, tuple) else given for given in call), (0, 1))


def describe_call(call: Call) -> str:
    """Describe a call by its shapes: `(8, 6, 512, 64) (8, 6, 512, 64) ...`."""
    return " ".join(str(argument) for argument in call if isinstance(argument, tuple))


def reference(op: str, *arguments: Any) -> Tensor:
    """The reference for every kernel: compute an operation in the format of its arguments (fp64), with all scores,
    logits and decays in memory."""
    if op == "attention":
        q_BHSE, k_BKTE, v_BKTE, mask, scale = arguments
        heads_a_group = q_BHSE.shape[1] // k_BKTE.shape[1]
        k_BHTE, v_BHTE = (x.repeat_interleave(heads_a_group, dim=1) for x in (k_BKTE, v_BKTE))
        scores = q_BHSE @ k_BHTE.mT * (1 / math.sqrt(q_BHSE.shape[-1]) if scale is None else scale)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril() if mask is None else mask
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_BHTE
    if op == "rms_norm":
        x, weight_D, eps = arguments
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D
    if op == "swiglu":
        gate, up = arguments
        return gate / (1 + (-gate).exp()) * up
    if op == "rope":
        # Treat each pair (i, i + E/2) as a complex number, and rotate it by its angle.
        x_BSHE, cos_SE, sin_SE = arguments
        first, second = x_BSHE.chunk(2, dim=-1)
        half = first.shape[-1]
        seq_len = x_BSHE.shape[1]
        turn = torch.complex(cos_SE[:seq_len, None, :half].contiguous(), sin_SE[:seq_len, None, :half].contiguous())
        turned = torch.complex(first.contiguous(), second.contiguous()) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)
    if op == "linear_cross_entropy":
        x_TD, weight_VD, targets_T, _ = arguments
        return F.cross_entropy(x_TD @ weight_VD.T, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")
    if op == "grouped_matmul":
        x_MD, weight_EDF, counts_E = arguments
        expert_M = torch.repeat_interleave(torch.arange(len(counts_E), device=x_MD.device), counts_E)
        return torch.cat([x_MD[expert_M == expert] @ weight for expert, weight in enumerate(weight_EDF)])
    # Attention of queries c to keys b, scaled by the decay between the two tokens (arXiv:2405.21060, section 4).
    x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN = arguments
    heads_a_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b, c = (states.repeat_interleave(heads_a_group, dim=2) for states in (b_BSGN, c_BSGN))
    faded_BHS = (dt_BSH * a_H).cumsum(1).transpose(1, 2)
    decay = (faded_BHS[..., :, None] - faded_BHS[..., None, :]).tril().exp().tril()
    scores = torch.einsum("bqhn,bkhn->bhqk", c, b) * decay
    return torch.einsum("bhqk,bkhp->bqhp", scores, x_BSHP * dt_BSH[..., None])


# Reduce shapes for the comparison with fp64


def _clip(shape: Any, *dims: int) -> Any:
    """Limit a shape to `CHECKED_TOKENS` along `dims`."""
    if not isinstance(shape, tuple):
        return shape
    return tuple(min(size, CHECKED_TOKENS) if dim in dims else size for dim, size in enumerate(shape))


def _two(shape: Any) -> Any:
    """Reduce a shape (samples, ...) to two samples. With only one, the check would not detect a kernel that mixes up
    samples."""
    return (min(2, shape[0]), *shape[1:]) if isinstance(shape, tuple) and len(shape) > 2 else shape


def reduce_call(op: str, call: Call) -> Call:
    """Reduce a call to two samples of at most `CHECKED_TOKENS`, for the comparison with fp64."""
    if op == "attention":
        *heads, mask, scale = call
        q, k, v = (_two(_clip(shape, 2)) for shape in heads)
        tokens = (2, 3) if isinstance(mask, tuple) and len(mask) > 2 else (0, 1)
        return q, k, v, _two(_clip(mask, *tokens)), scale
    if op in ("linear_cross_entropy", "grouped_matmul"):  # input rows, their matrix, and one value for each row
        x, weight, others, *rest = call
        return _clip(x, 0), weight, _clip(others, 0), *rest
    return tuple(_two(_clip(shape, 1)) if isinstance(shape, tuple) and len(shape) > 2 else shape for shape in call)


OPERATIONS = ("attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy", "grouped_matmul", "ssd_scan")


def run(request: KernelRequest) -> KernelResult:
    plan = request.plan
    rank = int(os.environ["RANK"])
    here = int(os.environ["WORLD_SIZE"])
    device = enter(plan.device)  # Triton launches kernels on the current device, even if their arguments are on another
    # This node's processes represent ranks spread over the run, including the first and the last rank. So every
    # pipeline stage is tried, including the last one, which computes the loss.
    calls = calls_of(plan, rank * (plan.world_size - 1) // max(1, here - 1))
    trials = try_all(plan, calls, device)
    join_processes(plan.device)
    return KernelResult(tuple(gather_json(finite_or_none(to_plain(trials)), partial(from_plain, KernelTrials))))


def try_all(plan: Plan, calls: Calls, device: torch.device) -> KernelTrials:
    """Try every backend of every operation that the run uses."""
    described: dict[str, tuple[str, ...]] = {}
    trials: dict[str, dict[str, KernelTrial]] = {}
    for op, workload in workloads_of(plan, calls, device).items():
        described[op] = _describe(calls.parameters, str) if op == "adamw" else _describe(calls.by_op[op], describe_call)
        trials[op] = {}
        kernels: dict[str, Kernel] = {}
        for name in KERNELS[op]:
            reason = "" if name == TORCH else why_untried(plan, op, name)
            if reason:
                trials[op][name] = KernelTrial(untried=reason)
                continue
            kernel = load_kernel(op, name)
            # Compile the operations if the run compiles its blocks, because fusion may change which backend is fastest.
            compiles = plan.spec.compile and op in IN_BLOCKS
            kernels[name] = torch.compile(kernel, dynamic=False) if compiles else kernel
        trials[op] |= try_kernels(kernels, workload)
    return KernelTrials(described, trials)


def workloads_of(plan: Plan, calls: Calls, device: torch.device) -> dict[str, Workload]:
    """Return the operations that the run uses."""
    workloads: dict[str, Workload] = {}
    for op, numbers in calls.by_op.items():
        if not numbers:
            continue
        chunk = ChunkCrossEntropy()
        if plan.spec.compile:
            chunk.compile()
        workloads[op] = operation(op, numbers, DTYPES[plan.compute], device, chunk)
    if plan.spec.optim.name == "adamw":
        where = device if plan.offload == "none" else torch.device("cpu")
        workloads["adamw"] = optimizer_update(calls.parameters, plan.spec.optim, where)
    return workloads


def _describe(numbers: Counter[Any], show: Callable[[Any], str]) -> tuple[str, ...]:
    return tuple(f"{count} x {show(counted)}" for counted, count in numbers.most_common())


# The calls made in a step


@dataclass
class Calls:
    """One rank's calls in a step with one micro-batch."""

    by_op: dict[str, Counter[Call]] = field(default_factory=dict)
    parameters: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Shapes of the tensors that the optimizer updates."""


def calls_of(plan: Plan, rank: int) -> Calls:
    """Return the calls in a rank's step. Must be called before any process group is created."""
    plan = replace(plan, spec=replace(plan.spec, compile=False), kernels=KernelSpec(), recompute="none")
    calls = Calls()
    with fake_world(rank, plan.group_size):
        mesh = build_mesh(plan.layout, "cpu")
        with FakeTensorMode(allow_non_fake_inputs=True):
            state = build_train_state(plan, CPU, mesh)
            state.clock.on_gpu = False
            for part in state.parts:
                even_out(part)
                for op in OPERATIONS:
                    for module in modules_with(part, op):
                        setattr(module, op, _noting(getattr(module, op), calls.by_op.setdefault(op, Counter())))
            calls.parameters.update(tuple(share.local.shape) for share in state.shares if share.is_trained)
            # Run one micro-batch forward through all stages; the calls of the backward pass follow from that.
            tokens, targets, *_ = fake_batch(plan, state)
            documents = [torch.zeros_like(tokens)] if plan.spec.data.masks_documents else []
            forward_only(state.stages, tokens, targets, *documents)
    return calls


def _noting(function: Callable[..., Any], seen: Counter[Call]) -> Callable[..., Any]:
    """Return a function that records its arguments: the shapes of tensors, numbers, and None for anything else."""

    def noted(*arguments: Any) -> Any:
        call: list[tuple[int, ...] | float | None] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                call.append(tuple(map(int, argument.shape)))
            else:
                call.append(argument if isinstance(argument, (int, float)) else None)
        seen[tuple(call)] += 1
        return function(*arguments)

    return noted


# Try the backends of an operation with a run's shapes: measure their error against fp64, and their time relative to
# torch's default.
#
# Backends take turns in each round, so that load from other programs affects all of them.


clock = time.perf_counter
Kernel = Callable[..., Any]
Work = Callable[[], Any]
MIN_ROUNDS, MAX_ROUNDS, BUDGET_S = 7, 25, 1.0
"""Minimum and maximum number of rounds, and each backend's time budget in seconds. Rounds end when every backend has
used up its budget."""
TURN_S = 2e-3
"""Calls that take less than this many seconds are repeated for that time within a turn."""
SUM_ERROR = 8 * torch.finfo(torch.float32).eps
"""The allowed error of sums. All formats accumulate in fp32."""


@dataclass(frozen=True)
class Workload:
    """An operation with its inputs in a run."""

    dtype: torch.dtype
    device: torch.device
    error_of: Callable[[Kernel], float]
    """Returns a kernel's largest relative error against fp64."""
    works_of: Callable[[Kernel], Sequence[tuple[Work, int]]]
    """Returns a kernel's calls, forward and backward, with their counts per step."""


def try_kernels(kernels: Mapping[str, Kernel], workload: Workload) -> dict[str, KernelTrial]:
    """Try all of `kernels`, which include torch's default. A kernel that raises an error is recorded as failed. A
    kernel with a wrong result is not timed."""
    default_error = workload.error_of(kernels[TORCH])
    allowed = max(torch.finfo(workload.dtype).eps + SUM_ERROR, 2 * default_error)
    trials: dict[str, KernelTrial] = {}
    works: dict[str, Sequence[tuple[Work, int]]] = {}
    for name, kernel in kernels.items():
        try:
            error = default_error if name == TORCH else workload.error_of(kernel)
            if error <= allowed:
                works[name] = workload.works_of(kernel)
                for work, _ in works[name]:  # the first call compiles and allocates
                    work()
                    work()
            trials[name] = KernelTrial(error=error, allowed_error=allowed)
        except Exception as raised:  # a library may raise any error, which is reported; the backend is then excluded
            works.pop(name, None)
            first_line = next(iter(str(raised).strip().splitlines()), "")
            trials[name] = KernelTrial(failure=f"{type(raised).__name__}: {first_line}")
    ratios = time_in_turns(works, workload.device)
    return {name: replace(trial, ratios=ratios.get(name, ())) for name, trial in trials.items()}


def operation(
    op: str, calls: Mapping[Call, int], dtype: torch.dtype, device: torch.device, chunk: Any = None
) -> Workload:
    """Return an operation's workload. `calls`: the calls with their counts per step. `chunk`: the module of the linear
    cross-entropy for the loss of one chunk."""
    inputs = [make_inputs(op, call, dtype, device, chunk).with_gradients() for call in calls]

    def error_of(kernel: Kernel) -> float:
        return max(call_error(op, kernel, reduce_call(op, call), dtype, device, chunk) for call in calls)

    def works_of(kernel: Kernel) -> list[tuple[Work, int]]:
        return [(_both_passes(kernel, one), times) for one, times in zip(inputs, calls.values(), strict=True)]

    return Workload(dtype, device, error_of, works_of)


# Correctness


def call_error(
    op: str, kernel: Kernel, call: Call, dtype: torch.dtype, device: torch.device, chunk: Any = None
) -> float:
    """Return the largest relative error of output and gradients. The reference is computed from the same numbers in
    fp64."""
    inputs = make_inputs(op, call, dtype, device, chunk)
    expected = _results(partial(reference, op), inputs.to(torch.float64).with_gradients())
    found = _results(kernel, inputs.with_gradients())
    return max(relative_error(one, other) for one, other in zip(found, expected, strict=True))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the Euclidean relative error; infinite if any value is not finite."""
    error = float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    return error if error < float("inf") else float("inf")


def _results(kernel: Kernel, inputs: Inputs) -> list[Tensor]:
    """Return the output and the gradients, given an upstream gradient that is the same for all kernels."""
    out = kernel(*inputs.arguments)
    generator = torch.Generator(out.device).manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype)
    leaves = [inputs.arguments[index] for index in inputs.leaves]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _both_passes(kernel: Kernel, inputs: Inputs) -> Work:
    leaves = [inputs.arguments[index] for index in inputs.leaves]
    upstream: list[Tensor] = []

    def work() -> None:
        out = kernel(*inputs.arguments)
        if not upstream:
            upstream.append(torch.ones_like(out))
        torch.autograd.grad(out, leaves, upstream[0])

    return work


# Speed


def time_in_turns(
    works: Mapping[str, Sequence[tuple[Work, int]]], device: torch.device
) -> dict[str, tuple[float, ...]]:
    """Return each round's time relative to torch's default, by backend. `works`: pairs of a call and its number of
    occurrences in the run."""
    repeats = [max(1, round(TURN_S / _seconds(work, 2, device))) for work, _ in works[TORCH]]
    seconds: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    started = clock()
    for number in range(MAX_ROUNDS):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            pairs = zip(works[name], repeats, strict=True)
            seconds[name].append(sum(_seconds(work, often, device) * count for (work, count), often in pairs))
        if number + 1 >= MIN_ROUNDS and clock() - started > BUDGET_S * len(names):
            break
    default = seconds[TORCH]
    return {
        name: tuple(own / base for own, base in zip(taken, default, strict=True)) for name, taken in seconds.items()
    }


def _seconds(work: Work, repeats: int, device: torch.device) -> float:
    synchronise(device)
    started = clock()
    for _ in range(repeats):
        work()
    synchronise(device)
    return (clock() - started) / repeats


# AdamW updates of parameters with a run's shapes

MEASURED_ELEMENTS, CHECKED_ELEMENTS = 2**26, 2**20
"""Maximum number of parameter elements in the measurement and in the check. The time of an update is proportional to
their number."""
CHECKED_STEPS = 3
GRAD_SCALE = 2.0
WEIGHT_STD = 0.02


def optimizer_update(parameters: Mapping[Shape, int], optim: OptimSpec, device: torch.device) -> Workload:
    """Return the workload of the update. `parameters`: parameter shapes with their counts. Parameters are kept in fp32,
    regardless of the run's format."""
    few = _as_many(parameters, CHECKED_ELEMENTS)
    many = _as_many(parameters, MEASURED_ELEMENTS)
    shares = make_shares(many, torch.float32, device)

    def works_of(kernel: Kernel) -> list[tuple[Work, int]]:
        """All kernels get the same parameters, and moments in the same memory layout."""
        return [(build_optimizer(shares, optim, kernel).step, 1)]

    return Workload(torch.float32, device, lambda kernel: update_error(kernel, few, optim, device), works_of)


def update_error(kernel: Kernel, shapes: Sequence[Shape], optim: OptimSpec, device: torch.device) -> float:
    """Return the error of the parameters after a few guarded steps, compared with the update defined in
    arXiv:1711.05101."""
    shares, expected = (make_shares(shapes, dtype, device) for dtype in (torch.float32, torch.float64))
    optimizer: Any = build_optimizer(shares, optim, kernel)
    for _ in range(CHECKED_STEPS):
        gradients = [share.local.grad.clone() for share in shares]  # type: ignore[union-attr]
        optimizer.grad_scale = torch.tensor(GRAD_SCALE, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
        for share, gradient in zip(shares, gradients, strict=True):
            share.local.grad = gradient
    errors = []
    for found, share in zip(shares, expected, strict=True):
        gradient = share.local.grad / GRAD_SCALE  # type: ignore[operator]
        weight = share.local.detach().clone()
        first = torch.zeros_like(weight)
        second = torch.zeros_like(weight)
        decay = optim.weight_decay if weight.dim() > 1 else 0.0
        for step in range(1, CHECKED_STEPS + 1):
            first = optim.beta1 * first + (1 - optim.beta1) * gradient
            second = optim.beta2 * second + (1 - optim.beta2) * gradient**2
            root = (second / (1 - optim.beta2**step)).sqrt() + optim.eps
            weight = weight - optim.lr * (decay * weight + first / (1 - optim.beta1**step) / root)
        errors.append(relative_error(found.local.detach(), weight))
    return max(errors)


def make_shares(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> list[Share]:
    """Return shares whose values and gradients are the same numbers in every format."""
    generator = torch.Generator(device).manual_seed(0)
    shares = []
    for number, shape in enumerate(shapes):
        weight, gradient = (torch.randn(shape, generator=generator, device=device) * WEIGHT_STD for _ in range(2))
        share = Share(str(number), nn.Parameter(weight.to(dtype)))
        share.local.grad = gradient.to(dtype)
        shares.append(share)
    return shares


def _as_many(parameters: Mapping[Shape, int], elements: int) -> list[Shape]:
    """Return at least one shape. Shapes are taken in turn, one of each kind first, until they have `elements` elements
    in total."""
    left = dict(parameters)
    chosen = []
    while elements > 0 and any(left.values()):
        for shape in [shape for shape, count in left.items() if count]:
            if elements > 0:
                chosen.append(shape)
                left[shape] -= 1
                elements -= torch.Size(shape).numel()
    return chosen
