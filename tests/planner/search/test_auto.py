"""`layout=auto` on GPUs that were found: the fastest layout that fits and that the engine runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.search.auto import best_candidate, is_run, is_searched
from trainspec_cli.planner.this_machine import device_limit_bytes, predict_device
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import RunSpec, TrainSection
from trainspec_cli.spec.rules.engine import check_built

H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, gpu_memory_bytes=80 * 2**30, bf16=True)
OPEN = LayoutSpec(cp=AUTO, tp=AUTO, pp=AUTO, ep=AUTO, zero_stage=AUTO, pipeline_schedule=AUTO, virtual_stages=AUTO)


def spec_of(layers: int, layout: LayoutSpec = OPEN) -> RunSpec:
    return RunSpec(
        model=DecoderModel(layers, 4096, 32, 8, 128, 14336, 128256),
        data=DataSpec(seq_len=4096, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=64),
        train=TrainSection(max_steps=1),
        layout=layout,
        recompute=AUTO,
    )


@pytest.mark.parametrize("layers", [4, 32])
def test_the_fastest_that_fits_is_run(layers: int) -> None:
    planned = plan(spec_of(layers), H100S)
    best = best_candidate(spec_of(layers), H100S, 8)
    assert best is not None
    assert (planned.layout, planned.micro_batch_size) == (best.layout, best.micro_batch_size)
    assert planned.layout.world_size == 8
    assert predict_device(planned, H100S).needed_bytes <= device_limit_bytes(planned, H100S)


def test_a_layout_that_the_engine_does_not_build_is_passed_over() -> None:
    best = best_candidate(spec_of(32), H100S, 8)
    assert best is not None
    assert is_run(best, spec_of(32))
    uneven_heads = replace(best, layout=replace(best.layout, tp=16))
    assert not is_run(uneven_heads, spec_of(32)), "8 key-value heads do not divide by 16"


def test_pinned_layouts_and_unknown_chips_are_not_searched() -> None:
    pinned = LayoutSpec(dp_replicate=1, dp_shard=8)
    assert is_searched(spec_of(4), H100S, "cuda")
    assert not is_searched(spec_of(4), H100S, "cpu")
    assert not is_searched(spec_of(4, pinned), H100S, "cuda")
    assert not is_searched(spec_of(4), replace(H100S, gpu_names=("Abacus-9000",) * 8), "cuda")
    assert check_built(spec_of(4, pinned)) == []
