"""The figures of a candidate, and what is assumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from lab.drawing import slow_after
from lab.made_up import CHIP, CLUSTER

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner import capacity
from trainspec_cli.planner.capacity import (
    advise,
    assumptions,
    choose_candidates,
    largest_micro_batch,
    plan_capacity,
    plan_on_what_divides,
    setup_of,
    software_of,
    template_of,
)
from trainspec_cli.planner.hardware.cluster import describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency, peak_flops_per_s
from trainspec_cli.planner.memory.predict import memory_limit_bytes, predict_memory
from trainspec_cli.planner.search.space import open_layout
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, ReliabilitySpec
from trainspec_cli.recipe.keys.layout import LayoutSpec, Sharding
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, LoraSpec, OptimSpec
from trainspec_cli.recipe.results.plan import Candidate
from trainspec_cli.session.recipe.load import load_for_planning

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
    """32 samples of 2048 tokens per step on 8 devices. Frozen weights have half of the backward."""
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
        (replace(CLUSTER, nic_gbit_per_s=0.0), True, ["no network between nodes: 200 Gbit/s per device"]),
        (replace(CLUSTER, nic_gbit_per_s=0.0, num_nodes=1), True, []),
        (replace(CLUSTER, accelerator=replace(CHIP, matmul_bf16_tflops=0.0)), True, ["no measured matmul rate"]),
        (replace(CLUSTER, accelerator=replace(CHIP, vendor="cpu")), True, ["CPU's rates"]),
    ],
    ids=["all known", "eager", "no network", "one node", "no measured rate", "CPU"],
)
def test_what_was_assumed_is_said(cluster: ClusterSpec, compiled: bool, said: list[str]) -> None:
    mfu, ranked, *others = assumptions(replace(SPEC, cluster=cluster, compile=compiled), describe_fabric(cluster, None))
    assert mfu.startswith("MFU counts") and ranked.startswith("ranked by expected step time")
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
    assert all(part in plan.assumptions[0] for part in ("batch of 32 ", " 3 nodes", "2 are used", "1 are spares"))
    assert plan.assumptions[1:] == plan_capacity(changed).assumptions


def test_of_smaller_counts_of_nodes_the_fastest_is_taken() -> None:
    """40 samples divide over 20 devices of five nodes and 16 of four, and not over 28 of seven."""
    spec = replace(SPEC, cluster=replace(CLUSTER, num_nodes=7), layout=LayoutSpec(), batching=BatchingSpec(40))
    changed, plan = plan_on_what_divides(spec)
    assert (changed.cluster.num_nodes, plan.world_size) == (5, 20)


def test_all_nodes_work_where_they_are_faster_though_the_batch_does_not_divide() -> None:
    """Of 31 samples, a rank has three at most on 12 devices, and four on eight."""
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


# What a candidate was estimated for, and the micro-batches that fit beside its own


SHORT = ["recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=2", "data.seq_len=1024", "batching.micro_batch_size=2"]


def planned(*arguments: str) -> tuple[RunSpec, Candidate]:
    spec, capacity = plan_on_what_divides(load_for_planning([*SHORT, *arguments]).spec)
    assert capacity.best is not None
    return spec, capacity.best


@pytest.mark.parametrize("offload", ["none", "optimizer", "auto"])
def test_the_setup_of_a_candidate_is_the_one_that_it_was_estimated_for(offload: str) -> None:
    spec, candidate = planned(f"offload={offload}")
    setup = setup_of(candidate, spec, None)
    assert estimate_step(setup, efficiency_of(spec.cluster)).total_s == candidate.step_time_s
    assert setup.offload_optimizer == (offload == "optimizer")


def test_the_largest_micro_batch_is_what_fits_up_to_twice_the_planned_one() -> None:
    spec, candidate = planned("layout.zero_stage=3", "layout.dp_shard=16")
    setup = setup_of(candidate, spec, None)
    assert largest_micro_batch(candidate, setup, AUTO) == 4
    tight = replace(candidate, memory_limit_bytes=candidate.peak_memory_bytes)
    assert largest_micro_batch(tight, setup, AUTO) == 2


def test_a_micro_batch_that_is_asked_for_is_given_as_far_as_it_fits() -> None:
    spec, candidate = planned("layout.zero_stage=3", "layout.dp_shard=16")
    setup = setup_of(candidate, spec, None)
    assert [largest_micro_batch(candidate, setup, wanted) for wanted in (2, 3, 6)] == [2, 3, 6]
    fits = largest_micro_batch(candidate, setup, 4096)
    assert 6 < fits < 4096
    most_bytes = [
        max(stage.total_bytes for stage in predict_memory(replace(setup, micro_batch_size=size), candidate.recompute))
        for size in (fits, fits + 1)
    ]
    assert most_bytes[0] <= candidate.memory_limit_bytes < most_bytes[1]


# What is said where nothing fits: each line is an override that makes a plan, typed as it stands


FOUR_4090 = ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=1", "cluster.devices_per_node=4")


FOUR_4090 += ("cluster.accelerator=rtx_4090",)


NF4 = ["lora.rank=16", "lora.base=nf4"]
PINNED = ("layout.tp=1", "layout.pp=1", "layout.cp=1", "recompute=none")


def advice_for(arguments: Sequence[str]) -> list[str]:
    spec = load_for_planning(arguments).spec
    assert plan_capacity(spec).best is None
    return list(advise(spec))


def typed(line: str) -> list[str]:
    return line.partition(" fits at ")[0].split()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    slow_after(1, [
        (FOUR_4090, [["offload=optimizer"], ["lora.rank=16"], ["cluster.num_nodes=2", "layout=auto"]]),
        (
            ("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=1", *PINNED, "batching.micro_batch_size=2"),
            [["recompute=full"], ["layout=auto", "recompute=auto"]],
        ),
        pytest.param(
            ("recipe=llama3_405b", "cluster=h100", "cluster.num_nodes=1"),
            [NF4, ["cluster.num_nodes=16"]],
            marks=pytest.mark.slow,
        ),
    ]),
    ids=["four 4090s", "a pinned layout", "far too large"],
)  # fmt: skip
def test_every_line_makes_the_run_fit_as_it_is_typed(arguments: tuple[str, ...], expected: list[list[str]]) -> None:
    lines = advice_for(arguments)
    for wanted in expected:
        assert any(typed(line)[: len(wanted)] == wanted for line in lines), (wanted, lines)
    for line in lines:
        keys = {word.partition("=")[0] for word in typed(line)}
        freed = [word for word in arguments if not ("layout" in keys and word.startswith("layout."))]
        kept = [word for word in freed if word.partition("=")[0] not in keys]
        assert plan_capacity(load_for_planning([*kept, *typed(line)]).spec).best is not None, line


@pytest.mark.slow
def test_two_changes_are_named_where_neither_suffices() -> None:
    lines = advice_for((*FOUR_4090, *PINNED, "layout.dp_shard=1"))
    assert ["layout=auto", "recompute=auto", "lora.rank=16"] in map(typed, lines)
    assert ["layout=auto", "recompute=auto"] not in map(typed, lines)
    assert ["lora.rank=16"] not in map(typed, lines)


def test_adapters_are_not_suggested_to_what_takes_none() -> None:
    """Nor what the recipe asks for anyway."""
    arguments = ("recipe=mamba2_3b", "cluster=h100", "cluster.accelerator=rtx_4090", "cluster.num_nodes=1")
    arguments += ("cluster.devices_per_node=1",)
    assert not any("lora" in line for line in advice_for(arguments))
    offloaded = advice_for((*FOUR_4090, "offload=optimizer", *PINNED, "layout.dp_shard=1"))
    assert not any("offload" in line for line in offloaded)


def test_adapters_say_what_they_begin_with() -> None:
    (line,) = (line for line in advice_for(FOUR_4090) if line.startswith("lora"))
    assert line.endswith("training adapters on an `init.from` checkpoint, not all weights")


@pytest.mark.slow
def test_a_base_in_four_bits_is_suggested_to_adapters_that_do_not_fit() -> None:
    lines = advice_for(("recipe=llama3_405b", "cluster=h100", "cluster.num_nodes=1", "lora.rank=8"))
    (line,) = (line for line in lines if "lora" in line)
    assert typed(line)[-1] == "lora.base=nf4" and "training adapters" not in line


def test_open_axes_keep_what_is_no_axis() -> None:
    spec = load_for_planning(["recipe=llama3_8b", "layout.etp=2", "layout.sequence_parallel=false"]).spec
    opened = open_layout(spec)
    axes = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "zero_stage", "pipeline_schedule", "virtual_stages")
    assert [getattr(opened, axis) for axis in axes] == [AUTO] * 9
    assert isinstance(opened, LayoutSpec) and (opened.etp, opened.sequence_parallel) == (2, False)


def test_layouts_are_counted_until_estimates_leave_no_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second's step is longer once it is counted, and the third's estimate is within the error of estimates."""
    counts = {1.0: 1.0, 1.005: 1.3, 1.01: 0.995, 1.1: 1.1, 1.2: 1.2}
    seen: list[float] = []

    def count(search: object, found: Any, *_: object) -> Any:
        seen.append(found.expected_s)
        return SimpleNamespace(fits=True, expected_step_s=counts[found.expected_s])

    search: Any = SimpleNamespace(best=lambda: (SimpleNamespace(expected_s=one) for one in counts), refused=Counter())
    monkeypatch.setattr(capacity, "counted", count)
    monkeypatch.setattr(capacity, "choose_simplest", lambda search, fastest, *_: fastest)
    for shown, counted in ((1, 3), (2, 3), (3, 4)):
        seen.clear()
        chosen = choose_candidates(search, SPEC, Efficiency(), shown)
        assert len(seen) == counted
        assert [one.expected_step_s for one in chosen] == sorted(counts[one] for one in seen)[:shown]
