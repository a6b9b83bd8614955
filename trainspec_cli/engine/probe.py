"""`torchrun -m trainspec_cli.engine.probe bf16|fp32 FOLDER`: measure this machine with all processes at once.

Leaves FOLDER/probe.json, a `MachineProbe`: means over the processes, so that what they take from one another counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.build import DTYPES, build_machinery, join_processes
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.models.decoder import apply_rope
from trainspec_cli.engine.optim.update import guarded_update, squared_norm
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.step import train_step
from trainspec_cli.engine.trainer import Trainer  # noqa: F401 - a worker's memory holds what it imports
from trainspec_cli.rundir.events import PARTS
from trainspec_cli.rundir.files import write_json
from trainspec_cli.spec.batching import BatchingSpec
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.data import DataSpec
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.optim import OptimSpec
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import (
    PROBED_HEAD_SIZES,
    PROBED_HEADS,
    PROBED_TOKENS,
    Curve,
    MachineProbe,
    MatmulCurves,
    Passes,
)
from trainspec_cli.spec.run import RunSpec, TrainSection

POINT_S = 0.03
"""A size is tried for this long."""
ROTATED_BYTES = 16 * 2**20
"""Operands rotate through this much memory, so that the innermost cache does not flatter small ones."""
ELEMENTS = (64, 2**14, 2**18, 2**22)
MATRIX_SIDES = (16, 64, 256, 512, 1024)
SEQUENCES = (64, 256, 1024)
MESSAGE_BYTES = (2**6, 2**16, 2**20, 2**23, 2**25)
EMPTY_STEPS = 12
NEW_SHAPES = 48

Run = Callable[[], Any]


def main() -> None:
    compute, folder = sys.argv[1], Path(sys.argv[2])
    join_processes("cpu")
    probe = measure(compute)
    if dist.get_rank() == 0:
        write_json(folder / "probe.json", to_plain(probe))
    dist.barrier()
    dist.destroy_process_group()


def measure(compute: str) -> MachineProbe:
    """Called by every process together; the same on each."""
    torch.manual_seed(0)
    dtype = DTYPES[compute]
    kept_bytes = shape_bytes(dtype)  # first, while no freed memory takes what is kept
    few, many = empty_steps(compute, layers=2), empty_steps(compute, layers=6)
    block = {part: max(0.0, (many[part] - few[part]) / 4) for part in PARTS}
    bare_bytes = resident_bytes() - kept_bytes * NEW_SHAPES
    probe = MachineProbe(
        processes=dist.get_world_size(),
        compute=compute,
        empty_step_s={part: max(0.0, few[part] - 2 * block[part]) for part in PARTS},
        empty_block_s=block,
        bare_bytes=bare_bytes,
        matmul_shape_bytes=kept_bytes,
        matmul=measure_matmul(dtype),
        attention=measure_attention(dtype, PROBED_HEAD_SIZES[1]),
        attention_narrow=measure_attention(dtype, PROBED_HEAD_SIZES[0]),
        norm=measure_passes(lambda n: norm_passes(n, dtype)),
        rope=measure_passes(lambda n: rope_passes(n, dtype)),
        swiglu=measure_passes(lambda n: swiglu_passes(n, dtype)),
        loss=measure_curve(ELEMENTS, lambda n: loss_run(n, dtype)),
        add=measure_curve(ELEMENTS, lambda n: add_run(n, dtype)),
        cast=measure_curve(ELEMENTS, lambda n: cast_run(n, dtype)),
        optimizer=measure_curve(ELEMENTS, optimizer_run),
        all_reduce=measure_collective(all_reduce),
        all_gather=measure_collective(all_gather),
        reduce_scatter=measure_collective(reduce_scatter),
    )
    return average(probe)


def average(value: Any) -> Any:
    """The mean over the processes, of every number in nested dataclasses, dictionaries and tuples."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: average(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, dict):
        return {name: average(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(average(item) for item in value)
    if not isinstance(value, float):
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# A step of a model next to nothing


def empty_plan(compute: str, layers: int) -> Plan:
    world_size = dist.get_world_size()
    spec = RunSpec(
        model=DecoderModel(layers, 16, 2, 1, 8, 16, 64, tied_embeddings=True),
        data=DataSpec(seq_len=8, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=world_size),
        train=TrainSection(max_steps=EMPTY_STEPS),
    )
    layout = Layout(dp_replicate=world_size)
    return Plan(spec, layout, "cpu", 1, world_size, compute, 1, 1, "none", "none", 0, 0.0)  # type: ignore[arg-type]


def empty_steps(compute: str, layers: int) -> dict[str, float]:
    """The mean parts of a step; the first ones, which allocate, are left out."""
    plan = empty_plan(compute, layers)
    built = build_machinery(plan, torch.device("cpu"))
    tokens = torch.zeros(1, plan.spec.data.seq_len, dtype=torch.long)
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for step in range(EMPTY_STEPS + 3):
        if step == 3:
            built.clock.restart()
        train_step(
            built,
            [(tokens, tokens)],
            global_tokens=plan.tokens_per_step,
            clip_norm=1.0,
            stop_requested=False,
        )
    for part, seconds in built.clock.cut().parts_s().items():
        parts[part] = seconds / EMPTY_STEPS
    return parts


# Time over size


def mean_s(runs: Sequence[Run]) -> float:
    """Seconds a call, over calls that take turns; the first of each is left out."""
    for run in runs:
        run()
    dist.barrier()
    calls, start = 0, time.perf_counter()
    while calls < len(runs) or time.perf_counter() - start < POINT_S:
        runs[calls % len(runs)]()
        calls += 1
    return (time.perf_counter() - start) / calls


def copies_of(num_bytes: float) -> int:
    return int(min(16, max(1, ROTATED_BYTES // num_bytes)))


def measure_curve(sizes: Sequence[int], make_run: Callable[[int], Run], bytes_each: int = 8) -> Curve:
    seconds = [mean_s([make_run(size) for _ in range(copies_of(size * bytes_each))]) for size in sizes]
    return Curve(tuple(map(float, sizes)), tuple(seconds))


def measure_passes(make_runs: Callable[[int], tuple[Run, Run]], sizes: Sequence[int] = ELEMENTS) -> Passes:
    """`make_runs` gives the forward and the backward of a size."""
    return Passes(
        forward=measure_curve(sizes, lambda size: make_runs(size)[0]),
        backward=measure_curve(sizes, lambda size: make_runs(size)[1]),
    )


def passes(forward: Callable[..., Tensor], *inputs: Tensor) -> tuple[Run, Run]:
    """Forward and backward; the graph is kept, so that the backward can be called again."""
    out = forward(*inputs)
    gradient, wanted = torch.randn_like(out), [tensor for tensor in inputs if tensor.requires_grad]
    return lambda: forward(*inputs), lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True)


def operand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def rows(elements: int) -> tuple[int, int]:
    width = min(elements, 256)
    return elements // width, width


def norm_passes(elements: int, dtype: torch.dtype) -> tuple[Run, Run]:
    norm = nn.RMSNorm(rows(elements)[1]).to(dtype)
    return passes(lambda x, _weight: norm(x), operand(*rows(elements), dtype=dtype), norm.weight)


def rope_passes(elements: int, dtype: torch.dtype) -> tuple[Run, Run]:
    tokens = max(1, elements // 256)
    head_size = min(64, elements)
    angles = torch.randn(tokens, head_size).to(dtype)
    x = operand(1, tokens, elements // tokens // head_size, head_size, dtype=dtype)
    return passes(lambda x: apply_rope(x, angles, angles), x)


def swiglu_passes(elements: int, dtype: torch.dtype) -> tuple[Run, Run]:
    gate, up = (operand(elements, dtype=dtype) for _ in range(2))
    return passes(lambda gate, up: F.silu(gate) * up, gate, up)


def loss_run(logits: int, dtype: torch.dtype) -> Run:
    vocabulary = min(logits, 4096)
    x, targets = operand(logits // vocabulary, vocabulary, dtype=dtype).detach(), torch.zeros(logits // vocabulary)
    chunk, targets = ChunkCrossEntropy(), targets.long()
    return lambda: chunk(x, targets)


def add_run(elements: int, dtype: torch.dtype) -> Run:
    a, b = (torch.randn(elements).to(dtype) for _ in range(2))
    return lambda: a + b


def cast_run(elements: int, dtype: torch.dtype) -> Run:
    """A pass between the formats of master weights and of the computation, as a copy."""
    master, copy = torch.randn(elements), torch.empty(elements, dtype=dtype)
    return lambda: copy.copy_(master)


def optimizer_run(elements: int) -> Run:
    share, gradient, loss = Share("p", nn.Parameter(torch.randn(elements))), torch.randn(elements), torch.tensor(1.0)
    optimizer = torch.optim.AdamW([share.local], lr=1e-3, fused=True)

    def run() -> None:
        share.parameter.grad = gradient
        guarded_update(optimizer, [share], squared_norm([share]).sqrt().float(), loss, 1.0)

    return run


def measure_matmul(dtype: torch.dtype) -> MatmulCurves:
    """x W^T, dy W, dy^T x, the formats and transposes of the decoder's linear layers."""

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

    return measure_passes(runs, SEQUENCES)


# Collectives


def all_reduce(message: Tensor) -> None:
    dist.all_reduce(message)


def all_gather(message: Tensor) -> None:
    """`message` is the whole of it."""
    dist.all_gather_into_tensor(message, message.chunk(dist.get_world_size())[0].clone())


def reduce_scatter(message: Tensor) -> None:
    dist.reduce_scatter_tensor(message.chunk(dist.get_world_size())[0].clone(), message)


def measure_collective(collective: Callable[[Tensor], None]) -> Curve:
    """Each call follows work of its own, as in a backward: processes that are not in step wait for one another."""
    work, world_size = torch.randn(384, 384), dist.get_world_size()
    seconds = []
    for num_bytes in MESSAGE_BYTES:
        elements = -(-num_bytes // 4 // world_size) * world_size
        message, spent_s, calls = torch.zeros(elements), 0.0, 6
        for call in range(calls + 1):
            work @ work
            start = time.perf_counter()
            collective(message)
            spent_s += time.perf_counter() - start if call else 0.0
        seconds.append(spent_s / calls)
    return Curve(tuple(map(float, MESSAGE_BYTES)), tuple(seconds))


# Memory


def resident_bytes() -> float:
    return float(psutil.Process().memory_info().rss)


def shape_bytes(dtype: torch.dtype) -> float:
    """The library keeps a kernel for every shape of a matrix product that it has met."""
    weight = torch.randn(256, 256).to(dtype)
    x = torch.randn(NEW_SHAPES + 9, 256).to(dtype)
    x[: NEW_SHAPES + 8] @ weight.T
    before = resident_bytes()
    for tokens in range(8, NEW_SHAPES + 8):
        x[:tokens] @ weight.T
    return max(0.0, resident_bytes() - before) / NEW_SHAPES


if __name__ == "__main__":
    main()
