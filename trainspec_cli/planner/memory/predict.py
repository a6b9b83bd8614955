"""The memory of a run on devices: `predict_memory` is the one answer that plans, launches and refusals give.

`layer_memory` is for searches alone, which look at thousands of layouts: with it `frameworks.peak_of` gives a rough
estimate, at most `SLACK` times the answer, so that a search drops nothing that fits. People never see that estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from trainspec_cli.planner.memory.engine.blocks import profile_block
from trainspec_cli.planner.memory.engine.run import WIDTHS, EngineRun, fuses_countably, is_counted, rank_peaks
from trainspec_cli.planner.memory.engine.step import loss_bytes, shape_of
from trainspec_cli.planner.memory.frameworks import (
    DEFAULT_MEMORY,
    LayerMemory,
    estimate_memory,
    mean_layer_memory,
    with_overhead,
)
from trainspec_cli.planner.setup import Setup
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.keys.model import has_layer_list
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.results.plan import MemoryBreakdown


def predict_memory(setup: Setup, recompute: str) -> tuple[MemoryBreakdown, ...]:
    """Return the memory of each pipeline stage: counted for a run of trainspec's own engine, eager or with compiled
    blocks that are counted, and estimated as of frameworks in general for any other."""
    return tuple(_predict_stages(setup, recompute))


def memory_within(setup: Setup, recompute: str, limit_bytes: float) -> tuple[MemoryBreakdown, ...] | None:
    """Return what `predict_memory` does; None where a stage takes more than the limit, and no other stage is counted
    after that one."""
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
            DEFAULT_MEMORY,
            parameters=peak["parameters"] + peak["gathered"],
            gradients=peak["gradients"],
            optimizer=peak["optimizer"],
            activations=peak["activations"] + peak["temporaries"],
            logits=peak["logits"],
            buffers=peak["collectives"],
            counted=True,
        )


def layer_memory(setup: Setup, recompute: str) -> LayerMemory:
    """Return the mean layer's activations and the logits as the engine has them, for a search over many layouts."""
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
    """Return the run that the engine's count is of; None where the engine does not build it, or it is not counted."""
    software = setup.software
    layout = setup.layout
    offload = "optimizer" if setup.offload_optimizer else "none"
    if not software.counted or setup.matmul not in (setup.compute, "fp8"):
        return None
    if software.fused_kernels and not fuses_countably(setup.model, setup.lora, setup.matmul, setup.compute):
        return None
    if recompute not in ("none", "selective", "full") or not is_counted(setup.model, offload):
        return None
    # The engine spreads experts within a replica, and no model along an axis that its family refuses.
    if any(getattr(layout, axis) > 1 for axis in MESH_AXES if axis in setup.model.record.refuses):
        return None
    if layout.etp > 1 or layout.expert_ranks % layout.ep:
        return None
    micro_batches = setup.grad_accum
    if layout.pp > 1 and layout.pipeline_schedule != "gpipe":
        # A full pipeline repeats itself: twice as many micro-batches as stages hold as much as more, within 0.03%.
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
    )


# The probability that a layout fits, by the error of the memory model, and the step time to expect with that in it.
#
# On published runs the measured peak over the predicted one is about log-normal (`trainspec backtest`, 135 measured
# peaks of 3 sources; tests/planner/validation/test_fit_probability.py counts it again). A run of yet another source
# errs by its source's mean and by its own deviation from that: ln(measured / predicted) has the mean of the sources'
# means, m, and the variance of a run within its source plus that between sources, s^2. So a predicted peak M fits a
# limit L with
#
#     P = Phi((ln(L / M) - m) / s)
#
# A layout that does not fit costs a start in vain, and goes on with less memory: with recomputation, which is a
# forward more, or another layout that is about as much slower. The expected step is
#
#     E = t + (1 - P) (t / 3 + start / steps)


LOG_BIAS = -0.038
"""m: predictions are 4% too high in the mean, since the model keeps a reserve."""
LOG_DEVIATION = 0.043
"""s: 0.037 within a source, 0.021 between them."""
RELIEF = 1 / 3
"""The part of a step by which less memory makes it slower: a forward among two of a backward."""
SURELY = 0.999
"""A probability that needs no other layout beside it."""


def fit_probability(peak_bytes: float, limit_bytes: float) -> float:
    """Return the probability that what is predicted to take `peak_bytes` takes no more than `limit_bytes`."""
    deviations = (math.log(limit_bytes / peak_bytes) - LOG_BIAS) / LOG_DEVIATION
    return 0.5 * math.erfc(-deviations / math.sqrt(2))


def expected_step_s(step_s: float, probability: float, start_s: float) -> float:
    """Return the step to expect of a layout that fits with `probability`; `start_s` is a start's time over the steps of
    the run."""
    return step_s + (1 - probability) * (step_s * RELIEF + start_s)
