"""Measure ("probe") this machine while all its processes are busy. Results are means over the processes, so they
include contention between processes. In addition to the curves of single operations, small decoders are trained as in a
worker. Their steps include effects that single operations lack: waits for peers, caches filled by other operations, and
load from other programs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.build.assemble import build_model, build_train_state
from trainspec_cli.engine.build.train_state import DTYPES
from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.models.rope import apply_rope
from trainspec_cli.engine.observe.clock import ProcessorClock
from trainspec_cli.engine.observe.counters import measure_peak, quickest_s
from trainspec_cli.engine.optim.optimizer import guarded_update, squared_norm
from trainspec_cli.engine.run.step import train_step
from trainspec_cli.engine.run.trainer import Trainer  # noqa: F401 - a worker's memory contains its imports
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import (
    PROBED_HEAD_SIZES,
    PROBED_HEADS,
    PROBED_TOKENS,
    Curve,
    MachineProbe,
    MatmulCurves,
    Passes,
    ProbeRequest,
    Reference,
)
from trainspec_cli.run.folder.event_types.events import PARTS

EMPTY_STEPS = 12
WARMUP_STEPS = 6
"""Number of initial steps, which allocate memory. Afterwards, the heap hardly grows."""
REFERENCE_STEPS, CURVES_BETWEEN = 3, 4
"""(steps, curves): each reference runs for `steps` steps before each group of `curves` curves. That way, load that
varies during the probe affects the references as it affects a run."""
LONG_STEP_S = 1.0
"""A reference whose steps take longer than this, in seconds, runs only a few of them. That happens in formats that the
processor does not support."""


def run(request: ProbeRequest) -> MachineProbe:
    join_processes("cpu")
    return measure(request.compute)


def measure(compute: str) -> MachineProbe:
    """Measure the machine. Called collectively by all processes, which get the same result."""
    torch.manual_seed(0)
    processor = ProcessorClock()
    cpu_before_s, delay_before_s = processor.read()
    few, many = (
        SmallRun(plan_of(DecoderModel(layers, 16, 2, 1, 8, 16, 64, tied_embeddings=True), 8, 1, compute))
        for layers in (2, 6)
    )
    bare_bytes = float(psutil.Process().memory_info().rss)
    # Run the large decoder before the small one, because memory has to grow.
    large = SmallRun(plan_of(DecoderModel(3, 256, 4, 2, 64, 704, 4096, tied_embeddings=True), 256, 4, compute))
    small = SmallRun(plan_of(DecoderModel(2, 128, 2, 1, 64, 352, 2048, tied_embeddings=True), 128, 1, compute))
    measured = {}
    for index, (name, measure_one) in enumerate(operations(DTYPES[compute]).items()):
        if index % CURVES_BETWEEN == 0:
            for reference in (large, small):
                reference.run(REFERENCE_STEPS)
        measured[name] = measure_one()
    for run in (few, many):
        run.run(EMPTY_STEPS)
    few_s = few.parts_s()
    many_s = many.parts_s()
    block_s = {part: max(0.0, (many_s[part] - few_s[part]) / 4) for part in PARTS}
    cpu_after_s, delay_after_s = processor.read()
    cpu_s = cpu_after_s - cpu_before_s
    delay_s = delay_after_s - delay_before_s
    probe = MachineProbe(
        processes=dist.get_world_size(),
        compute=compute,
        empty_step_s={part: max(0.0, few_s[part] - 2 * block_s[part]) for part in PARTS},
        empty_block_s=block_s,
        small=small.reference(),
        large=large.reference(),
        bare_bytes=bare_bytes,
        displaced=delay_s / (cpu_s + delay_s) if cpu_s else 0.0,
        peak_flops=measure_peak(torch.device("cpu"), DTYPES[compute]).flops,
        **measured,
    )
    return average(probe)


def operations(dtype: torch.dtype) -> Mapping[str, Callable[[], Any]]:
    """Return functions that measure the curves of a `MachineProbe`, by field name."""
    small_head, large_head = PROBED_HEAD_SIZES
    return {
        "matmul": partial(measure_matmul, dtype),
        "attention": partial(measure_attention, dtype, large_head),
        "attention_narrow": partial(measure_attention, dtype, small_head),
        **{name: partial(measure_passes, partial(runs_of, name, dtype=dtype)) for name in ("norm", "rope", "swiglu")},
        **{name: partial(measure_single, name, dtype) for name in ("loss", "add", "cast", "optimizer")},
        "all_reduce": partial(measure_collective, all_reduce),
        "all_gather": partial(measure_collective, all_gather),
        "reduce_scatter": partial(measure_collective, reduce_scatter),
    }


def average(value: Any) -> Any:
    """Return the mean over the processes of every number in nested dataclasses, dictionaries and tuples."""
    if isinstance(value, dict):
        return {name: average(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(average(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type | Plan):
        return type(value)(**{field.name: average(getattr(value, field.name)) for field in fields(value)})
    if not isinstance(value, float):
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# Steps of small decoders


class SmallRun:
    """A small decoder that is trained on random data, a few steps at a time, so that its steps are spread over the
    entire probe."""

    def __init__(self, plan: Plan):
        before_bytes = own_bytes()
        self.plan, self.state = plan, build_train_state(plan, torch.device("cpu"))
        self.tokens = torch.zeros(plan.micro_batch_size, plan.spec.data.seq_len, dtype=torch.long)
        self.steps: list[dict[str, float]] = []
        self.is_long = False
        """True if its steps are so long that only a few are run."""
        for number in range(WARMUP_STEPS):
            started = time.perf_counter()
            self._step()
            self.is_long = longest_s(time.perf_counter() - started) > LONG_STEP_S
            if self.is_long and number:  # the first step also allocates memory
                break
        self.grown_bytes = own_bytes() - before_bytes

    def run(self, steps: int) -> None:
        """Run some steps. The first step after a pause has cold caches and late peers. It is not counted unless steps
        take so long that it is the only one."""
        dist.barrier()
        if not self.is_long:
            self._step()
        self.state.clock.restart()
        for _ in range(1 if self.is_long else steps):
            self._step()
            self.steps.append(self.state.clock.cut().parts_s())

    def _step(self) -> None:
        train_step(self.state, [(self.tokens, self.tokens)], global_tokens=self.plan.tokens_per_step, clip_norm=1.0)

    def parts_s(self) -> dict[str, float]:
        """Return the mean step time by part, excluding the slowest tenth of the steps, to reduce the effect of other
        programs."""
        steps = sorted(self.steps, key=lambda parts: sum(parts.values()))
        kept = steps[: max(1, len(steps) * 9 // 10)]
        return {part: sum(step[part] for step in kept) / len(kept) for part in PARTS}

    def reference(self) -> Reference:
        return Reference(self.plan, self.parts_s(), self.grown_bytes)


def own_bytes() -> float:
    """Return this process's memory in bytes, except library pages: how many of these are resident depends on other
    programs (macOS does not count them)."""
    memory = psutil.Process().memory_info()
    return float(memory.rss - getattr(memory, "shared", 0))


def plan_of(model: DecoderModel, seq_len: int, samples: int, compute: str) -> Plan:
    """Return a plan that is replicated over all processes, with micro-batches of `samples` samples."""
    world_size = dist.get_world_size()
    spec = RunSpec(
        model=model,
        data=DataSpec(seq_len=seq_len, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=samples * world_size),
        train=TrainSection(max_steps=1),
    )
    layout = Layout(dp_replicate=world_size)
    plan = Plan(spec, layout, "cpu", 1, world_size, compute, samples, 1, "none", "none", 0, 0.0)  # type: ignore[arg-type]
    with torch.device("meta"):
        module = build_model(model, seq_len)
    return replace(plan, params=sum(parameter.numel() for parameter in module.parameters()))


# Measure the duration of operations and collectives in seconds, by size, while all processes are busy.
#
# Each size is timed in short rounds. The fastest round counts, so load from other programs has little effect. The
# effect of that load is measured by the reference steps (`probe`).


CPU = torch.device("cpu")
ROUNDS = 3
ROUND_S = 0.004
ROTATED_BYTES = 16 * 2**20
"""Operands cycle through this many bytes of memory, so that small operands do not stay in the innermost cache."""
ELEMENTS = (64, 2**14, 2**17, 2**20)
MATRIX_SIDES = (16, 64, 256, 512, 1024)
SEQUENCES = (64, 256, 1024)
MESSAGE_BYTES = (2**6, 2**16, 2**20, 2**22)
CALLS = 5
"""Number of times that a collective is called for each size."""
LONG_S = 0.25
"""A call that takes longer than this ends its curve, and larger sizes are extrapolated proportionally. A matmul in a
format without native support (bf16, about a hundred times slower than fp32) would take minutes."""

Run = Callable[[], Any]


def call_s(runs: Sequence[Run]) -> float:
    """Return the time per call, in seconds, in the fastest round; the calls take turns."""
    runs[0]()
    dist.barrier()
    turns = cycle([*runs[1:], runs[0]])
    return quickest_s(lambda: next(turns)(), CPU, ROUNDS, ROUND_S)


def measure_curve(sizes: Sequence[int], make_run: Callable[[int], Run], bytes_each: int = 8) -> Curve:
    """Measure a curve of time by size. `bytes_each`: number of bytes that a call accesses per unit of size."""
    seconds: list[float] = []
    for size in sizes:
        copies = min(16, max(1, ROTATED_BYTES // (size * bytes_each)))
        seconds.append(call_s([make_run(size) for _ in range(copies)]))
        if longest_s(seconds[-1]) > LONG_S:
            break
    return Curve(tuple(map(float, sizes[: len(seconds)])), tuple(seconds))


def longest_s(own_s: float) -> float:
    """Return the time of the slowest process, so that all processes make the same decision."""
    longest = torch.tensor(own_s)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def measure_passes(
    make_runs: Callable[[int], tuple[Run, ...]], sizes: Sequence[int] = ELEMENTS, bytes_each: int = 8
) -> Passes:
    """Measure the curves of the forward and backward passes, which `make_runs` returns for a size."""
    return Passes(
        forward=measure_curve(sizes, lambda size: make_runs(size)[0], bytes_each),
        backward=measure_curve(sizes, lambda size: make_runs(size)[1], bytes_each),
    )


def measure_single(operation: str, dtype: torch.dtype) -> Curve:
    return measure_curve(ELEMENTS, lambda elements: runs_of(operation, elements, dtype)[0])


def passes(forward: Callable[..., Tensor], *inputs: Tensor) -> tuple[Run, Run]:
    """Return functions for the forward and backward passes. The graph is kept, so that the backward pass can be
    repeated."""
    out = forward(*inputs)
    gradient = torch.randn_like(out)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    return lambda: forward(*inputs), lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)


def operand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def rows(elements: int) -> tuple[int, int]:
    width = min(elements, 256)
    return elements // width, width


def runs_of(operation: str, elements: int, dtype: torch.dtype) -> tuple[Run, ...]:
    """Return the passes of an operation on this many elements: forward and backward, or only one if it has no backward
    pass."""
    if operation == "norm":
        norm = nn.RMSNorm(rows(elements)[1]).to(dtype)
        return passes(lambda x, _weight: norm(x), operand(*rows(elements), dtype=dtype), norm.weight)
    if operation == "rope":
        tokens = max(1, elements // 256)
        head_size = min(64, elements)
        angles = torch.randn(tokens, head_size).to(dtype)
        heads = operand(1, tokens, elements // tokens // head_size, head_size, dtype=dtype)
        return passes(lambda x: apply_rope(x, angles, angles), heads)
    if operation == "swiglu":
        gate, up = (operand(elements, dtype=dtype) for _ in range(2))
        return passes(lambda gate, up: F.silu(gate) * up, gate, up)
    if operation == "loss":
        vocabulary = min(elements, 4096)
        logits = operand(elements // vocabulary, vocabulary, dtype=dtype).detach()
        targets = torch.zeros(elements // vocabulary, dtype=torch.long)
        chunk = ChunkCrossEntropy()
        return (lambda: chunk(logits, targets),)
    if operation == "add":
        a, b = (torch.randn(elements).to(dtype) for _ in range(2))
        return (lambda: a + b,)
    if operation == "cast":  # casts between the format of the master weights and the compute format
        master = torch.randn(elements)
        copy = torch.empty(elements, dtype=dtype)
        return (lambda: copy.copy_(master),)
    share = Share("p", nn.Parameter(torch.randn(elements)))
    gradient = torch.randn(elements)
    loss = torch.tensor(1.0)
    optimizer = torch.optim.AdamW([share.local], lr=1e-3, fused=True)

    def update() -> None:
        share.parameter.grad = gradient
        guarded_update(optimizer, [share], squared_norm([share]).sqrt().float(), loss, 1.0)

    return (update,)


def measure_matmul(dtype: torch.dtype) -> MatmulCurves:
    """Measure x W^T, dy W and dy^T x with the formats and transposes of the decoder's linear layers."""

    def curve(make_run: Callable[[Tensor, Tensor], Run]) -> Curve:
        def run(elements: int) -> Run:
            side = round(elements**0.5)
            tokens = PROBED_TOKENS if elements > MATRIX_SIDES[0] ** 2 else 8
            return make_run(torch.randn(tokens, side).to(dtype), torch.randn(side, side).to(dtype))

        return measure_curve([side**2 for side in MATRIX_SIDES], run)

    return MatmulCurves(
        forward=curve(lambda x, weight: lambda: x @ weight.T),
        input_gradient=curve(lambda dy, weight: lambda: dy @ weight),
        weight_gradient=curve(lambda dy, _: lambda: dy.T @ dy),
    )


def measure_attention(dtype: torch.dtype, head_size: int) -> Passes:
    def runs(seq_len: int) -> tuple[Run, Run]:
        shape = (PROBED_TOKENS // seq_len, seq_len, PROBED_HEADS, head_size)
        q, k, v = (operand(*shape, dtype=dtype) for _ in range(3))
        return passes(
            lambda q, k, v: F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            ),
            *(q, k, v),
        )

    return measure_passes(
        runs, SEQUENCES, bytes_each=2**17
    )  # the number of tokens is the same for every length, so few copies are needed


# Collectives


def all_reduce(message: Tensor) -> None:
    dist.all_reduce(message)


def all_gather(message: Tensor) -> None:
    """Return the all-gather to measure. `message` is the full gathered tensor."""
    dist.all_gather_into_tensor(message, message.chunk(dist.get_world_size())[0].clone())


def reduce_scatter(message: Tensor) -> None:
    everyone = dist.group.WORLD
    assert everyone is not None, "the barrier has been created"
    exchange.reduce_scatter(message.chunk(dist.get_world_size())[0].clone(), message, group=everyone)


def measure_collective(collective: Callable[[Tensor], None]) -> Curve:
    """Before each call, the processes compute separately, as in a backward pass, so the measured time includes waiting
    for one another."""
    work = torch.randn(384, 384)
    world_size = dist.get_world_size()
    medians = []
    for num_bytes in MESSAGE_BYTES:
        message = torch.zeros(-(-num_bytes // 4 // world_size) * world_size)
        seconds = []
        for _ in range(CALLS + 1):
            work @ work
            start = time.perf_counter()
            collective(message)
            seconds.append(time.perf_counter() - start)
        medians.append(median(seconds[1:]))
    return Curve(tuple(map(float, MESSAGE_BYTES)), tuple(medians))
