"""Time of a layer's work on one device: matrix products, attention, element-wise kernels, host launches.

A roofline that adds the part of the memory traffic its arithmetic does not hide (so that efficiency is a curve
over size), a fixed time a kernel, and a loss where dimensions do not fill the tensor cores' tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from trainspec_cli.planner.hardware.rates import (
    Efficiency,
    exponentials_per_s,
    load_store_bytes_per_s,
    matmul_flops_per_s,
    memory_bytes_per_s,
)
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.workload.work import Gemm, Work
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec

FUSED_LOSS = 1 / 3
"""Traffic of a softmax and loss that read the logits once each way and keep nothing, over one kernel an operation."""
WAVE_OUTPUTS = 128 * 256 * 128
"""Outputs of a wave: tiles of 128 x 256 on 128 multiprocessors, near enough for all chips of the table."""
EIGHT_BIT = ("fp8", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Rates:
    """A chip's achieved rates under one setup's number formats."""

    matmul: float
    plain_matmul: float
    """Rate of matrix products in the compute format."""
    memory: float
    exponentials: float
    load_store: float
    cache_bytes: float
    element_bytes: float
    wide_element_bytes: float
    generation: int
    """Generation of its tensor cores, as attention kernels are written for them: 2 Ampere, 3 Hopper, 4 Blackwell."""


@lru_cache(maxsize=512)
def rates_of(chip: AcceleratorSpec, matmul: str, compute: str, eff: Efficiency) -> Rates:
    return Rates(
        matmul=matmul_flops_per_s(chip, matmul, eff),
        plain_matmul=matmul_flops_per_s(chip, compute, eff),
        memory=memory_bytes_per_s(chip, eff),
        exponentials=exponentials_per_s(chip),
        load_store=load_store_bytes_per_s(chip),
        cache_bytes=chip.cache_mb * 1e6,
        element_bytes=4.0 if compute in ("fp32", "tf32") else 2.0,
        wide_element_bytes={"nvfp4": 0.56, "fp8": 1.0, "mxfp8": 1.03}.get(matmul, 2.0),
        generation=2 + (chip.fp8_tflops > 0) + (chip.fp4_tflops > 0) if chip.bf16_tflops else 1,
    )


def alignment(size: float) -> int:
    """Halvings by which a dimension's largest power of two falls short of 64."""
    whole = int(size)
    if whole != size or whole == 0:
        return 6
    power = whole & -whole
    return max(0, 7 - power.bit_length())


def product_s(m: float, n: float, k: float, gemm: Gemm, rates: Rates, eff: Efficiency) -> float:
    """`gemm.count` products of m x k by k x n, launched as one: arithmetic, traffic it does not hide, and its end.

    Tiles are given to multiprocessors in waves; on average a part of the last wave stands idle, for as long as a tile
    of its inner dimension takes. Long inner dimensions with few tiles (tensor parallelism, small micro-batches) suffer.
    """
    rate, size = (rates.matmul, rates.wide_element_bytes) if gemm.wide else (rates.plain_matmul, rates.element_bytes)
    loss = 1.0 + eff.misalignment * (alignment(gemm.n) + alignment(gemm.k)) / 2
    traffic = size * (m * k + k * n) + rates.element_bytes * m * n
    arithmetic = 2.0 * m * n * k / rate * loss
    tail = eff.tail_waves * WAVE_OUTPUTS * 2.0 * k / rate * loss
    return gemm.count * (arithmetic + eff.gemm_memory * traffic / rates.memory) + tail + eff.kernel_s


def gemm_s(gemm: Gemm, rates: Rates, eff: Efficiency) -> tuple[float, float, float]:
    """-> (forward, backward of the inputs, backward of the weights)."""
    m = gemm.m
    n = gemm.n
    k = gemm.k
    return (
        product_s(m, n, k, gemm, rates, eff),
        product_s(m, k, n, gemm, rates, eff),
        product_s(k, n, m, gemm, rates, eff),
    )


def conv_s(gemm: Gemm, rates: Rates, eff: Efficiency) -> tuple[float, float, float]:
    """A convolution as an implicit matrix product; its memory traffic is counted with the element-wise passes.

    Its patches (m x k) pass the load and store units: with few channels a group, that takes longer than multiplying.
    """
    loss = 1.0 + eff.misalignment * (alignment(gemm.n) + alignment(gemm.k)) / 2
    multiply = gemm.flops / (rates.plain_matmul * eff.conv) * loss
    load = rates.element_bytes * gemm.m * gemm.k * gemm.count / rates.load_store
    once = max(multiply, load) + eff.kernel_s
    return once, once, once


@dataclass(frozen=True)
class LayerTime:
    """Forward and backward of some work on one device, without communication. Seconds."""

    matmul_f: float = 0.0
    matmul_b: float = 0.0
    attention_f: float = 0.0
    attention_b: float = 0.0
    memory_f: float = 0.0
    memory_b: float = 0.0
    kernels: float = 0.0
    """Launched forward."""
    experts: float = 0.0

    def plus(self, other: LayerTime, times: float = 1.0) -> LayerTime:
        return LayerTime(
            self.matmul_f + times * other.matmul_f,
            self.matmul_b + times * other.matmul_b,
            self.attention_f + times * other.attention_f,
            self.attention_b + times * other.attention_b,
            self.memory_f + times * other.memory_f,
            self.memory_b + times * other.memory_b,
            self.kernels + times * other.kernels,
            self.experts + times * other.experts,
        )

    @property
    def forward(self) -> float:
        return self.matmul_f + self.attention_f + self.memory_f

    @property
    def backward(self) -> float:
        return self.matmul_b + self.attention_b + self.memory_b


def attention_s(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> tuple[float, float]:
    """-> (forward, backward). Fused: FLOPs of the causal half, 2.5 times as many backward (FlashAttention-2,
    arXiv:2307.08691). Unfused: the whole square twice over, and its score matrix through memory six and eight times.
    """
    if not work.attention_flops:
        return 0.0, 0.0
    if setup.software.fused_attention:
        softmax = eff.exponentials * work.attention_flops / (4.0 * work.attention_head_dim * rates.exponentials)
        behind = max(0, rates.generation - setup.software.attention_generation)
        rate = rates.plain_matmul * eff.attention_older**behind
        forward = work.attention_flops / (rate * eff.attention_forward) + softmax
        backward = 2.5 * work.attention_flops / (rate * eff.attention_backward) + softmax
        return forward, backward
    arithmetic = 2.0 * work.attention_flops / (rates.plain_matmul * 0.7)
    traffic = work.score_bytes / rates.memory
    return arithmetic + 6 * traffic, 2 * arithmetic + 8 * traffic


def layer_time(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> LayerTime:
    """Return the time of one part of a layer."""
    one = conv_s if work.convolves else gemm_s
    times = [one(gemm, rates, eff) for gemm in work.gemms]
    uneven = 1.0 + eff.expert_imbalance if work.expert_params else 1.0
    products = uneven * sum(time[0] for time in times)
    backward = 0.0 if work.leaf else uneven * sum(time[1] for time in times)
    if setup.trainable >= 1.0:
        backward += uneven * sum(time[2] for time in times) + accumulate_s(work, setup, rates, eff)
    backward *= not work.frozen
    attention_f, attention_b = attention_s(work, setup, rates, eff)
    scale = eff.elementwise if setup.software.fused_kernels else eff.elementwise_eager
    if work.convolves:
        scale *= eff.conv_memory / eff.elementwise
    pass_bytes = work.pass_bytes + work.loss_bytes * (FUSED_LOSS if setup.software.fused_loss else 1.0)
    if not setup.software.fused_kernels:
        pass_bytes += work.eager_bytes / scale
    cached = rates.cache_bytes / (rates.cache_bytes + work.tensor_bytes)
    passes = scale * (1 - eff.cache_reuse * cached) * pass_bytes * rates.element_bytes / 2 / rates.memory
    passes += eff.issue * pass_bytes * rates.element_bytes / 2 / rates.load_store
    casts = cast_s(work, setup, rates, eff)
    slow = ungrouped(work, setup, eff)
    products = slow * products
    backward = slow * backward
    passes = slow * passes
    casts = slow * casts
    waits = work.serial_kernels * eff.kernel_s
    casts += dequantise_s(work, setup, rates)
    memory = (passes + casts + waits, 0.0 if work.frozen else (2 - work.leaf) * passes + casts)
    return LayerTime(products, backward, attention_f, attention_b, *memory, launches(work, setup), work.experts)


CAST_KERNELS = {"fp8": 3, "mxfp8": 6, "nvfp4": 8}
"""Launched a matrix product: its inputs scaled and cast; with a scale a block, the scales arranged for the product."""


def launches(work: Work, setup: Setup) -> float:
    """Launched forward: each expert's inputs and weights are cast apart, even where its products are grouped."""
    dequantised = NF4_KERNELS * len(work.gemms) if setup.lora.is_quantised else 0
    return (
        work.kernels
        + dequantised
        + CAST_KERNELS.get(setup.matmul, 0) * sum(gemm.count for gemm in work.gemms if gemm.wide)
    )


def accumulate_s(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> float:
    """Adding a micro-batch's weight gradients to those before: at the end of the product itself, or a kernel apart."""
    layout = setup.layout
    software = setup.software
    if setup.grad_accum == 1 or layout.shards_parameters:
        return 0.0
    weights = sum(gemm.k * gemm.n * gemm.count for gemm in work.gemms)
    if software.fused_accumulation:
        return eff.gemm_memory * 2 * software.grad_bytes * weights / rates.memory
    return APART_BYTES * weights / rates.memory


APART_BYTES = 10.0
"""A weight's gradient read in 2 bytes, and added to a sum in 4 that is read and written."""


def ungrouped(work: Work, setup: Setup, eff: Efficiency) -> float:
    """Slowness of experts that run one after the other: none with one expert a rank, `experts_ungrouped` with 16."""
    if setup.software.grouped_experts or work.experts <= 1:
        return 1.0
    return 1.0 + (eff.experts_ungrouped - 1.0) * math.log2(work.experts) / 4


NF4_TRAFFIC_BYTES, NF4_FUSED_BYTES, NF4_KERNELS = 22.5, 2.5, 14
"""Memory traffic of dequantising a weight, by kernels one after another (codes to indices, looked up in fp32, scaled,
and written as computed with) and by a compiled one; and the number of the former."""


def dequantise_s(work: Work, setup: Setup, rates: Rates) -> float:
    """Return the seconds of dequantising the frozen weights of a pass, before they are multiplied by."""
    if not setup.lora.is_quantised:
        return 0.0
    each = NF4_FUSED_BYTES if setup.software.fused_kernels else NF4_TRAFFIC_BYTES
    return each * sum(gemm.k * gemm.n * gemm.count for gemm in work.gemms if gemm.wide) / rates.memory


def cast_s(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> float:
    """Scaling and casting of a matmul's inputs to 8 bits or fewer: read in 2 bytes, written twice (transposed too)."""
    if setup.matmul not in EIGHT_BIT:
        return 0.0
    weights = 1.0 / setup.grad_accum  # once a step
    elements = sum((g.m * g.k + weights * g.k * g.n) * g.count for g in work.gemms if g.wide)
    return eff.cast_fp8 * elements * (2.0 + 2.0 * rates.wide_element_bytes) / rates.memory
