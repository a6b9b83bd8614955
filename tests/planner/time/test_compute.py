"""What a layer's work takes, where sizes and software decide it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import Fabric, axis_groups
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, find_model
from trainspec_cli.planner.setup import Setup, Software
from trainspec_cli.planner.time.step import (
    LayersPart,
    Rates,
    alignment,
    attention_s,
    estimate_step,
    gemm_s,
    micro_batch,
    part_of,
    rates_of,
)
from trainspec_cli.planner.workload import Gemm, Work, layer_kinds
from trainspec_cli.recipe.keys.layout import Layout

EFF = Efficiency()
CHIP = find_accelerator("H100-SXM-80GB")
RATES = rates_of(CHIP, "bf16", "bf16", EFF)


def setup_of(software: Software, layout: Layout | None = None, accum: int = 8, name: str = "llama3-8b") -> Setup:
    layout = layout or Layout(dp_shard=8, zero_stage=1)
    fabric = Fabric(CHIP, layout.world_size, 8, 8, 450.0, 400.0)
    return Setup(find_model(name), layout, fabric, 4096, 1.0, accum, software=software)


GROUPS = axis_groups(Layout(), setup_of(Software()).fabric, EFF)


def layer_time(work: Work, setup: Setup, rates: Rates, eff: Efficiency) -> LayersPart:
    """Time work that exchanges nothing."""
    return part_of(work, setup, rates, GROUPS, eff)


def step_s(software: Software, layout: Layout | None = None, accum: int = 8) -> float:
    return estimate_step(setup_of(software, layout, accum), EFF).total_s


def test_small_products_leave_more_of_the_last_wave_idle() -> None:
    """The same arithmetic in four times as many products of a quarter of the rows is slower; more so with a long k."""
    whole, quarter = gemm_s(Gemm(8192, 4608, 12288), RATES, EFF)[0], gemm_s(Gemm(2048, 4608, 12288), RATES, EFF)[0]
    assert 1.05 < 4 * quarter / whole < 1.5
    short = gemm_s(Gemm(2048, 4608, 1536), RATES, EFF)[0]
    assert quarter < 8 * short < 1.5 * quarter
    assert gemm_s(Gemm(2048, 4608, 12288), RATES, replace(EFF, tail_waves=0.0))[0] < quarter


def test_attention_kernels_older_than_the_chip_are_slower_by_generation() -> None:
    times = [step_s(Software(attention_generation=number)) for number in (1, 2, 3, 9)]
    assert times[0] > times[1] > times[2] == times[3]


def test_element_wise_kernels_gain_less_than_the_memory_does() -> None:
    """Their loads and stores pass the same multiprocessors, however fast the memory behind them."""
    faster = replace(CHIP, memory_tb_per_s=2 * CHIP.memory_tb_per_s)
    rates = [rates_of(chip, "bf16", "bf16", EFF) for chip in (CHIP, faster)]
    work = Work(pass_bytes=1e9)
    slow, quick = (layer_time(work, setup_of(Software()), rate, EFF).memory_f for rate in rates)
    assert 1.2 < slow / quick < 1.9
    described = replace(CHIP, load_store_tb_per_s=0.0)
    assert rates_of(described, "bf16", "bf16", EFF).load_store == pytest.approx(rates[0].load_store, rel=0.02)


def test_a_two_stage_detector_waits_for_its_proposals_whatever_the_batch() -> None:
    fabric = Fabric(CHIP, 8, 8, 8, 450.0, 400.0)
    setup = Setup(find_model("maskrcnn_resnet50"), Layout(dp_replicate=8), fabric, 1, 1.0, 1)
    parts = [work for _, works in layer_kinds(setup.model, 1.0, 1, setup.layout) for work in works]
    waits = sum(work.serial_kernels for work in parts)
    few, many = (layer_time(Work(serial_kernels=waits), replace(setup, micro_batch_size=n), RATES, EFF) for n in (1, 9))
    assert few.forward == many.forward == waits * EFF.kernel_s > 0
    assert not any(
        work.serial_kernels
        for _, works in layer_kinds(find_model("retinanet_resnext50"), 1.0, 1, setup.layout)
        for work in works
    )


def test_gradients_added_apart_cost_only_where_micro_batches_accumulate() -> None:
    fused, apart = Software(), Software(fused_accumulation=False)
    assert step_s(apart) > step_s(fused)
    assert step_s(apart, accum=1) == step_s(fused, accum=1)
    sharded = Layout(dp_shard=8, zero_stage=3)
    assert step_s(apart, sharded) == step_s(fused, sharded)


def test_whole_activations_cross_stages_where_ranks_do_not_split_them() -> None:
    layout = Layout(tp=8, pp=2, sequence_parallel=False)
    whole, parts = Software(split_sends=False), Software()
    pipes = [estimate_step(setup_of(software, layout), EFF).pp_comm_s for software in (whole, parts)]
    assert pipes[0] > 4 * pipes[1]
    split = replace(layout, sequence_parallel=True)
    assert step_s(whole, split) == step_s(parts, split)


def test_frozen_work_has_no_backward() -> None:
    work = Work(gemms=(Gemm(4096, 4096, 4096),), pass_bytes=1e9)
    plain, frozen = (layer_time(item, setup_of(Software()), RATES, EFF) for item in (work, replace(work, frozen=True)))
    assert frozen.backward == 0 < plain.backward
    assert frozen.forward == plain.forward


def test_experts_of_eight_bits_are_launched_apart() -> None:
    kernels = []
    for matmul in ("bf16", "fp8", "mxfp8"):
        setup = replace(setup_of(Software(), name="qwen3-30b-a3b"), matmul=matmul)
        (_, works), *_ = layer_kinds(setup.model, setup.tokens, setup.seq_len, setup.layout)
        kernels.append(sum(layer_time(work, setup, RATES, EFF).kernels for work in works))
    assert kernels[0] < kernels[1] < kernels[2]


def test_zero_3_gathers_and_scatters_for_every_micro_batch_and_zero_1_once_a_step() -> None:
    software = Software(overlap_dp=False)
    for stage, growth in ((3, 8), (1, 1)):
        layout = Layout(dp_shard=8, zero_stage=stage)  # type: ignore[arg-type]
        one, eight = (estimate_step(setup_of(software, layout, accum), EFF).dp_comm_s for accum in (1, 8))
        assert eight == pytest.approx(growth * one)
        assert one > 0


def test_a_tensor_parallel_step_exchanges_forward_and_backward() -> None:
    setup = setup_of(Software(), Layout(tp=8), accum=3)
    layer = micro_batch(setup, axis_groups(setup.layout, setup.fabric, EFF), EFF).layer
    assert layer.tp > 0
    assert estimate_step(setup, EFF).tp_comm_s >= 3 * 2 * setup.model.num_layers * layer.tp


# Round rates, so that times can be worked out on paper

ROUND = Rates(
    matmul=200.0,
    plain_matmul=100.0,
    memory=10.0,
    exponentials=5.0,
    load_store=20.0,
    cache_bytes=100.0,
    element_bytes=2.0,
    wide_element_bytes=1.0,
    generation=3,
)
ROUND_EFF = Efficiency(
    gemm_memory=0.5,
    kernel_s=1.0,
    tail_waves=1 / (128 * 256 * 128),
    misalignment=0.25,
    attention_forward=0.8,
    attention_backward=0.4,
    attention_older=0.5,
    exponentials=0.5,
    cache_reuse=0.5,
    elementwise=2.0,
    elementwise_eager=3.0,
    issue=1.0,
    cast_fp8=0.5,
    expert_imbalance=0.25,
    experts_ungrouped=1.5,
    conv=0.5,
    conv_memory=4.0,
)
PRODUCT = Gemm(2, 64, 32)
"""A dimension of 64 fills the tiles; one of 32 falls short by a halving: a loss of 0.25 x (0 + 1) / 2."""


@pytest.mark.parametrize(
    ("size", "halvings"), [(64, 0), (128, 0), (192, 0), (32, 1), (96, 1), (48, 2), (1, 6), (0, 6), (2.5, 6)]
)
def test_dimensions_fall_short_of_tiles_by_halvings(size: float, halvings: int) -> None:
    assert alignment(size) == halvings


def test_a_product_takes_its_arithmetic_half_its_traffic_its_tail_and_a_launch() -> None:
    wide = gemm_s(replace(PRODUCT, count=3), ROUND, ROUND_EFF)
    assert wide == pytest.approx((
        3 * (8192 / 200 * 1.125 + 0.5 * (64 + 2048 + 2 * 128) / 10) + 64 / 200 * 1.125 + 1,
        3 * (8192 / 200 * 1.125 + 0.5 * (128 + 2048 + 2 * 64) / 10) + 128 / 200 * 1.125 + 1,
        3 * (8192 / 200 * 1.125 + 0.5 * (64 + 128 + 2 * 2048) / 10) + 4 / 200 * 1.125 + 1,
    ))  # fmt: skip
    plain = gemm_s(replace(PRODUCT, wide=False), ROUND, ROUND_EFF)
    assert plain[0] == pytest.approx(8192 / 100 * 1.125 + 0.5 * 2 * (64 + 2048 + 128) / 10 + 64 / 100 * 1.125 + 1)


def test_a_convolution_multiplies_or_loads_its_patches_whichever_takes_longer() -> None:
    assert gemm_s(Gemm(10, 64, 32, 4), ROUND, ROUND_EFF, convolves=True) == pytest.approx(
        (163_840 / 50 * 1.125 + 1,) * 3
    )
    assert gemm_s(Gemm(10, 1, 32, 4), ROUND, ROUND_EFF, convolves=True) == pytest.approx(
        (2 * 10 * 32 * 4 / 20 + 1,) * 3
    )


@pytest.mark.parametrize(
    ("software", "forward", "backward"),
    [
        (Software(), 1000 / 80 + 5, 2500 / 40 + 5),
        (Software(attention_generation=2), 1000 / 40 + 5, 2500 / 20 + 5),
        (Software(attention_generation=1), 1000 / 20 + 5, 2500 / 10 + 5),
        (Software(fused_attention=False), 2000 / 70 + 6 * 7, 4000 / 70 + 8 * 7),
    ],
    ids=["of its chip", "a generation older", "two generations older", "in plain products"],
)
def test_attention_takes_its_products_and_its_exponentials(software: Software, forward: float, backward: float) -> None:
    work = Work(attention_flops=1000, attention_head_dim=5, score_bytes=70)
    assert attention_s(work, setup_of(software), ROUND, ROUND_EFF) == pytest.approx((forward, backward))
    assert attention_s(Work(score_bytes=70), setup_of(software), ROUND, ROUND_EFF) == (0, 0)


PASSES = Work(pass_bytes=400, loss_bytes=300, eager_bytes=60, tensor_bytes=300, kernels=7)
"""A quarter of the tensors fits the cache, which saves half of it."""


@pytest.mark.parametrize(
    ("work", "software", "forward", "backward"),
    [
        (PASSES, Software(), 2 * 0.875 * 70 + 35, 2),
        (PASSES, Software(fused_loss=True), 2 * 0.875 * 50 + 25, 2),
        (PASSES, Software(fused_kernels=False), 3 * 0.875 * 72 + 36, 2),
        (replace(PASSES, convolves=True), Software(), 4 * 0.875 * 70 + 35, 2),
        (replace(PASSES, leaf=True), Software(), 2 * 0.875 * 70 + 35, 1),
        (replace(PASSES, frozen=True), Software(), 2 * 0.875 * 70 + 35, 0),
    ],
    ids=["fused", "fused loss", "eager", "convolution", "first", "frozen"],
)
def test_passes_over_memory(work: Work, software: Software, forward: float, backward: int) -> None:
    found = layer_time(work, setup_of(software), ROUND, ROUND_EFF)
    assert (found.memory_f, found.memory_b) == pytest.approx((forward, backward * forward))
    waiting = layer_time(replace(work, serial_kernels=2), setup_of(software), ROUND, ROUND_EFF)
    assert (waiting.memory_f, waiting.memory_b) == pytest.approx((forward + 2, backward * forward))
    assert found.kernels == 7
    wider = layer_time(work, setup_of(software), replace(ROUND, element_bytes=4.0), ROUND_EFF)
    assert wider.memory_f == pytest.approx(2 * forward)


def test_products_of_a_layer_forward_and_backward() -> None:
    """Weights' gradients are added up apart: read in 2 bytes, and added to 4 that are read and written."""
    ahead, inputs, weights = gemm_s(PRODUCT, ROUND, ROUND_EFF)
    work = Work(gemms=(PRODUCT, PRODUCT), experts=16)
    setup = setup_of(Software(), accum=1)
    whole = layer_time(work, setup, ROUND, ROUND_EFF)
    assert (whole.matmul_f, whole.matmul_b) == pytest.approx((2 * ahead, 2 * (inputs + weights)))
    assert whole.experts == 16
    leaf = layer_time(replace(work, leaf=True), setup, ROUND, ROUND_EFF)
    assert leaf.matmul_b == pytest.approx(2 * weights)
    adapters = layer_time(work, replace(setup, trainable=0.01), ROUND, ROUND_EFF)
    assert adapters.matmul_b == pytest.approx(2 * inputs)
    uneven = layer_time(replace(work, expert_params=1), setup, ROUND, ROUND_EFF)
    assert (uneven.matmul_f, uneven.matmul_b) == pytest.approx((2.5 * ahead, 2.5 * (inputs + weights)))
    ungrouped = layer_time(work, replace(setup, software=Software(grouped_experts=False)), ROUND, ROUND_EFF)
    assert (ungrouped.matmul_f, ungrouped.matmul_b) == pytest.approx((3 * ahead, 3 * (inputs + weights)))
    added = layer_time(work, setup_of(Software(fused_accumulation=False)), ROUND, ROUND_EFF)
    assert added.matmul_b - whole.matmul_b == pytest.approx(10 * 2 * 2048 / 10)
    fused = layer_time(work, setup_of(Software(grad_bytes=2.0)), ROUND, ROUND_EFF)
    assert fused.matmul_b - whole.matmul_b == pytest.approx(0.5 * 2 * 2 * 2 * 2048 / 10)


@pytest.mark.parametrize(("experts", "slowness"), [(0, 1), (1, 1), (2, 1.125), (4, 1.25), (16, 1.5)])
def test_experts_one_after_the_other_are_slower_by_their_number(experts: int, slowness: float) -> None:
    grouped, apart = (setup_of(Software(grouped_experts=together)) for together in (True, False))
    times = [layer_time(Work(gemms=(PRODUCT,), experts=experts), one, ROUND, ROUND_EFF) for one in (grouped, apart)]
    assert times[1].matmul_f / times[0].matmul_f == pytest.approx(slowness)


@pytest.mark.parametrize(("matmul", "kernels"), [("bf16", 0), ("fp8", 3), ("mxfp8", 6), ("nvfp4", 8)])
def test_inputs_of_eight_bits_are_cast_twice_and_weights_once_a_step(matmul: str, kernels: int) -> None:
    work = Work(gemms=(PRODUCT, replace(PRODUCT, wide=False)), kernels=10)
    found = layer_time(work, replace(setup_of(Software(), accum=4), matmul=matmul), ROUND, ROUND_EFF)
    cast = 0.5 * (2 * 32 + 32 * 64 / 4) * (2 + 2 * 1) / 10 if kernels else 0
    assert (found.memory_f, found.memory_b, found.kernels) == (pytest.approx(cast), pytest.approx(cast), 10 + kernels)


@pytest.mark.parametrize(
    ("matmul", "compute", "element", "wide"),
    [("bf16", "bf16", 2, 2), ("fp32", "fp32", 4, 2), ("tf32", "tf32", 4, 2), ("fp8", "bf16", 2, 1),
     ("mxfp8", "bf16", 2, 1.03), ("nvfp4", "bf16", 2, 0.56)],
)  # fmt: skip
def test_formats_have_their_widths(matmul: str, compute: str, element: float, wide: float) -> None:
    rates = rates_of(replace(CHIP, cache_mb=50.0), matmul, compute, EFF)
    assert (rates.element_bytes, rates.wide_element_bytes, rates.cache_bytes) == (element, wide, 50e6)


def test_tensor_cores_have_a_generation_by_what_they_multiply() -> None:
    plain = replace(CHIP, matmul_bf16_tflops=0.0, fp8_tflops=0.0, fp4_tflops=0.0)
    old = replace(plain, bf16_tflops=0.0, fp16_tflops=100.0)
    chips = [old] + [
        replace(plain, fp8_tflops=fp8, fp4_tflops=fp4) for fp8, fp4 in ((0.0, 0.0), (1.0, 0.0), (1.0, 2.0))
    ]
    assert [rates_of(chip, "bf16", "bf16", EFF).generation for chip in chips] == [1, 2, 3, 4]
