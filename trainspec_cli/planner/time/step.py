"""Step time: the work of layers on one device, their exchanges, and the full optimizer step.

A layer's work follows a roofline model, with three additions: the memory traffic that arithmetic does not hide (so that
efficiency depends on size), a fixed time per kernel, and a penalty for dimensions that do not fill the tensor cores'
tiles. A step consists of the slowest pipeline rank's micro-batches, exposed communication per axis, the bubble, the
optimizer and host time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate
from typing import cast

from trainspec_cli.planner.hardware.cluster import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    axis_groups,
    group_of_ranks,
    send_s,
)
from trainspec_cli.planner.hardware.rates import (
    Efficiency,
    matmul_flops_per_s,
    memory_bytes_per_s,
    tensor_core_generation,
)
from trainspec_cli.planner.memory.engine.blocks import Shape, block_layout, mixer_kernels, ring_turn_kernels
from trainspec_cli.planner.memory.engine.conv import conv_works
from trainspec_cli.planner.pipeline import LayerTimes, cut_layers
from trainspec_cli.planner.setup import UPDATE_BYTES, WIRE_BYTES, Recompute, Setup, matrix_share, newton_schulz_flops
from trainspec_cli.planner.time.data_parallel import (
    HOST_BYTES_PER_S,
    OFFLOADED_BYTES,
    exchanges_of,
    exposed_s,
    statistics_s,
)
from trainspec_cli.planner.workload import Gemm, KernelCounts, Work, embedding_work, head_work, layer_works
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    Layer,
    TextModel,
    has_layer_list,
    loss_chunk_tokens,
    loss_group_tokens,
)
from trainspec_cli.recipe.results.plan import StepTime

FUSED_LOSS = 1 / 3
"""Memory traffic of a fused softmax and loss relative to one kernel per operation. The fused kernel reads the logits
once per direction and keeps nothing."""
WAVE_OUTPUTS = 128 * 256 * 128
"""Number of outputs per wave: one tile of 128 x 256 on each of 128 multiprocessors. This is accurate enough for all
chips in the catalogue."""
EIGHT_BIT = ("fp8", "mxfp8", "nvfp4")
CAST_KERNELS = {"fp8": 3, "mxfp8": 6, "nvfp4": 8}
"""Number of additional kernels per matrix multiplication, which scale and cast its inputs and, for block scales,
rearrange them."""
EAGER_CAST_BYTES = 35.0
"""Memory traffic per value of torchao's cast from bf16 to fp8 with separate kernels: absolute values and their maximum,
conversion to fp32, scaling, clamping, rounding and padding. Each matrix multiplication casts its operands anew, and
output gradients are cast twice."""
EAGER_CAST_KERNELS = 13
REARRANGED_BYTES = 2.0
"""Memory traffic per value of a copy in fp8 that changes the memory order: in the backward pass, the kernel needs
weights and inputs in column order."""
APART_BYTES = 10.0
"""Memory traffic per weight of a separate kernel that reads a 2-byte gradient and adds it to a 4-byte sum, which is
read and written."""
NF4_TRAFFIC_BYTES = 22.5
"""Memory traffic per weight of dequantising with separate kernels: codes to indices, lookup in fp32, scaling, and a
write in the compute format."""
NF4_KERNELS = 14
NF4_FUSED_BYTES = 2.5
"""The same as `NF4_TRAFFIC_BYTES` for a compiled kernel."""


@dataclass(frozen=True)
class Rates:
    """The rates that a chip reaches with one setup's number formats."""

    matmul: float
    plain_matmul: float
    """Rate of matrix multiplications in the compute format."""
    memory: float
    exponentials: float
    """Rate of the special-function units, which softmax uses; it has not grown as fast as that of the tensor cores."""
    load_store: float
    """Rate of the multiprocessors' load and store units, which depends on their number and clock, not on the memory."""
    cache_bytes: float
    element_bytes: float
    wide_element_bytes: float
    generation: int
    """Tensor core generation that attention kernels are written for: 2 Ampere, 3 Hopper, 4 Blackwell."""
    precise_matmul: float
    """Rate of matrix multiplications in fp32."""


EXPONENTIALS_PER_FLOP = 1 / 250
"""Ratio of the exponential rate to the bf16 peak, for chips whose rate is not listed (H100: 16 per clock and
multiprocessor)."""
LOADS_OVER_MEMORY = 4.7
"""Ratio of first-level cache bandwidth to memory bandwidth, for chips whose rate is not listed (A100: 4.8, H100:
4.7)."""


@lru_cache(maxsize=512)
def rates_of(chip: AcceleratorSpec, matmul: str, compute: str, eff: Efficiency) -> Rates:
    peak_tflops = chip.bf16_tflops or chip.fp16_tflops
    return Rates(
        matmul=matmul_flops_per_s(chip, matmul, eff),
        plain_matmul=matmul_flops_per_s(chip, compute, eff),
        memory=memory_bytes_per_s(chip, eff),
        exponentials=(chip.tera_exponentials_per_s or peak_tflops * EXPONENTIALS_PER_FLOP) * 1e12,
        load_store=(chip.load_store_tb_per_s or LOADS_OVER_MEMORY * chip.memory_tb_per_s) * 1e12,
        cache_bytes=chip.cache_mb * 1e6,
        element_bytes=4.0 if compute in ("fp32", "tf32") else 2.0,
        wide_element_bytes={"nvfp4": 0.56, "fp8": 1.0, "mxfp8": 1.03}.get(matmul, 2.0),
        generation=tensor_core_generation(chip),
        # Some data sheets do not state a rate in fp32.
        precise_matmul=matmul_flops_per_s(chip, "fp32", eff) or matmul_flops_per_s(chip, compute, eff),
    )


def alignment(size: float) -> int:
    """Return how many times the largest power of two in a dimension must be doubled to reach 64."""
    whole = int(size)
    if whole != size or whole == 0:
        return 6
    power = whole & -whole
    return max(0, 7 - power.bit_length())


def product_s(m: float, n: float, k: float, gemm: Gemm, rates: Rates, eff: Efficiency) -> float:
    """Return the time in seconds of `gemm.count` products of m x k by k x n in one launch: arithmetic, exposed traffic,
    and the tail.

    Tiles are assigned to multiprocessors in waves. On average, part of the last wave is idle while one tile runs over
    its inner dimension. Long inner dimensions with few tiles (tensor parallelism, small micro-batches) lose the
    most."""
    rate, size = (rates.matmul, rates.wide_element_bytes) if gemm.wide else (rates.plain_matmul, rates.element_bytes)
    result_size = rates.element_bytes
    if gemm.precise:
        rate = rates.precise_matmul
        size = result_size = 4.0
    loss = 1.0 + eff.misalignment * (alignment(gemm.n) + alignment(gemm.k)) / 2
    traffic = size * (m * k + k * n) + result_size * m * n
    arithmetic = 2.0 * m * n * k / rate * loss
    tail = eff.tail_waves * WAVE_OUTPUTS * 2.0 * k / rate * loss
    return gemm.count * (arithmetic + eff.gemm_memory * traffic / rates.memory) + tail + eff.kernel_s


def moved_s(moved_bytes: float, rates: Rates, eff: Efficiency) -> float:
    """Return the time in seconds of one kernel that reads and writes this much memory."""
    cached = eff.cache_reuse * rates.cache_bytes / (rates.cache_bytes + moved_bytes)
    return moved_bytes * ((1 - cached) / rates.memory + eff.issue / rates.load_store) + eff.kernel_s


def gemm_s(gemm: Gemm, rates: Rates, eff: Efficiency, *, convolves: bool = False) -> tuple[float, float, float]:
    """Return the times in seconds of (forward, backward of the inputs, backward of the weights)."""
    if convolves or gemm.image:
        # A convolution is an implicit matrix multiplication. Its patches (m x k) go through the load and store units.
        # With few channels per group, that takes longer than multiplying. Without the size of its input, its memory
        # traffic is counted with the element-wise passes.
        loss = 1.0 + eff.misalignment * (alignment(gemm.n) + alignment(gemm.k)) / 2
        multiply = gemm.flops / (rates.plain_matmul * eff.conv) * loss
        load = rates.element_bytes * gemm.m * gemm.k * gemm.count / rates.load_store
        once = max(multiply, load) + eff.kernel_s
        if gemm.image:
            moved = gemm.image + (gemm.m + gemm.k) * gemm.n * gemm.count
            once = max(once, moved_s(rates.element_bytes * moved, rates, eff))
        return once, once, once
    m = gemm.m
    n = gemm.n
    k = gemm.k
    return (
        product_s(m, n, k, gemm, rates, eff),
        product_s(m, k, n, gemm, rates, eff),
        product_s(k, n, m, gemm, rates, eff),
    )


def attention_s(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> tuple[float, float]:
    """Return the times in seconds of (forward, backward). Fused: the FLOPs of the causal half, and 2.5 times as many in
    the backward pass (FlashAttention-2, arXiv:2307.08691). Unfused: the full square, with the score matrix passing
    through memory six times in the forward pass and eight times in the backward pass."""
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


@dataclass(frozen=True)
class LayersPart:
    """The time of layers on one rank in seconds per micro-batch, by cause (`_f` forward, `_b` backward, without
    recomputation), and their number of parameters."""

    matmul_f: float = 0.0
    matmul_b: float = 0.0
    attention_f: float = 0.0
    attention_b: float = 0.0
    memory_f: float = 0.0
    memory_b: float = 0.0
    kernels: float = 0.0
    """Number of kernels launched in the forward pass."""
    experts: float = 0.0
    tp: float = 0.0
    """Exposed communication inside layers in the forward pass; the same holds for cp and ep. A full micro-batch takes
    `PASSES` times as long."""
    cp: float = 0.0
    ep: float = 0.0
    params: float = 0.0
    expert_params: float = 0.0
    tp_again: float = 0.0
    """Exposed communication of a repeated forward pass in addition to `tp`, and `cp_again` in addition to `cp`."""
    cp_again: float = 0.0
    unrepeated: float = 0.0
    """Time of a block's last product, which full recomputation leaves out, because the backward pass does not need its
    result."""
    dp: float = 0.0
    """Like `tp`, for the statistics of batch norms."""
    before_dp: float = 0.0
    """Time of the backward pass before the first exchange of statistics."""
    weights_b: float = 0.0
    """The part of `matmul_b` that a split schedule computes later: the weight gradients of linear layers."""

    def plus(self, other: LayersPart, times: float = 1.0) -> LayersPart:
        return LayersPart(
            self.matmul_f + times * other.matmul_f,
            self.matmul_b + times * other.matmul_b,
            self.attention_f + times * other.attention_f,
            self.attention_b + times * other.attention_b,
            self.memory_f + times * other.memory_f,
            self.memory_b + times * other.memory_b,
            self.kernels + times * other.kernels,
            self.experts + times * other.experts,
            self.tp + times * other.tp,
            self.cp + times * other.cp,
            self.ep + times * other.ep,
            self.params + times * other.params,
            self.expert_params + times * other.expert_params,
            self.tp_again + times * other.tp_again,
            self.cp_again + times * other.cp_again,
            self.unrepeated + times * other.unrepeated,
            self.dp + times * other.dp,
            self.before_dp + times * other.before_dp,
            self.weights_b + times * other.weights_b,
        )

    @classmethod
    def total(cls, parts: Iterable[LayersPart]) -> LayersPart:
        return reduce(cls.plus, parts, cls())

    @property
    def forward(self) -> float:
        """Time on the device in seconds, without communication."""
        return self.matmul_f + self.attention_f + self.memory_f

    @property
    def backward(self) -> float:
        return self.matmul_b + self.attention_b + self.memory_b


PASSES = {"tp": 2, "cp": 3, "ep": 2, "dp": 2}
"""Number of times that a micro-batch performs the forward pass's exchange in each layer. The backward pass repeats it
once or, with context parallelism, twice: to gather keys and values again and to reduce their gradients. For trainspec's
engine, `LayersPart` has the mean duration of these exchanges."""


def part_of(work: Work | None, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> LayersPart:
    """Return the time of one part of a layer, of the embedding or of the head."""
    if work is None:
        return LayersPart()
    software = setup.software
    # Running experts one after another costs nothing with one expert per rank, and a factor of `experts_ungrouped` with
    # 16.
    slow = 1.0
    if not software.grouped_experts and work.experts > 1:
        slow = 1.0 + (eff.experts_ungrouped - 1.0) * math.log2(work.experts) / 4

    # The fitted factors describe the memory passes of other frameworks; trainspec's uncompiled operations are counted
    # instead.
    counted = software.counted and not (software.fused_kernels or setup.lora.rank)
    gemms = work.counted_gemms if counted and work.counted_gemms is not None else work.gemms
    times = [gemm_s(gemm, rates, eff, convolves=work.convolves) for gemm in gemms]
    uneven = 1.0 + eff.expert_imbalance if work.expert_params else 1.0
    products = uneven * sum(time[0] for time in times)
    backward = 0.0 if work.leaf else uneven * sum(time[1] for time in times)
    weights = 0.0
    if setup.trainable >= 1.0:
        weights = uneven * sum(time[2] for gemm, time in zip(gemms, times, strict=True) if gemm.linear)
        # A micro-batch's weight gradients are added to earlier ones, either inside the matrix multiplication or by a
        # separate kernel (`EngineStep` counts those of the engine).
        added = 0.0
        if setup.grad_accum > 1 and not setup.layout.shards_parameters and not runs_eagerly(setup):
            elements = sum(gemm.k * gemm.n * gemm.count for gemm in work.gemms)
            if software.fused_accumulation:
                added = eff.gemm_memory * 2 * software.grad_bytes * elements / rates.memory
            else:
                added = APART_BYTES * elements / rates.memory
        backward += uneven * sum(time[2] for time in times) + added
    backward *= not work.frozen
    core = work.counted_core if counted else None
    core_work = work if core is None else replace(work, attention_flops=core.flops, attention_head_dim=core.head_dim)
    attention_f, attention_b = attention_s(core_work, setup, rates, eff)
    if core is not None:
        scan = [gemm_s(gemm, rates, eff) for gemm in core.gemms]
        attention_f += core.kernels * eff.kernel_s + sum(time[0] for time in scan)
        attention_b += core.kernels * eff.kernel_s + sum(time[1] + time[2] for time in scan)

    scale = eff.elementwise if software.fused_kernels else eff.elementwise_eager
    if work.convolves:
        scale *= eff.conv_memory / eff.elementwise
    pass_bytes = work.pass_bytes + work.loss_bytes * (FUSED_LOSS if software.fused_loss else 1.0)
    if not software.fused_kernels:
        pass_bytes += work.eager_bytes / scale
    cached = rates.cache_bytes / (rates.cache_bytes + work.tensor_bytes)

    def passes_s(moved_bytes: float, times: float) -> float:
        memory_s = times * (1 - eff.cache_reuse * cached) * moved_bytes * rates.element_bytes / 2 / rates.memory
        return slow * (memory_s + eff.issue * moved_bytes * rates.element_bytes / 2 / rates.load_store)

    forward_s = passes_s(pass_bytes, scale)
    backward_s = (2 - work.leaf) * forward_s
    if counted and work.counted_kernels is not None:
        forward_s, backward_s = (kernels_s(kernels, rates, eff) for kernels in work.counted_kernels)
    casts_f, casts_b, cast_kernels = _casts_s(work, gemms if counted else None, slow, setup, rates, eff)
    waits = work.serial_kernels * eff.kernel_s

    if software.counted and not setup.fabric.speaks_gloo and not setup.tabled:
        tp, cp, ep, tp_again, cp_again = _engine_exchanges_s(work, attention_f, attention_b, setup, rates, groups, eff)
    else:
        tp, cp, ep = _exchanges_s(work, slow, setup, groups, eff)
        tp_again = cp_again = 0.0
    return LayersPart(
        matmul_f=slow * products,
        matmul_b=slow * backward,
        attention_f=attention_f,
        attention_b=attention_b,
        memory_f=forward_s + casts_f + waits,
        memory_b=0.0 if work.frozen else backward_s + casts_b,
        kernels=work.kernels + cast_kernels,
        experts=work.experts,
        tp=tp,
        cp=cp,
        ep=ep,
        dp=sum(statistics_s(groups["dp"], channels, eff) for channels in work.normed),
        before_dp=kernels_s(work.before_statistics or {}, rates, eff),
        params=work.params,
        expert_params=work.expert_params,
        tp_again=tp_again,
        cp_again=cp_again,
        unrepeated=times[-1][0] if work.tp_last and times and not work.expert_params else 0.0,
        weights_b=0.0 if work.frozen else slow * weights,
    )


def kernels_s(kernels: KernelCounts, rates: Rates, eff: Efficiency) -> float:
    """Return the time of kernels whose traffic is stated for 2 bytes per element."""
    scale = rates.element_bytes / 2
    return sum(number * moved_s(scale * moved_bytes, rates, eff) for moved_bytes, number in kernels.items())


def _casts_s(
    work: Work, counted: Sequence[Gemm] | None, slow: float, setup: Setup, rates: Rates, eff: Efficiency
) -> tuple[float, float, float]:
    """Return the time, in seconds, spent casting operands in the forward and backward passes, and the number of kernels
    that do so. `counted`: the engine's own matrix multiplications, if its operations are counted."""
    # Inputs of matrix multiplications in 8 bits or fewer are scaled and cast: 2 bytes are read, and two copies written
    # (one transposed).
    casts = 0.0
    if setup.matmul in EIGHT_BIT:
        share = 1.0 / setup.grad_accum  # weights are cast once per step
        elements = sum((g.m * g.k + share * g.k * g.n) * g.count for g in work.gemms if g.wide)
        casts = eff.cast_fp8 * elements * (2.0 + 2.0 * rates.wide_element_bytes) / rates.memory
    casts = slow * casts
    kernels = 0.0
    if setup.lora.is_quantised:  # frozen weights are dequantised before each matrix multiplication
        each = NF4_FUSED_BYTES if setup.software.fused_kernels else NF4_TRAFFIC_BYTES
        casts += each * sum(gemm.k * gemm.n * gemm.count for gemm in work.gemms if gemm.wide) / rates.memory
        kernels += NF4_KERNELS * len(work.gemms)
    if counted is None or setup.matmul != "fp8":
        # Each expert's inputs and weights are cast separately, even if a grouped kernel multiplies them.
        kernels += CAST_KERNELS.get(setup.matmul, 0) * sum(gemm.count for gemm in work.gemms if gemm.wide)
        return casts, casts, kernels
    given = sum((gemm.m + gemm.n) * gemm.k * gemm.count for gemm in counted if gemm.wide)
    outputs = sum(gemm.m * gemm.n * gemm.count for gemm in counted if gemm.wide)
    # The fp32 copies are too large to stay in the cache.
    byte_s = 1 / rates.memory + eff.issue / rates.load_store
    launched = 2 * EAGER_CAST_KERNELS * sum(gemm.count for gemm in counted if gemm.wide)
    casts = EAGER_CAST_BYTES * given * byte_s + launched * eff.kernel_s
    casts_b = EAGER_CAST_BYTES * (given + 2 * outputs) * byte_s + 2 * launched * eff.kernel_s
    casts_b += REARRANGED_BYTES * given * byte_s
    return casts, casts_b, kernels + launched


def _exchanges_s(
    work: Work, slow: float, setup: Setup, groups: dict[str, Group], eff: Efficiency
) -> tuple[float, float, float]:
    """Return the time, in seconds, of a layer's exposed exchanges along tp, cp and ep in the forward pass, for
    frameworks where the hidden fraction is fitted."""
    software = setup.software
    copies = work.expert_copies if software.grouped_experts else 1
    first = 1 / setup.layout.tp  # a ring's first chunk, before any matrix multiplication can start
    hidden_tp = eff.tp_overlap * (1 - first) if software.overlap_tp else 0.0
    hidden_ep = eff.ep_overlap
    if groups["ep"].crosses and software.grouped_experts:
        hidden_ep = eff.ep_overlap_network
    if overlaps_experts(setup):
        hidden_ep = 0.0  # `beside_another` hides them behind a whole layer
    tp = work.tp_exchanges * all_reduce_s(groups["tp"], work.tp_bytes, eff) * (1 - hidden_tp)
    cp = all_gather_s(groups["cp"], work.cp_bytes, eff) * (1 - eff.cp_overlap)
    # Tokens are sent to their experts, and the results are sent back.
    ep = slow * 2 * all_to_all_s(groups["ep"], work.ep_bytes, copies, eff) * (1 - hidden_ep)
    return tp, cp, ep


def _engine_exchanges_s(
    work: Work,
    attention_f: float,
    attention_b: float,
    setup: Setup,
    rates: Rates,
    groups: dict[str, Group],
    eff: Efficiency,
) -> tuple[float, float, float, float, float]:
    """Return the exposed exchanges of trainspec's engine in seconds: `LayersPart`'s tp, cp, ep, tp_again and cp_again.
    The engine waits for every exchange, except while it computes weight gradients or a part of ring attention."""
    layout = setup.layout
    split = layout.sequence_parallel
    whole = work.tp_exchanges * all_reduce_s(groups["tp"], work.tp_bytes, eff)
    # The exchange is an all-reduce at one end of the region or, with sequence parallelism, one half of it at each end.
    entering = whole / 2 if split else whole
    leaving = whole / 2 if split else 0.0
    if not (layout.splits_backward or setup.lora.rank or setup.matmul in EIGHT_BIT):
        entering = max(0.0, entering - sum(gemm_s(gemm, rates, eff)[2] for gemm in work.tp_delayed))
        leaving = max(0.0, leaving - sum(gemm_s(gemm, rates, eff)[2] for gemm in work.tp_delayed_after))
    in_loss = 0.0
    if work.loss_bytes and layout.tp > 1:  # for each token's maximum, then for its sum and the target's logit
        chunk = min(setup.tokens, loss_chunk_tokens(cast("TextModel", setup.model).vocab_size // layout.tp))
        each = sum(all_reduce_s(groups["tp"], size * chunk, eff) for size in (4.0, 8.0))
        in_loss = math.ceil(setup.tokens / chunk) * each
    tp = (whole + entering + leaving + in_loss) / PASSES["tp"]
    tp_again = whole - work.tp_last * (whole / 2 if split else whole)

    cp_f = cp_b = 0.0
    number = layout.cp
    if number > 1 and work.cp_bytes:
        keys_bytes = work.cp_bytes / number
        if layout.context_method == "ring":
            # Keys and values are sent while a part of attention is computed, and their gradients afterwards, in fp32.
            # A pair of devices can have a lower rate than the group, and all neighbours wait for the slowest pair.
            ranks = [(one * layout.tp, (one + 1) % number * layout.tp) for one in range(number)]
            pairs = {group_of_ranks(setup.fabric, pair, eff) for pair in ranks}
            passed = max(send_s(pair, keys_bytes, eff) for pair in pairs)
            turn_f = attention_f / number
            turn_b = attention_b / number
            if work.counted_kernels is not None:  # messages also overlap the kernels that merge a turn's results
                queries = work.cp_query_bytes / 2
                merges = ring_turn_kernels(queries, keys_bytes / 4, queries / work.attention_head_dim)
                turn_f += kernels_s(merges[0], rates, eff)
                turn_b += kernels_s(merges[1], rates, eff)
            cp_f = (number - 1) * max(0.0, passed - turn_f)
            cp_b = (number - 1) * max(0.0, passed - turn_b)
            cp_b += number * max(send_s(pair, keys_bytes * 4.0 / rates.element_bytes, eff) for pair in pairs)
        else:
            sent = (work.cp_query_bytes, keys_bytes / 2)
            cp_f = cp_b = 2 * sum(all_to_all_s(groups["cp"], size, 1, eff) for size in sent)
    cp = (cp_f + cp_b) / PASSES["cp"]

    # Each copy of a token is sent to its expert, and the results are sent back.
    ep = 2 * all_to_all_s(groups["ep"], work.ep_bytes, 1, eff)
    return tp, cp, ep, tp_again - tp, cp_f - cp


def recompute_part_s(part: LayersPart, again: Recompute) -> float:
    """Return the time of the forward work recomputed in the backward pass, with its communication if it includes
    matmuls."""
    work = again.matmul * part.matmul_f + again.attention * part.attention_f + again.elementwise * part.memory_f
    if again.full:
        work += part.tp + part.tp_again + part.cp + part.cp_again + part.ep + part.dp
    return again.layers * work


def own_work_s(part: LayersPart) -> float:
    """Return the time of one micro-batch in seconds, forward and backward, without recomputation."""
    work_s = part.forward + part.backward
    exchanges_s: float = sum(passes * getattr(part, axis) for axis, passes in PASSES.items())
    return work_s + exchanges_s


def layer_s(part: LayersPart, again: Recompute) -> float:
    """Return the time of one micro-batch through layers in seconds, forward and backward, with recomputation."""
    return own_work_s(part) + recompute_part_s(part, again)


@dataclass(frozen=True)
class MicroBatch:
    """Times of one micro-batch in each kind of layer, the embedding and the head.

    They depend only on the axes that split a layer (tp, cp, ep), not on those that distribute layers or samples. A
    search therefore computes them once for many layouts."""

    kinds: tuple[LayersPart, ...]
    before: tuple[tuple[int, ...], ...]
    """Number of layers of each kind before each layer, and in the full model."""
    embedding: LayersPart
    head: LayersPart
    rates: Rates
    mixers: tuple[tuple[LayersPart, ...], ...] = ()
    """The parts of each kind of layer, such as its attention and its experts."""

    @classmethod
    def of(
        cls,
        kinds: Sequence[LayersPart],
        order: Sequence[int],
        embedding: LayersPart,
        head: LayersPart,
        rates: Rates,
        mixers: Sequence[tuple[LayersPart, ...]] = (),
    ) -> MicroBatch:
        """`order`: the kind of each layer, by layer number."""
        if len(kinds) == 1:
            before = [tuple(range(len(order) + 1))]
        else:
            before = [tuple(accumulate((kind == own for own in order), initial=0)) for kind in range(len(kinds))]
        return cls(tuple(kinds), tuple(before), embedding, head, rates, tuple(mixers))

    @property
    def num_layers(self) -> int:
        return len(self.before[0]) - 1

    @cached_property
    def layer(self) -> LayersPart:
        """Return the average over the model's layers."""
        return LayersPart().plus(self.layers(self.numbers([range(self.num_layers)])), 1.0 / self.num_layers)

    def numbers(self, stages: Iterable[range]) -> tuple[int, ...]:
        """Return the number of layers of each kind in the given stages."""
        return tuple(sum(before[stage.stop] - before[stage.start] for stage in stages) for before in self.before)

    def layers(self, numbers: Sequence[int]) -> LayersPart:
        """Return the part with the given number of layers of each kind."""
        total = LayersPart()
        for part, number in zip(self.kinds, numbers, strict=True):
            total = total.plus(part, number)
        return total

    def kind_of(self, layer: int) -> int:
        return next(kind for kind, before in enumerate(self.before) if before[layer + 1] > before[layer])


def micro_batch(setup: Setup, groups: dict[str, Group], eff: Efficiency) -> MicroBatch:
    layout = setup.layout
    model = setup.model
    rates = rates_of(setup.fabric.chip, setup.matmul, setup.compute, eff)
    layers = layer_works(model, setup.tokens, setup.seq_len, layout)
    embedding_works: Sequence[Work | None] = [embedding_work(model, setup.tokens, layout)]
    head_works: Sequence[Work | None] = [head_work(model, setup.tokens, layout)]
    if isinstance(model, ConvModel) and runs_eagerly(setup):
        layers, embedding_works, head_works = conv_works(
            model, max(1, round(setup.micro_batch_size)), rates.element_bytes
        )
    # `layer_works` has one object per kind of layer, so 100 identical layers are timed only once.
    kinds = dict(zip(map(id, layers), layers, strict=True))
    if setup.software.counted and not (setup.software.fused_kernels or setup.lora.rank) and has_layer_list(model):
        like = dict(zip(map(id, layers), model.layer_list, strict=True))
        kinds = {kind: count_kernels(works, like[kind], setup) for kind, works in kinds.items()}
    mixers = [tuple(part_of(work, setup, rates, groups, eff) for work in works) for works in kinds.values()]
    parts = [beside_another(LayersPart.total(each), setup, eff) for each in mixers]
    places = {kind: place for place, kind in enumerate(kinds)}
    order = list(map(places.__getitem__, map(id, layers)))
    ends = []
    for works in (embedding_works, head_works):
        if setup.software.counted:
            # The embedding is summed only in the forward pass, and the gradient of the head's input only in the
            # backward pass. The fitted factors of other frameworks include both in the head.
            works = [work and replace(work, tp_exchanges=0.5) for work in works]
        ends.append(LayersPart.total(part_of(work, setup, rates, groups, eff) for work in works))
    embedding, head = ends
    if setup.software.counted and setup.trainable >= 1.0 and model.unit == "tokens":
        head = replace(head, memory_b=head.memory_b + head_gradient_s(setup, rates, eff))
    once = MicroBatch.of(parts, order, embedding, head, rates, mixers)
    if model.prediction_layers:  # each prediction layer adds a layer and a head on the last stage
        head = head.plus(head.plus(once.layer), model.prediction_layers)
    if setup.tabled:
        return MicroBatch.of((once.layer,), [0] * len(order), embedding, head, rates)
    return replace(once, head=head)


def overlaps_experts(setup: Setup) -> bool:
    """Return whether exchanges with experts overlap with another micro-batch: Megatron-Core interleaves two only for
    its GPTModel (`build_schedule_plan`), not for hybrid models."""
    return setup.software.overlap_experts and setup.grad_accum > 1 and isinstance(setup.model, DecoderModel)


def beside_another(layer: LayersPart, setup: Setup, eff: Efficiency) -> LayersPart:
    """Return the layer with only the exposed part of its exchanges with experts, if they run while another micro-batch
    is computed."""
    if not overlaps_experts(setup):
        return layer
    one_way = (layer.forward + layer.backward) / 2
    return replace(layer, ep=exposed_s(layer.ep, one_way, setup, eff))


def eager_shape(layer: Layer, setup: Setup) -> Shape:
    samples = max(1, round(setup.micro_batch_size))
    layout = block_layout(setup.layout)
    return Shape(cast("TextModel", setup.model), layer, layout, samples, setup.seq_len // layout.cp, 2.0)


def count_kernels(works: Sequence[Work], layer: Layer, setup: Setup) -> tuple[Work, ...]:
    """Return the parts of a layer with the kernels that trainspec's engine runs without compilation."""
    shape = eager_shape(layer, setup)
    both = zip(works, layer.mixers, strict=True)
    return tuple(replace(work, counted_kernels=mixer_kernels(shape, mixer)) for work, mixer in both)


def head_gradient_s(setup: Setup, rates: Rates, eff: Efficiency) -> float:
    """Return the time, in seconds per micro-batch, in which trainspec's loss casts, adds and scales the head's gradient
    in fp32 (`engine/models/cross_entropy.py`)."""
    model = cast("TextModel", setup.model)
    rows = model.vocab_size // setup.layout.tp
    width = rates.element_bytes
    chunk = loss_chunk_tokens(rows)
    products = math.ceil(setup.tokens / loss_group_tokens(model.hidden_size, width, chunk))
    moved = width + 4.0  # one kernel scales the gradient
    kernels = 1
    if width < 4.0:  # in fp32, the matrix multiplications themselves add
        moved += 6.0 + 10.0 * (products - 1)
        kernels += products
    moved_bytes = moved * rows * model.hidden_size
    return moved_bytes / rates.memory + eff.issue * moved_bytes / rates.load_store + kernels * eff.kernel_s


def runs_eagerly(setup: Setup) -> bool:
    """Return whether the step can be counted, which requires trainspec's engine with eager blocks on GPUs and all
    parameters trainable."""
    software = setup.software
    elsewhere = setup.tabled or setup.offload_optimizer or setup.fabric.speaks_gloo
    return software.counted and not (software.fused_kernels or elsewhere) and setup.trainable >= 1.0


def estimate_step(setup: Setup, eff: Efficiency) -> StepTime:
    """Predict one step. `trainspec backtest` shows the error on published runs."""
    groups = axis_groups(setup.layout, setup.fabric, eff)
    return assemble_step(setup, micro_batch(setup, groups, eff), groups, eff)


def assemble_step(setup: Setup, once: MicroBatch, groups: dict[str, Group], eff: Efficiency) -> StepTime:
    """Compose a full step in the setup's layout from the parts of a micro-batch."""
    if runs_eagerly(setup):
        from trainspec_cli.planner.time.engine_step import EngineStep  # imported here because it imports this module

        return EngineStep(setup, once, groups, eff).time()
    return step_of_rank(slowest_rank(once, setup, eff), setup, once.rates, groups, eff)


def slowest_rank(once: MicroBatch, setup: Setup, eff: Efficiency) -> TimedRank:
    """Return the slowest pipeline rank, which the others wait for.

    While a pipeline fills and drains, the others also wait for that rank's kernel launches, because the stages of a
    small model take as long as their launches."""
    ranks = rank_parts(once, setup.layout)
    # Most ranks of a long pipeline share one object (`rank_parts`), and a search times thousands of pipelines.
    distinct = {id(rank): rank for rank in ranks}
    device_s = {key: rank.time_s(setup) for key, rank in distinct.items()}
    launched_s = {
        key: device_s[key] + host_wait_s(rank.whole, device_s[key], setup, eff) for key, rank in distinct.items()
    }
    times = [launched_s[id(rank)] for rank in ranks]
    slowest = ranks[max(range(len(times)), key=times.__getitem__)]
    return TimedRank(slowest, device_s[id(slowest)], eff.bubble * bubble_s(times, setup.layout, setup.grad_accum))


def step_of_rank(timed: TimedRank, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> StepTime:
    """Return the step time of one pipeline rank."""
    part = timed.rank.whole
    micro = setup.grad_accum
    again = recompute_part_s(timed.rank.layers, setup.recompute)
    between = between_steps_s(setup, eff)
    sends = pipeline_sends_s(setup, groups["pp"], eff)
    busy = StepTime(
        matmul_s=micro * (part.matmul_f + part.matmul_b),
        attention_s=micro * (part.attention_f + part.attention_b),
        memory_bound_s=micro * (part.memory_f + part.memory_b),
        recompute_s=micro * again,
        tp_comm_s=micro * PASSES["tp"] * part.tp,
        cp_comm_s=micro * PASSES["cp"] * part.cp,
        ep_comm_s=micro * PASSES["ep"] * part.ep,
        pp_comm_s=sends,
        bubble_s=timed.bubble_s,
        optimizer_s=optimizer_s(part, setup, rates, groups, eff),
        dp_comm_s=micro * PASSES["dp"] * part.dp + data_parallel_s(part, setup, groups, eff),
        host_s=micro * host_wait_s(part, timed.time_s, setup, eff) + between,
    )
    # Devices wait for the slowest one when they synchronise. Host time between steps does not add to that wait.
    return replace(busy, host_s=busy.host_s + waiting_share(setup, eff) * (busy.total_s - between))


def between_steps_s(setup: Setup, eff: Efficiency) -> float:
    """Return the host time between two steps, in seconds."""
    return eff.step_graphed_s if setup.software.graphs else eff.step_s


def waiting_share(setup: Setup, eff: Efficiency) -> float:
    """Return the time added by waiting for the slowest device, as a fraction of a step's work."""
    return eff.jitter * math.log2(max(1.0, setup.fabric.num_devices / 8))


@dataclass(frozen=True)
class RankParts:
    """Times of one micro-batch in all stages of one pipeline rank."""

    layers: LayersPart
    beside: LayersPart = field(default_factory=LayersPart)
    """The embedding or head, if the rank has it; neither is recomputed."""

    @property
    def whole(self) -> LayersPart:
        return self.layers.plus(self.beside)

    def time_s(self, setup: Setup) -> float:
        """Return the time of forward and backward in seconds."""
        again = self.whole if setup.tabled else self.layers
        return own_work_s(self.whole) + recompute_part_s(again, setup.recompute)

    def compute_s(self, setup: Setup) -> float:
        """Return the same time without the layers' exchanges, except those in recomputed forward passes."""
        return self.whole.forward + self.whole.backward + recompute_part_s(self.layers, setup.recompute)


@dataclass(frozen=True)
class TimedRank:
    """The time of a pipeline rank in a step."""

    rank: RankParts
    time_s: float
    """Time of one micro-batch in seconds, forward and backward."""
    bubble_s: float
    """Time in seconds that this rank waits for the others, over the full step."""


def rank_parts(once: MicroBatch, layout: Layout) -> list[RankParts]:
    """Return the times of each pipeline rank's layers, and of its embedding or head. Ranks with the same layers and
    neither embedding nor head share one object."""
    stages = cut_layers(once.num_layers, layout)
    numbers = [once.numbers([stages[stage] for stage in layout.stages_of_rank(rank)]) for rank in range(layout.pp)]
    parts = {number: RankParts(once.layers(number)) for number in set(numbers)}
    ranks = [parts[number] for number in numbers]
    for stage, end in ((0, once.embedding), (layout.num_stages - 1, once.head)):
        rank = layout.rank_of_stage(stage)
        ranks[rank] = RankParts(ranks[rank].layers, ranks[rank].beside.plus(end))
    return ranks


def bubble_s(stage_s: Sequence[float], layout: Layout, micro_batches: int) -> float:
    """Return how long a step's slowest stage waits while the pipeline fills and drains."""
    return layout.bubble_of(micro_batches) * (sum(stage_s) - max(stage_s))


def pipeline_sends_s(setup: Setup, group: Group, eff: Efficiency) -> float:
    """Return the exposed time in seconds of sending activations and their gradients between stages."""
    layout = setup.layout
    if layout.pp == 1:
        return 0.0
    # With sequence parallelism, a tensor-parallel rank has, and sends, only part of the sequence.
    parts = layout.tp if layout.sequence_parallel or setup.software.split_sends else 1
    message = 2.0 * setup.tokens * setup.model.hidden_size / parts
    one = send_s(group, message, eff) * (1 - eff.pp_overlap)
    # Sends while the pipeline fills and drains cannot be hidden behind work, unlike those of each micro-batch.
    return 2 * layout.virtual_stages * setup.grad_accum * one + 2 * (layout.pp - 1) * send_s(group, message, eff)


def host_wait_s(part: LayersPart, device_s: float, setup: Setup, eff: Efficiency) -> float:
    """Return how much longer launching a micro-batch's kernels takes than running them, in seconds."""
    if setup.software.graphs:
        return 0.0
    kernels = part.kernels + (0 if setup.software.grouped_experts else 6 * part.experts)
    # The backward pass launches about two kernels for each kernel of the forward pass.
    launches = kernels * (3.0 + setup.recompute.matmul * setup.recompute.layers)
    if setup.software.fused_kernels:
        launches *= 0.7
    return max(0.0, launches * eff.launch_s - device_s)


def optimizer_s(part: LayersPart, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> float:
    """Return the duration of the update in seconds. Gradients, master weights and moments are read and written once,
    over the host link if offloaded. If an update has several operations, the reads and writes of each are counted."""
    layout = setup.layout
    software = setup.software
    # Without `ep`, trainspec's engine keeps a block's experts with its other parameters, so all tp ranks hold the same
    # experts.
    expert_shards = layout.shards if software.counted and layout.ep == 1 else layout.expert_shards
    params = setup.trainable * (part.params / layout.shards + part.expert_params / expert_shards)
    traffic = params * (software.grad_bytes + 2 * software.master_bytes + 2 * software.moment_bytes + 2)
    if setup.offload_optimizer and software.counted:
        # The update also scales and writes gradients, and the norm reads them once more. The copies overlap with the
        # passes (`exchanges_of`).
        touched = 3 * OFFLOADED_BYTES + 2 * software.master_bytes + 2 * software.moment_bytes
        return params * touched / HOST_BYTES_PER_S
    if setup.offload_optimizer:
        # Gradients are sent to the host, which runs the update and sends bf16 weights back.
        return params * (software.grad_bytes + 2) / (setup.fabric.host_link_gb_per_s * 1e9) + traffic / HOST_BYTES_PER_S
    if software.optimizer == "adamw8bit":
        traffic += params * UPDATE_BYTES["adamw8bit"]
    usual_s = eff.optimizer_passes * traffic / rates.memory
    return usual_s + (orthogonalise_s(params, setup, rates, groups, eff) if software.optimizer == "muon" else 0.0)


def orthogonalise_s(params: float, setup: Setup, rates: Rates, groups: dict[str, Group], eff: Efficiency) -> float:
    """Return the duration of muon in seconds: operations on this rank's `params`, sending each matrix to the rank that
    assembles it and back, and Newton-Schulz on the matrices that this rank assembles. The ranks of dp_shard, cp and tp
    divide a stage's matrices among themselves; experts are not sharded."""
    layout = setup.layout
    model = cast("TextModel", setup.model)
    dense, experts = newton_schulz_flops(model)
    spread = layout.expert_ranks if layout.ep > 1 else layout.shards
    flops = (dense / (layout.shards * layout.tp) + experts / spread) / layout.pp
    hidden = params * matrix_share(model)
    sent_bytes = 2 * WIRE_BYTES * hidden
    travel_s = sum(all_to_all_s(groups[axis], sent_bytes, 1, eff) for axis in ("dp_shard", "tp"))
    rate = matmul_flops_per_s(setup.fabric.chip, "bf16", eff)
    return UPDATE_BYTES["muon"] * hidden / rates.memory + flops / rate + travel_s


def data_parallel_s(part: LayersPart, setup: Setup, groups: dict[str, Group], eff: Efficiency) -> float:
    """Return the exposed time in seconds of reducing gradients and gathering parameters."""
    forward = part.forward + part.tp + part.ep
    backward = part.backward + part.tp + part.ep + recompute_part_s(part, setup.recompute)
    sent = exchanges_of(part.params, part.expert_params, setup, groups, eff)
    each = exposed_s(sent.forward_s, forward, setup, eff) + exposed_s(sent.backward_s, backward, setup, eff)
    return sent.times * each + exposed_s(sent.across_s, backward / 2, setup, eff) + sent.waited_s


# Layer times for splitting the pipeline


def planned_times(once: MicroBatch, setup: Setup) -> LayerTimes:
    """Return the time of one micro-batch in seconds, forward and backward, with recomputation and the layers'
    communication."""
    kinds_s = [layer_s(kind, setup.recompute) for kind in once.kinds]
    layers_s = [kinds_s[once.kind_of(layer)] for layer in range(once.num_layers)]
    return LayerTimes(layers_s, own_work_s(once.embedding), own_work_s(once.head))


def mean_times(once: MicroBatch, setup: Setup) -> LayerTimes:
    """Return the same with average times for all layers, for layer splits in a search over many layouts."""
    layers_s = [layer_s(once.layer, setup.recompute)] * once.num_layers
    return LayerTimes(layers_s, own_work_s(once.embedding), own_work_s(once.head))


def weigh_times(times: Sequence[StepTime], shares: Sequence[float]) -> StepTime:
    """Return the weighted mean of several steps, part by part."""
    names = [field.name for field in fields(StepTime)]
    return StepTime(
        **{
            name: sum(share * float(getattr(time, name)) for time, share in zip(times, shares, strict=True))
            for name in names
        }
    )
