"""What a step calls, and at which shapes, in families and layouts."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from trainspec_cli.engine.tools.kernels import calls_of
from trainspec_cli.planner.hardware.rates import models
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.plan import Plan

LLAMA = models()["llama_tiny"]  # 2 layers of 4 heads of 16, 2 of keys; hidden 64, feed-forward 160, 512 words
UNTIED = replace(LLAMA, tied_embeddings=False)


def plan_of(model, layout: Layout | None = None, recompute="none", **data) -> Plan:
    layout = layout or Layout()
    spec = RunSpec(
        model=model,
        data=DataSpec(seq_len=32, source="python_stdlib", **data),
        optim=OptimSpec(lr=0.1),
        batching=BatchingSpec(global_batch_size=16),
        train=TrainSection(max_steps=1),
    )
    return Plan(spec, layout, "cpu", 1, layout.world_size, "fp32", 2, 4, recompute, "none", 0, 0.0)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_decoder(recompute) -> None:
    calls = calls_of(plan_of(LLAMA, recompute=recompute), 0)
    assert {op: dict(numbers) for op, numbers in calls.by_op.items()} == {
        "attention": {((2, 4, 32, 16), (2, 2, 32, 16), (2, 2, 32, 16), None, 0.25): 2},
        "rms_norm": {((2, 32, 64), (64,), 1e-5): 5},
        "swiglu": {((2, 32, 160), (2, 32, 160)): 2},
        "rope": {((2, 32, 4, 16), (32, 16), (32, 16)): 2, ((2, 32, 2, 16), (32, 16), (32, 16)): 2},
        "linear_cross_entropy": {((64, 64), (512, 64), (64,), None): 1},
    }
    assert calls.parameters[(64, 160)] == 2
    assert sum(calls.parameters.values()) == len(list(calls.parameters.elements()))


def test_documents_come_with_a_mask() -> None:
    calls = calls_of(plan_of(LLAMA, document_masks=True), 0)
    assert [call[3] for call in calls.by_op["attention"]] == [(2, 1, 32, 32)]


def test_a_window_is_cut_into_blocks() -> None:
    calls = calls_of(plan_of(replace(LLAMA, sliding_window=8, global_attention_every=0)), 0)
    assert {(call[0], call[3]) for call in calls.by_op["attention"]} == {
        ((2, 4, 8, 16), None),
        ((6, 4, 8, 16), (8, 16)),
    }


def test_experts_and_scans() -> None:
    experts = calls_of(plan_of(models()["moe_tiny"]), 0).by_op
    assert len(experts["grouped_matmul"]) == 2
    scans = calls_of(plan_of(models()["mamba2_tiny"]), 0).by_op
    assert set(scans) == {"rms_norm", "linear_cross_entropy", "ssd_scan"}


def test_tensor_parallel_ranks_have_their_parts() -> None:
    calls = calls_of(plan_of(UNTIED, Layout(tp=2)), 1).by_op
    assert next(iter(calls["attention"]))[:2] == ((2, 2, 32, 16), (2, 1, 32, 16))
    assert list(calls["linear_cross_entropy"]) == [((64, 64), (256, 64), (64,), None)]


def test_stages_of_a_pipeline_have_their_own(forks: ProcessPoolExecutor) -> None:
    """In separate processes: groups of a pipeline cannot be created twice in one."""
    calls = forks.map(calls_of, [plan_of(UNTIED, Layout(pp=2))] * 2, (0, 1))
    first, last = ({op: numbers.total() for op, numbers in of_rank.by_op.items()} for of_rank in calls)
    assert first == {"attention": 1, "rms_norm": 2, "swiglu": 1, "rope": 2}
    assert last == {"attention": 1, "rms_norm": 3, "swiglu": 1, "rope": 2, "linear_cross_entropy": 1}


def test_the_ring_has_its_own_attention() -> None:
    ring = calls_of(plan_of(UNTIED, Layout(cp=2)), 0).by_op
    assert not ring.get("attention")
    ulysses = calls_of(plan_of(UNTIED, Layout(cp=2, context_method="ulysses")), 0).by_op
    assert next(iter(ulysses["attention"]))[0] == (2, 2, 32, 16)


def test_sharded_parameters_are_updated_in_parts() -> None:
    whole, part = (calls_of(plan_of(LLAMA, Layout(dp_shard=size)), 0).parameters for size in (1, 2))
    elements = [sum(count * _size(shape) for shape, count in shapes.items()) for shapes in (whole, part)]
    assert elements[1] == pytest.approx(elements[0] / 2, rel=0.01)


def _size(shape) -> int:
    product = 1
    for side in shape:
        product *= side
    return product
