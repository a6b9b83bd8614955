"""The figures of a candidate, and what is assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lab.made_up import CHIP, CLUSTER

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import assumptions, plan_capacity, plan_on_what_divides, software_of, template_of
from trainspec_cli.planner.hardware.cluster import describe_fabric
from trainspec_cli.planner.hardware.rates import peak_flops_per_s
from trainspec_cli.planner.memory.predict import memory_limit_bytes
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.keys.layout import LayoutSpec, Sharding
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, LoraSpec, OptimSpec

SPEC = RunSpec(
    model=DecoderModel(4, 1024, 8, 8, 128, 4096, 8192),
    data=DataSpec(seq_len=2048, source="tokens"),
    optim=OptimSpec(lr=1e-4),
    batching=BatchingSpec(global_batch_size=32, micro_batch_size=2),
    train=TrainSection(max_steps=10),
    cluster=CLUSTER,
    layout=LayoutSpec(dp_shard=8, dp_replicate=1),
)


@pytest.mark.parametrize(
    ("changed", "sharding", "expected"),
    [
        ({}, "zero3", {"weight_bytes": 4, "master_bytes": 0, "grad_bytes": 4, "reduce_bytes": 4, "moment_bytes": 8}),
        ({}, "replicated", {"weight_bytes": 2, "master_bytes": 4, "fused_kernels": False, "fused_loss": False}),
        ({"compile": True}, "zero1", {"fused_kernels": True, "fused_loss": True}),
        ({"optim": OptimSpec(lr=1.0, name="sgd")}, "zero3", {"moment_bytes": 0}),
        ({"precision": PrecisionSpec(reduce="bf16")}, "zero3", {"grad_bytes": 2, "reduce_bytes": 2}),
    ],
    ids=["sharded", "whole", "compiled", "sgd", "reduced in bf16"],
)
def test_the_engine_as_software(changed: dict[str, Any], sharding: Sharding, expected: dict[str, Any]) -> None:
    software = software_of(replace(SPEC, **changed), sharding)
    assert {key: getattr(software, key) for key in expected} == expected
    assert (software.attention_generation, software.fused_accumulation, software.fused_attention) == (2, False, True)


def test_formats_that_are_left_open_follow_the_chip() -> None:
    fabric = describe_fabric(CLUSTER, None)
    template = template_of(SPEC, fabric)
    assert (template.compute, template.matmul, template.seq_len, template.trainable) == ("bf16", "bf16", 2048, 1)
    old = replace(fabric, chip=replace(fabric.chip, bf16_tflops=0.0, fp16_tflops=100.0))
    assert template_of(SPEC, old).compute == "fp16"
    mixed = template_of(replace(SPEC, precision=PrecisionSpec(compute="bf16", matmul="fp8")), fabric)
    assert (mixed.compute, mixed.matmul) == ("bf16", "fp8")
    adapters = template_of(replace(SPEC, lora=LoraSpec(rank=4)), fabric)
    assert 0 < adapters.trainable < 0.1 and adapters.lora.rank == 4


@pytest.mark.parametrize(
    ("recompute", "lora", "again"),
    [("none", 0, 0.0), ("full", 0, 1 / 3), ("full", 8, 0.5)],
    ids=["kept", "done again", "done again under adapters"],
)
def test_figures_of_a_candidate(recompute: Any, lora: int, again: float) -> None:
    """32 samples of 2048 tokens a step on 8 devices. Frozen weights have half of the backward."""
    plan = plan_capacity(replace(SPEC, recompute=recompute, lora=LoraSpec(rank=lora)))
    best = plan.best
    assert best is not None and plan.world_size == 8
    assert plan.tokens_per_step == 32 * 2048
    assert (best.micro_batch_size, best.grad_accum_steps, best.recompute) == (2, 2, recompute)
    assert best.step_time_s == pytest.approx(best.time.total_s)
    assert best.tokens_per_s == pytest.approx(32 * 2048 / best.step_time_s)
    assert best.tokens_per_s_per_gpu == pytest.approx(best.tokens_per_s / 8)
    assert best.mfu == pytest.approx(best.tokens_per_s_per_gpu * plan.flops_per_token / 500e12)
    assert best.hfu / best.mfu - 1 == pytest.approx(again, rel=0.05)
    assert best.peak_memory_bytes == max(stage.total_bytes for stage in best.memory)
    assert best.memory_limit_bytes == memory_limit_bytes(CHIP) == 0.97 * 80 * 2**30
    assert plan.params == plan.active_params
    assert (plan.considered, len(plan.candidates)) == (1, 1)


@pytest.mark.parametrize(
    ("cluster", "compiled", "said"),
    [
        (CLUSTER, True, []),
        (CLUSTER, False, ["launched one by one"]),
        (replace(CLUSTER, nic_gbit_per_s=0.0), True, ["no network between nodes: 200 Gbit/s a device"]),
        (replace(CLUSTER, nic_gbit_per_s=0.0, num_nodes=1), True, []),
        (replace(CLUSTER, accelerator=replace(CHIP, matmul_bf16_tflops=0.0)), True, ["no measured matmul rate"]),
        (replace(CLUSTER, accelerator=replace(CHIP, vendor="cpu")), True, ["CPU's rates"]),
    ],
    ids=["all known", "eager", "no network", "one node", "no measured rate", "CPU"],
)
def test_what_was_assumed_is_said(cluster: ClusterSpec, compiled: bool, said: list[str]) -> None:
    mfu, ranked, *others = assumptions(replace(SPEC, cluster=cluster, compile=compiled), describe_fabric(cluster, None))
    assert mfu.startswith("MFU counts") and ranked.startswith("ranked by the step to expect")
    assert len(others) == len(said)
    assert all(part in line for part, line in zip(said, others, strict=True))


@pytest.mark.parametrize(
    ("fmt", "tflops"),
    [("bf16", 500), ("fp16", 400), ("tf32", 250), ("fp32", 60), ("fp8", 1000), ("mxfp8", 1000), ("nvfp4", 2000)],
)
def test_the_peak_of_each_format(fmt: str, tflops: float) -> None:
    rates = {
        "fp16_tflops": 400.0,
        "tf32_tflops": 250.0,
        "fp32_tflops": 60.0,
        "fp8_tflops": 1000.0,
        "fp4_tflops": 2000.0,
    }
    assert peak_flops_per_s(replace(CHIP, **rates), fmt) == tflops * 1e12
    assert peak_flops_per_s(CHIP, fmt) == 500e12, "a chip without the format is judged by its bf16"
    assert peak_flops_per_s(replace(CHIP, fp8_tflops=900.0), "nvfp4") == 900e12


@pytest.mark.parametrize(("spares", "standing_by"), [(None, 1), (2, 3)])
def test_nodes_over_which_nothing_divides_stand_by(spares: int | None, standing_by: int) -> None:
    """32 samples divide over 8 devices and not over 12."""
    cluster = replace(CLUSTER, num_nodes=3, reliability=ReliabilitySpec(spare_nodes=spares))
    spec = replace(SPEC, cluster=cluster, layout=LayoutSpec())
    changed, plan = plan_on_what_divides(spec)
    assert (changed.cluster.num_nodes, changed.cluster.reliability.spare_nodes) == (2, standing_by)
    assert (plan.world_size, plan.best is not None) == (8, True)
    assert plan.assumptions[0] == (
        "a batch of 32 divides evenly over no layout of all 3 nodes: 2 work, 1 stand by as spares"
    )
    assert plan.assumptions[1:] == plan_capacity(changed).assumptions


def test_of_smaller_counts_of_nodes_the_fastest_is_taken() -> None:
    """40 samples divide over 20 devices of five nodes and 16 of four, and not over 28 of seven."""
    spec = replace(SPEC, cluster=replace(CLUSTER, num_nodes=7), layout=LayoutSpec(), batching=BatchingSpec(40))
    changed, plan = plan_on_what_divides(spec)
    assert (changed.cluster.num_nodes, plan.world_size) == (5, 20)


def test_all_nodes_work_where_they_are_faster_though_the_batch_does_not_divide() -> None:
    """Of 31 samples a rank has three at most on 12 devices, and four on eight."""
    spec = replace(SPEC, cluster=replace(CLUSTER, num_nodes=3), layout=LayoutSpec(), batching=BatchingSpec(31))
    changed, plan = plan_on_what_divides(spec)
    assert changed is spec and plan == plan_capacity(spec)
    assert plan.best is not None
    assert plan.best.micro_batch_size * plan.best.grad_accum_steps == 3
    assert plan.best.tokens_per_s == pytest.approx(31 * SPEC.data.seq_len / plan.best.step_time_s)


def test_nodes_over_which_the_batch_divides_all_work() -> None:
    spec, plan = plan_on_what_divides(SPEC)
    assert spec is SPEC and plan == plan_capacity(SPEC)
    odd = replace(SPEC, layout=LayoutSpec(tp=3))
    with pytest.raises(RecipeError) as raised:
        plan_on_what_divides(odd)
    assert "layout.tp" in {problem.path for problem in raised.value.problems}
