"""Compiled blocks: the count against the allocator's own report of a real block that inductor compiled, on the CPU.

Few tokens beside the parameters would show when each weight's gradient is made, which the count places one operation
too early: the blocks here have more tokens than a matrix has rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from trainspec_cli.engine.models.decoder import Block
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.planner.memory.engine.blocks import BlockProfile, Shape, profile_block
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import Recompute

WIDTH = 2
"""Bytes of bf16."""
SAMPLES = 2


@dataclass(frozen=True)
class Size:
    seq_len: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


SIZES = (Size(1024, 256, 4, 2, 704), Size(1024, 256, 8, 1, 1536), Size(2048, 128, 2, 2, 256))
MODES: tuple[Recompute, ...] = ("none", "full", "selective")


def model_of(size: Size) -> DecoderModel:
    model = models()["llama_6m"]
    assert isinstance(model, DecoderModel)
    return replace(
        model,
        num_layers=1,
        hidden_size=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.hidden // size.heads,
        ffn_size=size.ffn,
    )


def count(size: Size, recompute: Recompute, compiled: bool = True) -> BlockProfile:
    model = model_of(size)
    shape = Shape(model, model.layer_list[0], Layout(), SAMPLES, size.seq_len, float(WIDTH), compiled=compiled)
    return profile_block(shape, recompute, False)


@pytest.mark.parametrize(
    ("recompute", "parts"),
    [
        # Norms' outputs, turned queries and keys, values, the core's output, its projection, gate, up, their product,
        # and what goes out.
        ("none", 2 + (1 + 0.5 + 0.5) + 1 + 1 + 3 * 2.75 + 1),
        ("full", 1),
        # The results of all products but the last, which no backward reads, the core's, and what goes out.
        ("selective", (1 + 0.5 + 0.5) + 1 + 1 + 2 * 2.75 + 1),
    ],
)
def test_a_compiled_block_keeps_what_the_partitioner_saves(recompute: Recompute, parts: float) -> None:
    """In values a token, over the hidden size; statistics of rows are few."""
    size = SIZES[0]
    values = SAMPLES * size.seq_len * size.hidden * WIDTH
    assert count(size, recompute).kept / values == pytest.approx(parts, rel=0.005)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_compiled_block_takes_less_than_an_eager_one(recompute: Recompute) -> None:
    fused, eager = (count(SIZES[0], recompute, compiled) for compiled in (True, False))
    assert fused.kept <= eager.kept
    assert max(each.peak for each in fused.backward) < max(each.peak for each in eager.backward)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size.seq_len} x {size.hidden}")
def test_a_compiled_blocks_count_is_what_inductor_allocates(size: Size, recompute: Recompute) -> None:
    kept, peak = measure(size, recompute)
    counted = count(size, recompute)
    counted_peak = max(each.peak for each in counted.backward)
    print(f"{recompute:10s} {size}: kept {counted.kept / kept - 1:+.2%}, peak {counted_peak / peak - 1:+.2%}")
    assert counted.kept == pytest.approx(kept, rel=0.03)
    assert counted_peak == pytest.approx(peak, rel=0.03)


def measure(size: Size, recompute: Recompute) -> tuple[float, float]:
    """-> (bytes kept after the forward, most bytes in the backward), the output counted, the input not."""
    torch._dynamo.reset()
    model = model_of(size)
    block = Block(model, 0).bfloat16()
    apply_recompute([block], recompute, compiled=True)
    block.compile()
    source = torch.randn(SAMPLES, size.seq_len, size.hidden, dtype=torch.bfloat16)
    angles = [torch.randn(size.seq_len, model.head_dim).bfloat16() for _ in range(2)]
    gradient = torch.ones_like(source)
    for _ in range(2):
        block.zero_grad()
        x = source.detach().requires_grad_(True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
            y = block(x, *angles)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
            y.backward(gradient)
            del y
    kept, _ = sum_up(forward)
    return kept, kept + sum_up(backward)[1]


def sum_up(profiled: Any) -> tuple[float, float]:
    """-> (bytes live at the end, the most there were), from where it began."""
    events = profiled.profiler.kineto_results.events()
    live = most = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        live += size
        most = max(most, live)
    return live, most
