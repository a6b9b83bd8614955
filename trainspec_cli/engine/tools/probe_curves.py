"""Operations' and collectives' seconds over size, every process at work at once.

A size is timed in short rounds and the quickest counts: what another program takes away is not the operation's own.
The reference steps (`probe`) show what this machine leaves of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.comm import exchange
from trainspec_cli.engine.models.cross_entropy import ChunkCrossEntropy
from trainspec_cli.engine.models.rope import apply_rope
from trainspec_cli.engine.observe.counters import quickest_s
from trainspec_cli.engine.optim.optimizer import guarded_update, squared_norm
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.results.tools import PROBED_HEADS, PROBED_TOKENS, Curve, MatmulCurves, Passes

CPU = torch.device("cpu")
ROUNDS = 3
ROUND_S = 0.004
ROTATED_BYTES = 16 * 2**20
"""Operands rotate through this much memory, so that the innermost cache does not flatter small ones."""
ELEMENTS = (64, 2**14, 2**17, 2**20)
MATRIX_SIDES = (16, 64, 256, 512, 1024)
SEQUENCES = (64, 256, 1024)
MESSAGE_BYTES = (2**6, 2**16, 2**20, 2**22)
CALLS = 5
"""Calls of a collective on each size."""
LONG_S = 0.25
"""A call that takes longer ends its curve: larger sizes follow in proportion. A product in a format that the processor
does not have (bf16, some hundred times slower than fp32) would take minutes."""

Run = Callable[[], Any]


def call_s(runs: Sequence[Run]) -> float:
    """Return the seconds of a call in the quickest round, over calls that take turns."""
    runs[0]()
    dist.barrier()
    turns = cycle([*runs[1:], runs[0]])
    return quickest_s(lambda: next(turns)(), CPU, ROUNDS, ROUND_S)


def measure_curve(sizes: Sequence[int], make_run: Callable[[int], Run], bytes_each: int = 8) -> Curve:
    """`bytes_each` unit of size that a run works on."""
    seconds: list[float] = []
    for size in sizes:
        copies = min(16, max(1, ROTATED_BYTES // (size * bytes_each)))
        seconds.append(call_s([make_run(size) for _ in range(copies)]))
        if longest_s(seconds[-1]) > LONG_S:
            break
    return Curve(tuple(map(float, sizes[: len(seconds)])), tuple(seconds))


def longest_s(own_s: float) -> float:
    """Return what the slowest process took, by which all of them decide alike."""
    longest = torch.tensor(own_s)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return longest.item()


def measure_passes(
    make_runs: Callable[[int], tuple[Run, Run]], sizes: Sequence[int] = ELEMENTS, bytes_each: int = 8
) -> Passes:
    """`make_runs` gives the forward and the backward of a size."""
    return Passes(
        forward=measure_curve(sizes, lambda size: make_runs(size)[0], bytes_each),
        backward=measure_curve(sizes, lambda size: make_runs(size)[1], bytes_each),
    )


def passes(forward: Callable[..., Tensor], *inputs: Tensor) -> tuple[Run, Run]:
    """Forward and backward; the graph is kept, so that the backward can be called again."""
    out = forward(*inputs)
    gradient = torch.randn_like(out)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
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
    x = operand(logits // vocabulary, vocabulary, dtype=dtype).detach()
    targets = torch.zeros(logits // vocabulary)
    chunk = ChunkCrossEntropy()
    targets = targets.long()
    return lambda: chunk(x, targets)


def add_run(elements: int, dtype: torch.dtype) -> Run:
    a, b = (torch.randn(elements).to(dtype) for _ in range(2))
    return lambda: a + b


def cast_run(elements: int, dtype: torch.dtype) -> Run:
    """A pass between the formats of master weights and of the computation, as a copy."""
    master = torch.randn(elements)
    copy = torch.empty(elements, dtype=dtype)
    return lambda: copy.copy_(master)


def optimizer_run(elements: int) -> Run:
    share = Share("p", nn.Parameter(torch.randn(elements)))
    gradient = torch.randn(elements)
    loss = torch.tensor(1.0)
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

    return measure_passes(runs, SEQUENCES, bytes_each=2**17)  # every length with as many tokens: few copies


# Collectives


def all_reduce(message: Tensor) -> None:
    dist.all_reduce(message)


def all_gather(message: Tensor) -> None:
    """`message` is the whole of it."""
    dist.all_gather_into_tensor(message, message.chunk(dist.get_world_size())[0].clone())


def reduce_scatter(message: Tensor) -> None:
    everyone = dist.group.WORLD
    assert everyone is not None, "the ranks have met"
    exchange.reduce_scatter(message.chunk(dist.get_world_size())[0].clone(), message, group=everyone)


def measure_collective(collective: Callable[[Tensor], None]) -> Curve:
    """Each call follows work of its own, as in a backward: processes that are not in step wait for one another."""
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
