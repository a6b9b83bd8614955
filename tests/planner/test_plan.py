"""Every `auto` resolved for the machine at hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.errors import RecipeError
from trainspec_cli.planner.plan import plan
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import ClusterSpec, Machine
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.recipe.optim import OptimSpec
from trainspec_cli.spec.recipe.run import PrecisionSpec, RunSpec, TrainSection

SPEC = RunSpec(
    model=DecoderModel(2, 64, 4, 2, 16, 160, 512),
    data=DataSpec(seq_len=1024, source="python_stdlib"),
    optim=OptimSpec(lr=0.1),
    batching=BatchingSpec(global_batch_size=48),
    train=TrainSection(max_steps=10),
)
LAPTOP = Machine("laptop", cpu_cores=2, memory_bytes=2**34)
H200S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H200",) * 4, gpu_memory_bytes=141 * 10**9, bf16=True)


def test_a_laptop_gets_two_processes_and_fp32():
    got = plan(SPEC, LAPTOP)
    assert (got.device, got.world_size, got.compute) == ("cpu", 2, "fp32")
    assert (got.layout.dp_replicate, got.layout.dp_shard) == (2, 1)
    assert (got.peak_flops, got.peak_source) == (None, ""), "a CPU's rate is measured by the workers"


def test_gpus_are_all_taken_and_their_peak_is_the_data_sheets():
    got = plan(SPEC, H200S)
    assert (got.device, got.world_size, got.compute) == ("cuda", 4, "bf16")
    assert got.peak_flops == 989e12
    assert got.peak_source == "dense bf16 peak of H200-SXM-141GB by its data sheet"


@pytest.mark.parametrize(("compute", "gpu"), [("fp32", "NVIDIA H200"), ("bf16", "Unheard-of 9000")])
def test_a_peak_that_no_sheet_gives_is_left_to_be_measured(compute, gpu):
    machine = replace(H200S, gpu_names=(gpu,))
    assert plan(replace(SPEC, precision=PrecisionSpec(compute=compute)), machine).peak_flops is None


def test_the_micro_batch_divides_a_ranks_share_and_keeps_to_the_token_limit():
    got = plan(SPEC, LAPTOP)
    assert (got.micro_batch_size, got.grad_accum_steps) == (8, 3)
    pinned = replace(SPEC, batching=BatchingSpec(48, micro_batch_size=2))
    assert (plan(pinned, LAPTOP).micro_batch_size, plan(pinned, LAPTOP).grad_accum_steps) == (2, 12)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (LayoutSpec(dp_replicate="auto", dp_shard=2), (2, 2)),
        (LayoutSpec(dp_replicate=1, dp_shard="auto"), (1, 4)),
        (LayoutSpec(dp_replicate="auto", dp_shard="auto", tp="auto", pp="auto"), (4, 1)),
    ],
)
def test_an_open_axis_takes_what_the_others_leave(layout, expected):
    got = plan(replace(SPEC, layout=layout), H200S).layout
    assert (got.dp_replicate, got.dp_shard) == expected


def test_axes_that_do_not_multiply_to_the_world_are_refused():
    with pytest.raises(RecipeError, match=r"takes 2 processes, the cluster has 4"):
        plan(replace(SPEC, layout=LayoutSpec(dp_replicate=2, dp_shard=1)), H200S)


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do():
    cluster = ClusterSpec(devices_per_node=5, device="cpu")
    with pytest.raises(RecipeError, match=r"48 does not divide by 5") as caught:
        plan(replace(SPEC, cluster=cluster), LAPTOP)
    assert caught.value.problems[0].hint == "near sizes that divide 48: 3, 4, 6"
