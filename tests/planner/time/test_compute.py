"""What a layer's work takes, where sizes and software decide it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.catalogue import find_accelerator, find_model
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Fabric, axis_groups
from trainspec_cli.planner.setup import Setup, Software
from trainspec_cli.planner.time.compute import gemm_s, layer_time, rates_of
from trainspec_cli.planner.time.step import estimate_step, mean_layer
from trainspec_cli.planner.workload import layer_kinds
from trainspec_cli.planner.workload.work import Gemm, Work
from trainspec_cli.spec.recipe.layout import Layout

EFF = Efficiency()
CHIP = find_accelerator("H100-SXM-80GB")
RATES = rates_of(CHIP, "bf16", "bf16", EFF)


def setup_of(software: Software, layout: Layout | None = None, accum: int = 8, name: str = "llama3-8b") -> Setup:
    layout = layout or Layout(dp_shard=8, zero_stage=1)
    fabric = Fabric(CHIP, layout.world_size, 8, 8, 450.0, 400.0)
    return Setup(find_model(name), layout, fabric, 4096, 1.0, accum, software=software)


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
    layer = mean_layer(setup, RATES, axis_groups(setup.layout, setup.fabric, EFF), EFF)
    assert layer.comm.tp > 0
    assert estimate_step(setup, EFF).tp_comm_s >= 3 * 2 * setup.model.num_layers * layer.comm.tp
