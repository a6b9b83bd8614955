"""The engine's count in the planner's terms: a breakdown for each pipeline stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import cast

from trainspec_cli.planner.memory.engine.blocks import profile_block
from trainspec_cli.planner.memory.engine.run import WIDTHS, EngineRun, fuses_countably, is_counted, rank_peaks
from trainspec_cli.planner.memory.engine.step import shape_of
from trainspec_cli.planner.memory.frameworks import (
    DEFAULT_MEMORY,
    LayerMemory,
    MemoryModel,
    communicators,
    estimate_memory,
    fragmentation_of,
    mean_layer_memory,
)
from trainspec_cli.planner.setup import Setup
from trainspec_cli.spec.recipe.layout import MESH_AXES
from trainspec_cli.spec.recipe.model import TextModel
from trainspec_cli.spec.recipe.run import Recompute
from trainspec_cli.spec.results.prediction import MemoryBreakdown


def predict_memory(setup: Setup, recompute: str) -> tuple[MemoryBreakdown, ...]:
    """Count a run of trainspec's own engine, eager or with compiled blocks that are counted; estimate any other as
    frameworks in general."""
    if not _is_counted(setup, recompute):
        return estimate_memory(setup)
    run = _run_of(setup, cast("Recompute", recompute))
    outside_bytes = DEFAULT_MEMORY.group_bytes * communicators(setup)
    lost = fragmentation_of(setup, DEFAULT_MEMORY)
    return tuple(_breakdown(peak.by_cause, outside_bytes, lost, DEFAULT_MEMORY) for peak in rank_peaks(run))


def layer_memory(setup: Setup, recompute: str) -> LayerMemory:
    """The mean layer's activations as the engine has them, for a search that looks at many layouts."""
    general = mean_layer_memory(setup)
    if setup.model.unit == "samples" or not _is_counted(setup, recompute):
        return general
    run = _run_of(setup, cast("Recompute", recompute))
    model = cast("TextModel", setup.model)
    number = Counter(model.layer_list)
    profiles = {layer: profile_block(shape_of(run, model, layer), run.recompute, False) for layer in number}
    gradient = WIDTHS[run.compute] * (general.params + general.expert_params) * min(1.0, setup.trainable)
    return replace(
        general,
        kept_bytes=sum(number[layer] * profiles[layer].kept for layer in number) / number.total(),
        working_bytes=max(profile.backward[-1].peak for profile in profiles.values()) - gradient,
    )


def _is_counted(setup: Setup, recompute: str) -> bool:
    offload = "optimizer" if setup.offload_optimizer else "none"
    if not setup.software.counted or setup.matmul not in (setup.compute, "fp8"):
        return False
    if setup.software.fused_kernels and not fuses_countably(setup.model, setup.lora, setup.matmul, setup.compute):
        return False
    return recompute in ("none", "selective", "full") and is_counted(setup.model, offload) and _is_built(setup)


def _is_built(setup: Setup) -> bool:
    """The engine spreads this model so: along no axis that its family refuses, experts within a replica."""
    layout = setup.layout
    if any(getattr(layout, axis) > 1 for axis in MESH_AXES if axis in setup.model.record.refuses):
        return False
    return layout.etp == 1 and layout.expert_ranks % layout.ep == 0


def _run_of(setup: Setup, recompute: Recompute) -> EngineRun:
    sequence_parallel = setup.layout.sequence_parallel and setup.layout.tp > 1
    return EngineRun(
        model=setup.model,
        layout=replace(setup.layout, sequence_parallel=sequence_parallel),
        seq_len=setup.seq_len,
        samples=int(setup.micro_batch_size),
        micro_batches=_telling(setup),
        compute=setup.compute,
        reduce="bf16" if setup.software.reduce_bytes == 2.0 else "fp32",
        recompute=recompute,
        matmul=setup.matmul,
        optimizer=setup.software.optimizer,
        lora=setup.lora,
        compiled=setup.software.fused_kernels,
        outer_bytes=setup.outer_bytes,
    )


def _telling(setup: Setup) -> int:
    """Return how many micro-batches show the peak: a pipeline that is full repeats itself, but for gpipe, which holds
    all. A step of twice as many micro-batches as stages holds as much as one of more, within 0.03%."""
    layout = setup.layout
    if layout.pipeline_schedule == "gpipe" or layout.pp == 1:
        return setup.grad_accum
    return min(setup.grad_accum, 2 * layout.num_stages)


def _breakdown(
    peak: dict[str, float], groups_bytes: float, fragmentation: float, constants: MemoryModel
) -> MemoryBreakdown:
    """Add what no tensor takes: communicators, the allocator's holes, the device's context, and the reserve."""
    parameters, work = peak["parameters"] + peak["gathered"], peak["activations"] + peak["temporaries"]
    unused = fragmentation * work
    unused += constants.states_fragmentation * (parameters + peak["gradients"] + peak["optimizer"])
    whole = sum(peak.values()) + groups_bytes + unused + constants.context_bytes
    return MemoryBreakdown(
        parameters_bytes=parameters,
        gradients_bytes=peak["gradients"],
        optimizer_bytes=peak["optimizer"],
        activations_bytes=work,
        comm_buffers_bytes=groups_bytes,
        fragmentation_bytes=unused + constants.reserve * whole,
        context_bytes=constants.context_bytes,
    )
