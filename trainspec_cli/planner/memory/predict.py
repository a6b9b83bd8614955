"""The device memory of a run. Plans, launches and rejections all use `predict_memory`.

`layer_memory` is only for searches over thousands of layouts: `peak_of` uses it for a rough estimate, which is at most
`SLACK` times the prediction, so that a search does not drop a layout that fits. This estimate is never shown to
users."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.memory.caching_allocator import GROWS_SEGMENTS
from trainspec_cli.planner.memory.engine.blocks import profile_block
from trainspec_cli.planner.memory.engine.step import (
    WIDTHS,
    EngineRun,
    fuses_countably,
    is_counted,
    loss_bytes,
    rank_peaks,
    shape_of,
)
from trainspec_cli.planner.pipeline import Room, layers_per_rank
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import EIGHT_BIT
from trainspec_cli.planner.workload import Work, count_params, embedding_work, head_work, layer_kinds
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.keys.model import ModelSpec, has_layer_list
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.keys.training import NF4_BLOCK, NF4_SCALE_BLOCK, WireFormats
from trainspec_cli.recipe.results.plan import MemoryBreakdown

# The estimate for an arbitrary framework, by cause and pipeline stage.
#
# Activations follow Korthikanti et al. 2022 (arXiv:2205.05198), recounted for fused attention and gated feed-forwards;
# states follow ZeRO (arXiv:1910.02054). Known error: 5% on published peaks. Most predictions are too high, because the
# reserve is meant to prevent predictions that are more than 3% too low. For frameworks with poorly documented copies
# (InternEvo's ZeRO-3), predictions are up to 20% too high.


CONTEXT_BYTES = 1.2 * GIB
"""The device's context, kernels and library workspaces."""
GROUP_BYTES = 0.3 * GIB
"""Buffers of one communicator (NCCL channels)."""
FRAGMENTATION = 0.08
"""Fragmentation without recomputation, as a fraction of activations and temporaries. It results from applying the
allocator's rules to traces of the engine's steps (5% of all allocated memory;
`planner/memory/caching_allocator.py`)."""
RECOMPUTE_FRAGMENTATION = 0.17
"""Additional fragmentation with recomputation, because its blocks differ in size from those of the first forward
passes: 22% of all memory in such traces, and 25% of activations in published tables of runs with full recomputation."""
STATES_FRAGMENTATION = 0.04
"""Fragmentation of parameters, gradients and optimizer states, which are allocated once and rounded up to full
blocks."""
GROWN_FRAGMENTATION = 0.02
"""Fragmentation with expandable segments, as a fraction of all tensors: neighbouring holes merge, and no segment is
rounded up. It is the mean over traces of the engine's steps above 1 GiB, using the same rules."""
GROWN_RECOMPUTE_FRAGMENTATION = 0.05
"""Additional fragmentation with expandable segments and full recomputation: 7% of all memory in such traces."""
LOGIT_BYTES = 10.0
"""Bytes per logit: 2 in the compute format, 4 in the loss, 4 for its gradient before it is cast back."""
LOGIT_BYTES_EAGER = 12.0
"""Bytes per logit, including another 2 for the gradient after it is cast back."""
REUSE = 0.5
"""Fraction of the memory freed by the backward pass that the optimizer's temporaries can reuse."""
RESERVE = 0.06
"""Reserve as a fraction of the total, because runs of the same configuration differ by about that much (published
pairs: 2 to 15%). A prediction that is too low leads to running out of memory, while one that is too high only wastes a
little."""
NF4_BYTES = (4 + 8 / NF4_BLOCK + 32 / (NF4_BLOCK * NF4_SCALE_BLOCK)) / 8
"""Bytes per weight in 4-bit NormalFloat, including the scales."""
FEEDBACK_BYTES = 2 * 2
"""Bytes of error feedback per value: one bf16 copy from the last update, and one for the current step."""
USABLE = 0.97
"""Fraction of a device's memory that can be used before allocations fail or thrash."""


def memory_limit_bytes(chip: AcceleratorSpec) -> float:
    """Return the number of bytes that a plan may use. A device sold as 80 GB has 79.6 GiB: vendors' numbers are closer
    to GiB than to GB."""
    return USABLE * chip.memory_gb * GIB


@dataclass(frozen=True)
class LayerMemory:
    """The average layer: its parameters on one rank, and the activations of one micro-batch."""

    params: float
    expert_params: float
    kept_bytes: float
    """Bytes kept from forward to backward."""
    working_bytes: float
    """Additional bytes that are live while the layer runs."""
    output_bytes: float
    """Size of the layer's output, which is the next layer's input."""
    logits_bytes: float
    """Bytes on the last stage for logits and the loss's temporaries, for the tokens that are processed at once."""


def saved_of(work: Work, setup: Setup) -> float:
    """Return the size in bytes of the activations that one part of a layer keeps without recomputation."""
    saved = work.saved_bytes
    if setup.trainable < 1 and setup.software.weight_bytes >= 2.0 and not work.attention_flops:
        # Only attention has adapters. Other matmuls are frozen, so their inputs are not kept (except with a quantised
        # base).
        saved -= work.saved_gemm_bytes
    elif setup.matmul in EIGHT_BIT:
        saved -= 0.5 * work.saved_gemm_bytes
    if not setup.software.fused_attention:  # older frameworks keep dropout masks with one byte per element
        saved += 0.5 * work.input_bytes
        saved += 2.5 * work.score_bytes if work.attention_flops else 0.0
    if not setup.software.fused_kernels and setup.software.fused_attention:
        saved += work.saved_eager_bytes
    return saved if setup.compute not in ("fp32", "tf32") else 2.0 * saved


def kept_of(works: tuple[Work, ...], setup: Setup) -> float:
    """Return the bytes that a layer keeps for its backward pass. Full recomputation keeps only its input."""
    saved = sum(saved_of(work, setup) for work in works)
    again = setup.recompute
    if again.full:
        kept = works[0].input_bytes
    else:
        scores = sum(2.5 * work.score_bytes for work in works if work.attention_flops)
        core = scores if not setup.software.fused_attention else 0.0
        kept = saved - again.attention * core
        # Recomputing element-wise kernels or matmuls saves roughly everything except the inputs of matmuls.
        rest = kept - sum(work.saved_gemm_bytes for work in works) - works[0].input_bytes
        kept -= max(again.matmul, again.elementwise) * max(0.0, rest)
    return again.layers * kept + (1 - again.layers) * saved


def mean_layer_memory(setup: Setup) -> LayerMemory:
    count = setup.model.num_layers
    params = experts = kept = working = output = 0.0
    for number, works in layer_kinds(setup.model, setup.tokens, setup.seq_len, setup.layout):
        params += number * sum(work.params for work in works)
        experts += number * sum(work.expert_params for work in works)
        kept += number * kept_of(works, setup)
        working = max(working, sum(saved_of(work, setup) for work in works))
        output = max(output, works[0].input_bytes)
    return LayerMemory(params / count, experts / count, kept / count, working, output, logits_bytes(setup))


def logits_bytes(setup: Setup) -> float:
    if setup.model.unit == "samples":
        return 0.0
    software = setup.software
    is_plain = software.plain_loss or not software.fused_kernels
    each = LOGIT_BYTES_EAGER if is_plain else LOGIT_BYTES
    if is_plain and setup.layout.tp > 1 and software.cut_logit_bytes is not None:
        each = software.cut_logit_bytes
    each += 2.0 * software.shifted_logits
    return each * setup.tokens * setup.model.vocab_size / setup.layout.tp


def in_flight(setup: Setup, stage: int) -> float:
    """Return the largest number of micro-batches whose activations a stage holds at once."""
    layout = setup.layout
    total = setup.grad_accum
    if layout.pp == 1:
        return 1.0
    if layout.pipeline_schedule == "gpipe":
        # All forward passes run before the first backward pass.
        return float(total)
    if layout.virtual_stages > 1:
        # This is the warm-up of the interleaved schedule (arXiv:2104.04473); a chunk is one of a rank's virtual stages.
        chunks = 2 * (layout.pp - stage - 1) + (layout.virtual_stages - 1) * layout.pp + 1
        return min(chunks, total * layout.virtual_stages) / layout.virtual_stages
    # 1F1B: a stage runs ahead by the number of stages after it.
    return float(min(layout.pp - stage, total))


def sharding_stage(setup: Setup) -> int:
    """Return the ZeRO stage; 0 if nothing is sharded. State is also sharded over context-parallel ranks."""
    is_sharded = setup.layout.shards > 1 and setup.software.shards_states
    return setup.layout.zero_stage if is_sharded else 0


def keeps_unsharded(setup: Setup) -> bool:
    """Return whether a pipeline stage keeps gathered parameters and unsharded gradients until its last micro-batch."""
    return setup.layout.pp > 1 and setup.software.unshards_pipelines


def state_bytes(params: float, shards: int, setup: Setup, ends: bool = False) -> tuple[float, float, float]:
    """Return the sizes in bytes of (parameters, gradients, optimizer state) between steps, for parameters sharded over
    `shards` ranks.

    `ends`: whether these are the embedding and the head, which are not quantised.
    """
    software = setup.software
    stage = sharding_stage(setup)
    trained = params * setup.trainable
    each = software.weight_bytes
    if setup.trainable < 1 and setup.matmul in EIGHT_BIT:
        each = 1.0  # a frozen base is kept in the compute format
    if ends:
        each = max(each, 2.0)
    weights = each * params / (shards if stage == 3 else 1)
    if setup.lora.is_quantised and not ends:
        weights = NF4_BYTES * params + each * trained / (shards if stage == 3 else 1)
    gradients = software.grad_bytes * trained / (shards if stage >= 2 else 1)
    if stage == 3 and software.weight_bytes == 4.0:
        # FSDP's sharded gradients have the format of its fp32 parameters, regardless of the format used for reduction.
        gradients = 4.0 * trained / shards
    replicated = software.counted and setup.group_layout.dp_replicate > 1 and setup.grad_accum > 1
    if stage >= 2 and (keeps_unsharded(setup) or replicated):
        # With replicas, the engine exchanges gradients once per step (`Layout.exchanges_every_backward`); until then,
        # their sums are unsharded.
        gradients += software.reduce_bytes * trained
    moments = trained * software.moment_bytes / (shards if stage else 1)
    master = trained * software.master_bytes / (shards if stage else 1)
    outer = trained * setup.outer_bytes / (shards if stage else 1)
    # Offloaded moments and master weights are in host memory; the state of an outer optimizer stays on the device.
    return weights, gradients, outer if setup.offload_optimizer else moments + master + outer


def gathered_bytes(layer: LayerMemory, layers: int, outside: float, setup: Setup) -> float:
    """Return the size in bytes of ZeRO-3's unsharded tensors: two layers' parameters, one layer's gradients, and the
    embedding and head."""
    params = layer.params + layer.expert_params
    if setup.lora.is_quantised:  # roughly the largest matrix: 2 bytes per value, plus 6 for temporaries
        return 2.0 * params + (2.0 * outside if sharding_stage(setup) == 3 else 0.0)
    if sharding_stage(setup) < 3:
        return 0.0
    if keeps_unsharded(setup):
        return 2.0 * (layers * params + outside)
    gradient = (setup.software.reduce_bytes + 2.0) * params * min(1.0, setup.trainable * 1e3)
    return 2 * 2.0 * params + gradient + 2.0 * outside


def stage_memory(setup: Setup, stage: int, layers: int, layer: LayerMemory) -> MemoryBreakdown:
    """Estimate the memory of one pipeline stage."""
    layout = setup.layout
    software = setup.software
    last = stage == layout.pp - 1
    shards = layout.shards
    ends = [embedding_work(setup.model, setup.tokens, layout) if stage == 0 else None]
    ends.append(head_work(setup.model, setup.tokens, layout) if last else None)
    outside = sum(work.params for work in ends if work)
    dense = state_bytes(layers * layer.params, shards, setup)
    at_ends = state_bytes(outside, shards, setup, ends=True)
    experts = state_bytes(layers * layer.expert_params, layout.expert_shards, setup)
    gathered = gathered_bytes(layer, layers, outside, setup)

    # Activations kept for the micro-batches in flight, and one layer's temporaries (after the logits are freed).
    # Megatron frees activations after sending them; in other frameworks, each tensor-parallel rank keeps a part of them
    # until their gradient arrives.
    logits = layer.logits_bytes if last else 0.0
    held = in_flight(setup, stage)
    sent = layer.output_bytes / layout.tp if layout.pp > 1 and not software.fused_kernels else 0.0
    kept = (layers * layer.kept_bytes + sent) * held
    activations = kept + max(0.0, layer.working_bytes - layer.kept_bytes - logits)

    # Memory needed by the optimizer step beyond what the backward pass has freed.
    stepping = (layers * layer.params + outside) / shards + layers * layer.expert_params / layout.expert_shards
    stepping *= setup.trainable
    freed = REUSE * (activations + logits + gathered)
    stepped = software.step_bytes * stepping + max(0.0, software.step_temporary_bytes * stepping - freed)

    gradients = dense[1] + at_ends[1] + experts[1]
    if software.counted and setup.grad_accum <= held:
        # The engine has no gradient buffers: the first gradients are allocated while a micro-batch's activations are
        # being freed.
        gradients = max(0.0, gradients - activations / held)
    return with_overhead(
        setup,
        parameters=dense[0] + at_ends[0] + experts[0] + gathered,
        gradients=gradients,
        optimizer=dense[2] + at_ends[2] + experts[2] + stepped,
        activations=activations,
        logits=logits,
        buffers=software.bucket_bytes if layout.data_parallel_size * layout.cp > 1 else 0.0,
    )


def with_overhead(
    setup: Setup,
    *,
    parameters: float,
    gradients: float,
    optimizer: float,
    activations: float,
    logits: float,
    buffers: float,
    counted: bool = False,
) -> MemoryBreakdown:
    """Return the memory of a stage: these tensor bytes, plus the error feedback of compressed gradients, communicators,
    fragmentation, the device context and the reserve. `counted`: whether gradients and buffers are allocated within a
    step, as in the engine, instead of persisting."""
    feedback = feedback_bytes(setup.model, setup.layout, setup.software.wire)
    again = setup.recompute.matmul * setup.recompute.layers
    states = parameters + optimizer
    work = activations + logits
    if counted:
        work += gradients + buffers
    else:
        states += gradients
    if setup.software.expandable_segments and setup.fabric.chip.vendor in GROWS_SEGMENTS:
        unused = GROWN_FRAGMENTATION + GROWN_RECOMPUTE_FRAGMENTATION * again
        unused *= states + work
    else:
        unused = (FRAGMENTATION + RECOMPUTE_FRAGMENTATION * again) * work
        unused += STATES_FRAGMENTATION * states
    buffers += GROUP_BYTES * communicators(setup)
    whole = parameters + gradients + optimizer + activations + logits + buffers
    whole += feedback + unused + CONTEXT_BYTES
    return MemoryBreakdown(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        feedback_bytes=feedback,
        activations_bytes=activations,
        logits_bytes=logits,
        comm_buffers_bytes=buffers,
        fragmentation_bytes=unused + RESERVE * whole,
        context_bytes=CONTEXT_BYTES,
    )


def feedback_bytes(model: ModelSpec, layout: Layout, wire: WireFormats) -> float:
    """Return the size in bytes of a rank's error feedback (the accumulated rounding error of compressed gradients). It
    covers the unsharded gradients if they are summed over shards, and the rank's shard if it is summed over
    replicas."""
    if not {wire.gradients, wire.across_nodes} & {"int8", "int4"}:
        return 0.0
    whole = count_params(model) / (layout.tp * layout.pp)
    return FEEDBACK_BYTES * whole * ((layout.shards > 1) + (layout.dp_replicate > 1) / layout.shards)


def communicators(setup: Setup) -> int:
    """Count the communicators: one per axis. Some frameworks have another one for all ranks of several axes, and one
    between a pipeline's first and last stage."""
    layout = setup.layout
    sizes = (layout.tp, layout.cp, layout.ep, layout.pp, layout.dp_shard, layout.dp_replicate)
    axes = sum(size > 1 for size in sizes)
    return axes + setup.software.model_groups * ((axes > 1) + (layout.pp > 1))


def peak_of(setup: Setup, layer: LayerMemory, beyond_bytes: float = math.inf) -> float:
    """Return the peak bytes over all stages, which occur in the first stage, the last, or the first of those with the
    most layers. Returns early if one needs more than `beyond_bytes`."""
    counts = layers_per_rank(setup.model.num_layers, setup.layout)
    peak = 0.0
    for stage in {0, counts.index(max(counts)), len(counts) - 1}:
        peak = max(peak, stage_memory(setup, stage, counts[stage], layer).total_bytes)
        if peak > beyond_bytes:
            break
    return peak


def estimate_memory(setup: Setup) -> tuple[MemoryBreakdown, ...]:
    """Estimate the memory of every pipeline stage, in bytes."""
    layer = mean_layer_memory(setup)
    counts = layers_per_rank(setup.model.num_layers, setup.layout)
    return tuple(stage_memory(setup, stage, count, layer) for stage, count in enumerate(counts))


# The prediction: a count if the engine supports the run, otherwise an estimate.


def predict_memory(setup: Setup, recompute: str) -> tuple[MemoryBreakdown, ...]:
    """Return the memory of each pipeline stage. It is counted tensor by tensor for trainspec's engine (eager, or with
    compiled blocks that can be counted), and otherwise estimated as for any framework."""
    return tuple(_predict_stages(setup, recompute))


def memory_within(setup: Setup, recompute: str, limit_bytes: float) -> tuple[MemoryBreakdown, ...] | None:
    """Return `predict_memory`, or None as soon as a stage exceeds the limit."""
    stages: list[MemoryBreakdown] = []
    for stage in _predict_stages(setup, recompute):
        if stage.total_bytes > limit_bytes:
            return None
        stages.append(stage)
    return tuple(stages)


def _predict_stages(setup: Setup, recompute: str) -> Iterator[MemoryBreakdown]:
    run = _run_of(setup, recompute)
    if run is None:
        yield from estimate_memory(setup)
        return
    for peak in rank_peaks(run):
        yield with_overhead(
            setup,
            parameters=peak["parameters"] + peak["gathered"],
            gradients=peak["gradients"],
            optimizer=peak["optimizer"],
            activations=peak["activations"] + peak["temporaries"],
            logits=peak["logits"],
            buffers=peak["collectives"],
            counted=True,
        )


def layer_memory(setup: Setup, recompute: str) -> LayerMemory:
    """Return the engine's activations and logits of the average layer, for a search over many layouts."""
    general = mean_layer_memory(setup)
    run = _run_of(setup, recompute)
    model = setup.model
    if run is None or not has_layer_list(model):
        return general
    number = Counter(model.layer_list)
    profiles = {layer: profile_block(shape_of(run, model, layer), run.recompute, False) for layer in number}
    gradient = WIDTHS[run.compute] * (general.params + general.expert_params) * min(1.0, setup.trainable)
    return replace(
        general,
        kept_bytes=sum(number[layer] * profiles[layer].kept for layer in number) / number.total(),
        working_bytes=max(profile.backward[-1].peak for profile in profiles.values()) - gradient,
        logits_bytes=loss_bytes(run, model),
    )


def _run_of(setup: Setup, recompute: str) -> EngineRun | None:
    """Return the run in the form that the count needs; None if the engine does not support it, or if it cannot be
    counted."""
    software = setup.software
    layout = setup.layout
    offload = "optimizer" if setup.offload_optimizer else "none"
    if not software.counted or setup.matmul not in (setup.compute, "fp8"):
        return None
    if software.fused_kernels and not fuses_countably(
        setup.model, setup.lora, setup.matmul, setup.compute, setup.groups
    ):
        return None
    if recompute not in ("none", "selective", "full") or not is_counted(setup.model, offload):
        return None
    # The engine spreads experts only within a replica, and rejects axes that a family does not support.
    if any(getattr(layout, axis) > 1 for axis in MESH_AXES if axis in setup.model.record.refuses):
        return None
    if layout.etp > 1 or layout.expert_ranks % layout.ep:
        return None
    micro_batches = setup.grad_accum
    if layout.pp > 1 and layout.pipeline_schedule != "gpipe":
        # A full pipeline repeats itself: beyond twice as many micro-batches as stages, memory stays the same within
        # 0.03%.
        micro_batches = min(micro_batches, 2 * layout.num_stages)
    return EngineRun(
        model=setup.model,
        layout=replace(setup.group_layout, sequence_parallel=layout.sequence_parallel and layout.tp > 1),
        seq_len=setup.seq_len,
        samples=int(setup.micro_batch_size),
        micro_batches=micro_batches,
        compute=setup.compute,
        reduce="bf16" if software.reduce_bytes == 2.0 else "fp32",
        recompute=cast("Recompute", recompute),
        matmul=setup.matmul,
        optimizer=software.optimizer,
        lora=setup.lora,
        compiled=software.fused_kernels,
        outer_bytes=setup.outer_bytes,
        offloads=setup.offload_optimizer,
        groups=setup.groups,
    )


# The probability that a layout fits (based on the error of the memory model), and the expected step time, which takes
# this probability into account.
#
# On published runs, the ratio of the measured to the predicted peak is approximately log-normal (`trainspec backtest`,
# 135 measured peaks of 3 sources; checked by tests/planner/validation/test_backtest.py). The error of a run from
# another source is that source's mean plus the run's deviation. The mean m of ln(measured / predicted) is the mean of
# the sources' means, and its variance s^2 is the variance within a source plus that between sources. A predicted peak M
# therefore fits a limit L with probability
#
#     P = Phi((ln(L / M) - m) / s)
#
# A layout that does not fit costs a failed start. The run then continues with less memory: with recomputation, which is
# one more forward pass, or in another layout that is slower by about the same amount. The expected step time is
#
#     E = t + (1 - P) (t / 3 + start / steps)


LOG_BIAS = -0.038
"""The mean m: predictions are 4% too high on average, because the model includes a reserve."""
LOG_DEVIATION = 0.043
"""The deviation s: 0.037 within a source, 0.021 between sources."""
RELIEF = 1 / 3
"""Relative slowdown of a step by recomputation, which adds one forward pass. The backward pass takes twice as long as
the forward pass."""
SURELY = 0.999
"""A layout with at least this probability is considered certain to fit."""


def fit_probability(peak_bytes: float, limit_bytes: float) -> float:
    """Return the probability that a predicted peak of `peak_bytes` is at most `limit_bytes`."""
    deviations = (math.log(limit_bytes / peak_bytes) - LOG_BIAS) / LOG_DEVIATION
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def expected_step_s(step_s: float, probability: float, start_s: float) -> float:
    """Return the expected step time of a layout that fits with `probability`. `start_s`: the duration of a start,
    divided by the number of steps in the run."""
    return step_s + (1 - probability) * (step_s * RELIEF + start_s)


def room_within(setup: Setup, memory: Sequence[MemoryBreakdown], limits_bytes: Sequence[float] = ()) -> Room:
    """Return the estimated memory in bytes that each rank's layers may use, and the size in bytes of one layer on that
    rank (the difference made by one more layer per stage), both scaled to the predicted `memory`. `limits_bytes`: the
    limit of each rank, if limits differ."""
    layout = setup.layout
    estimated, predicted = (max(stage.total_bytes for stage in one) for one in (estimate_memory(setup), memory))
    scale = estimated / predicted
    limits_bytes = limits_bytes or [memory_limit_bytes(setup.fabric.chip)] * layout.pp
    rounds = layout.num_stages // layout.pp
    even = (replace(layout, stage_layers=(each,) * layout.num_stages) for each in (1, 2))
    few, many = (estimate_memory(replace(setup, layout=layout)) for layout in even)
    layer = [(two.total_bytes - one.total_bytes) / rounds for one, two in zip(few, many, strict=True)]
    left = [
        limit * scale - one.total_bytes + size * rounds
        for limit, one, size in zip(limits_bytes, few, layer, strict=True)
    ]
    return Room([[size] * setup.model.num_layers for size in layer], left)
