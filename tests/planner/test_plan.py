"""Every `auto` resolved for the machine at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.balance.batch.batch import count_steps, schedule_batches
from trainspec_cli.balance.batch.division import even_division, take_portion
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.hardware.cluster import axis_groups, efficiency_of
from trainspec_cli.planner.memory.predict import feedback_bytes
from trainspec_cli.planner.plan import choose_micro_batch, in_engine_format, plan, resolve_layout
from trainspec_cli.planner.this_machine import predict_device, setup_of
from trainspec_cli.planner.time.data_parallel import gather_s, scatter_s, sum_s
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, Machine
from trainspec_cli.recipe.keys.kernels import KernelSpec
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import (
    BatchingSpec,
    BatchScheduleSpec,
    CommSpec,
    LayoutChangeSpec,
    LoraSpec,
    OptimSpec,
    SchedulerSpec,
    WireFormats,
)
from trainspec_cli.recipe.results.plan import Plan

SPEC = RunSpec(
    model=DecoderModel(2, 64, 4, 2, 16, 160, 512),
    data=DataSpec(seq_len=1024, source="python_stdlib"),
    optim=OptimSpec(lr=0.1),
    batching=BatchingSpec(global_batch_size=48),
    train=TrainSection(max_steps=10),
)
LAPTOP = Machine("laptop", cpu_cores=2, memory_bytes=2**34)
H200S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H200",) * 4, gpu_memory_bytes=141 * 10**9, bf16=True)


def test_a_laptop_gets_one_process_and_fp32():
    got = plan(SPEC, LAPTOP)
    assert (got.device, got.world_size, got.compute) == ("cpu", 1, "fp32")
    assert (got.peak_flops, got.peak_source) == (None, ""), "a CPU's rate is measured by the workers"


def test_gpus_are_all_taken_and_their_peak_is_the_data_sheets():
    got = plan(SPEC, H200S)
    assert (got.device, got.world_size, got.compute) == ("cuda", 4, "bf16")
    assert got.peak_flops == 989e12
    assert "bf16" in got.peak_source and "H200-SXM-141GB" in got.peak_source and "data sheet" in got.peak_source


@pytest.mark.parametrize(
    ("compute", "gpu"), [("fp32", "NVIDIA H200"), ("bf16", "Unheard-of 9000"), ("bf16", "Tesla V100-SXM2-16GB")]
)
def test_a_peak_that_no_sheet_gives_is_left_to_be_measured(compute, gpu):
    machine = replace(H200S, gpu_names=(gpu,))
    assert plan(replace(SPEC, precision=PrecisionSpec(compute=compute)), machine).peak_flops is None


def scheduled(**schedule: Any) -> RunSpec:
    batching = BatchingSpec(global_batch_size=48, schedule=BatchScheduleSpec(**schedule))
    return replace(SPEC, batching=batching, train=TrainSection(max_steps=1000))


def test_a_plan_counts_the_steps_of_a_batch_that_changes() -> None:
    constant, seesaw = plan(scheduled(), LAPTOP), plan(scheduled(kind="seesaw"), LAPTOP)
    assert (constant.steps, constant.total_steps) == (None, 1000)
    assert seesaw.steps == seesaw.total_steps == count_steps(schedule_batches(seesaw.spec)) < 700


def test_noise_is_measured_between_two_ranks_at_least() -> None:
    spec = scheduled(kind="noise", max_global_batch_size=96)
    assert plan(replace(spec, cluster=ClusterSpec(devices_per_node=2)), LAPTOP).total_steps == 1000
    with pytest.raises(RecipeError, match="there is only"):
        plan(spec, LAPTOP)


def test_the_micro_batch_keeps_to_the_token_limit():
    got = plan(SPEC, LAPTOP)
    assert (got.micro_batch_size, got.grad_accum_steps) == (8, 6)


@pytest.mark.parametrize(
    ("batching", "devices", "sizes"),
    [
        (BatchingSpec(48, micro_batch_size=2), 2, (2, 12)),
        (BatchingSpec(48), 5, (5, 2)),
        (BatchingSpec(48, micro_batch_size=4), 5, (4, 3)),
        (BatchingSpec(7, micro_batch_size=3), 2, (2, 2)),
        (BatchingSpec(7, micro_batch_size=64), 2, (4, 1)),
        (BatchingSpec(7), 3, (3, 1)),
        (BatchingSpec(3), 5, (1, 1)),
        (BatchingSpec(33), 2, (6, 3)),
    ],
    ids=str,
)
def test_any_batch_divides_over_any_number_of_ranks(batching: BatchingSpec, devices: int, sizes: tuple[int, int]):
    """The largest micro-batch and the number of them, of the rank that has most samples."""
    cluster = ClusterSpec(devices_per_node=devices, device="cpu")
    got = plan(replace(SPEC, batching=batching, cluster=cluster), LAPTOP)
    assert (got.micro_batch_size, got.grad_accum_steps) == sizes
    division = even_division(got.layout, got.micro_batch_size, keeps_micro_batches=False)
    ranks = [division.of_rank(rank, 0, batching.global_batch_size) for rank in range(devices)]
    assert (max(max(own.sizes) for own in ranks), len(ranks[0].sizes)) == sizes, "as the engine divides it"


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
    with pytest.raises(RecipeError, match=r" 2 processes, .* has 4"):
        plan(replace(SPEC, layout=LayoutSpec(dp_replicate=2, dp_shard=1)), H200S)


@pytest.mark.parametrize(
    ("per_rank", "seq_len", "layout", "size"),
    [
        (48, 1024, Layout(), 8),
        (64, 2048, Layout(), 4),
        (7, 1024, Layout(), 7),
        (13, 1024, Layout(), 7),
        (48, 10_000, Layout(), 1),
        (64, 256, Layout(pp=2), 8),
        (4, 256, Layout(pp=4), 1),
        (24, 256, Layout(pp=4), 1),
        (32, 256, Layout(pp=2, pipeline_schedule="interleaved"), 4),
        (24, 256, Layout(pp=3, pipeline_schedule="interleaved"), 2),
        (6, 256, Layout(pp=4, pipeline_schedule="interleaved"), 1),
        (10, 256, Layout(pp=2), 1),
        (15, 256, Layout(pp=2), 2),
        (1, 256, Layout(pp=2), 1),
    ],
    ids=str,
)
def test_the_largest_micro_batch_that_fills_the_stages(per_rank: int, seq_len: int, layout: Layout, size: int):
    """At most 8192 tokens, and four micro-batches a stage where the batch has as many."""
    assert choose_micro_batch(per_rank, seq_len, layout) == size


@pytest.mark.parametrize(
    ("wanted", "layout"),
    [
        (LayoutSpec(zero_stage="auto"), Layout(dp_replicate=8, sequence_parallel=False)),
        (LayoutSpec(tp=2, dp_shard=4, zero_stage=1), Layout(dp_shard=4, tp=2, zero_stage=1)),
        (LayoutSpec(dp_replicate=2, cp=2, context_method="ulysses"),
         Layout(dp_replicate=2, dp_shard=2, cp=2, context_method="ulysses", sequence_parallel=False)),
        (LayoutSpec(dp_shard=2, pp=2, stage_layers=(1, 3), pipeline_schedule="auto"),
         Layout(dp_replicate=2, dp_shard=2, pp=2, stage_layers=(1, 3), sequence_parallel=False)),
        (LayoutSpec(dp_shard=4, pp=2, pipeline_schedule="interleaved", virtual_stages="auto"),
         Layout(dp_shard=4, pp=2, pipeline_schedule="interleaved", virtual_stages=2, sequence_parallel=False)),
        (LayoutSpec(dp_shard=4, pp=2, pipeline_schedule="zbv", virtual_stages="auto"),
         Layout(dp_shard=4, pp=2, pipeline_schedule="zbv", sequence_parallel=False)),
        (LayoutSpec(dp_shard=4, tp=2, ep=4, etp=2, sequence_parallel=False),
         Layout(dp_shard=4, tp=2, ep=4, etp=2, sequence_parallel=False)),
        (LayoutSpec(dp_shard=4, pp=2, pipeline_schedule="interleaved", virtual_stages=3),
         Layout(dp_shard=4, pp=2, pipeline_schedule="interleaved", virtual_stages=3, sequence_parallel=False)),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_of_eight_processes(wanted: LayoutSpec, layout: Layout):
    assert resolve_layout(wanted, 8) == layout


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (LayoutSpec(tp=3), r"8 .* by 3 \(cp x tp x pp\)"),
        (LayoutSpec(dp_shard=3), r"8 .* by 3 \(dp_shard\)"),
        (LayoutSpec(dp_replicate=3), r"8 .* by 3 \(dp_replicate\)"),
        (LayoutSpec(dp_replicate=2, dp_shard=2), r" 4 processes, .* has 8"),
    ],
    ids=["axes", "shards", "replicas", "product"],
)
def test_layouts_that_do_not_divide(layout: LayoutSpec, says: str):
    with pytest.raises(RecipeError, match=says):
        resolve_layout(layout, 8)


def test_a_size_that_does_not_divide_is_refused_with_sizes_near_it_that_do():
    with pytest.raises(RecipeError) as caught:
        resolve_layout(LayoutSpec(tp=5), 48)
    assert caught.value.problems[0].hint.endswith("divide 48: 3, 4, 6")


@pytest.mark.parametrize(
    ("resilience", "replicas", "groups", "layout"),
    [
        (ResilienceSpec(), 4, 1, Layout(dp_replicate=4, sequence_parallel=False)),
        (ResilienceSpec(mode="elastic"), 4, 4, Layout(sequence_parallel=False)),
        (ResilienceSpec(mode="elastic"), "auto", 2, Layout(dp_replicate=2, sequence_parallel=False)),
        (ResilienceSpec(mode="elastic", replica_groups=2), 2, 2, Layout(dp_replicate=2, sequence_parallel=False)),
        (ResilienceSpec(mode="elastic", replica_groups=4), "auto", 4, Layout(sequence_parallel=False)),
    ],
    ids=["one group", "replicas are groups", "two", "replicas in groups", "four"],
)
def test_replica_groups_have_a_layout_each(resilience: ResilienceSpec, replicas: Any, groups: int, layout: Layout):
    cluster = ClusterSpec(devices_per_node=4, device="cpu")
    spec = replace(SPEC, cluster=cluster, resilience=resilience, layout=LayoutSpec(dp_replicate=replicas))
    got = plan(spec, LAPTOP)
    assert (got.replica_groups, got.layout) == (groups, layout)
    assert got.micro_batch_size * got.grad_accum_steps == 48 // 4, "all groups share the batch"


@pytest.mark.parametrize(
    ("samples", "groups", "devices", "sizes"), [(7, 2, 4, (2, 1)), (10, 3, 6, (2, 1)), (2, 3, 3, (1, 1))]
)
def test_any_batch_divides_over_any_number_of_groups(samples: int, groups: int, devices: int, sizes: tuple[int, int]):
    """The plan is of the rank that has most samples, over all groups."""
    batching, resilience = BatchingSpec(samples), ResilienceSpec(mode="elastic", replica_groups=groups)
    cluster = ClusterSpec(devices_per_node=devices, device="cpu")
    got = plan(replace(SPEC, batching=batching, cluster=cluster, resilience=resilience), LAPTOP)
    assert (got.micro_batch_size, got.grad_accum_steps) == sizes
    portion = take_portion(batching, samples, (1.0,) * groups, groups, 0, 0)
    counts = even_division(got.layout, got.micro_batch_size, keeps_micro_batches=False).counts(portion.samples)
    assert max(counts) == sizes[0] * sizes[1]


def test_groups_that_do_not_divide_the_processes_are_refused():
    cluster = ClusterSpec(devices_per_node=4, device="cpu")
    three = replace(SPEC, cluster=cluster, resilience=ResilienceSpec(mode="elastic", replica_groups=3))
    with pytest.raises(RecipeError, match=r"4 .* by 3 \(groups\)"):
        plan(three, LAPTOP)


@pytest.mark.parametrize(
    ("nodes", "groups", "layout", "processes"),
    [
        (1, 1, LayoutSpec(), 1),
        (1, 3, LayoutSpec(), 3),
        (1, 1, LayoutSpec(tp=2, pp=2), 4),
        (1, 1, LayoutSpec(dp_shard=2), 2),
        (1, 2, LayoutSpec(cp=2), 4),
        (2, 1, LayoutSpec(), 2),
        (2, 1, LayoutSpec(dp_shard=2, pp=2), 4),
    ],
    ids=str,
)
def test_cpus_run_as_few_processes_as_the_layout_and_the_groups_ask_for(
    nodes: int, groups: int, layout: LayoutSpec, processes: int
) -> None:
    resilience = ResilienceSpec(mode="elastic", replica_groups=groups) if groups > 1 else ResilienceSpec()
    spec = replace(SPEC, resilience=resilience, layout=layout, cluster=ClusterSpec(num_nodes=nodes))
    assert plan(spec, replace(LAPTOP, cpu_cores=16)).world_size == processes


@pytest.mark.parametrize(
    ("wanted", "bf16", "compute"),
    [("auto", True, "bf16"), ("auto", False, "fp32"), ("bf16", False, "bf16"), ("fp32", True, "fp32")],
)
def test_formats(wanted: Any, bf16: bool, compute: str):
    spec = replace(SPEC, precision=PrecisionSpec(compute=wanted))
    assert plan(spec, replace(LAPTOP, bf16=bf16)).compute == compute


@pytest.mark.parametrize(
    ("wanted", "bf16", "compute"), [("auto", False, "fp32"), ("auto", True, "bf16"), ("fp16", False, "fp16")]
)
def test_the_search_takes_the_format_that_the_engine_runs(wanted: Any, bf16: bool, compute: str) -> None:
    """On a GPU without bf16 the capacity planner would take fp16 of its own accord."""
    spec = replace(SPEC, precision=PrecisionSpec(compute=wanted))
    assert in_engine_format(spec, replace(H200S, bf16=bf16)).precision.compute == compute


@pytest.mark.parametrize("wanted", ["fp16", "tf32"])
def test_formats_that_are_planned_alone_are_refused(wanted: Any):
    with pytest.raises(RecipeError, match=f"bf16 or fp32, not in {wanted}"):
        plan(replace(SPEC, precision=PrecisionSpec(compute=wanted)), LAPTOP)


def test_a_described_gpu_has_a_peak_where_none_is_at_hand():
    chip = AcceleratorSpec("X1", "maker", 123.0, 80.0, 3.0)
    cluster = ClusterSpec(devices_per_node=2, device="cuda", accelerator=chip)
    got = plan(replace(SPEC, cluster=cluster, layout=LayoutSpec(dp_replicate=2)), replace(LAPTOP, bf16=True))
    assert (got.device, got.peak_flops) == ("cuda", 123e12)
    assert plan(replace(SPEC, cluster=replace(cluster, accelerator=None), layout=LayoutSpec(dp_replicate=2)),
                replace(LAPTOP, bf16=True)).peak_flops is None  # fmt: skip


@pytest.mark.clause("LAUNCH-3")
def test_what_is_open_beside_the_layout_is_closed_and_the_rest_passed_on():
    kernels = KernelSpec(attention="math")
    got = plan(replace(SPEC, recompute="auto", offload="auto", kernels=kernels), LAPTOP)
    assert (got.recompute, got.offload, got.kernels) == ("none", "none", kernels)
    pinned = plan(replace(SPEC, recompute="full", offload="optimizer"), LAPTOP)
    assert (pinned.recompute, pinned.offload) == ("full", "optimizer")
    adapted = plan(replace(SPEC, lora=LoraSpec(rank=2)), LAPTOP)
    assert adapted.flops_per_token < got.flops_per_token and adapted.params == got.params
    two = plan(replace(SPEC, cluster=ClusterSpec(num_nodes=2)), LAPTOP)
    assert (two.num_nodes, two.devices_per_node, two.world_size) == (2, 1, 2)


@pytest.mark.parametrize(
    ("samples", "micro", "sizes"),
    [(16, 4, (4, 4)), (12, 4, (3, 4)), (13, 4, (4, 4)), (1, 4, (1, 2)), (3, "auto", (1, 4))],
)
def test_interleaving_takes_whole_turns(samples: int, micro: Any, sizes: tuple[int, int]):
    """Where a rank's samples are no whole turns, micro-batches are smaller, and some of one sample may be empty."""
    layout = LayoutSpec(dp_replicate=1, pp=2, pipeline_schedule="interleaved")
    got = plan(replace(SPEC, layout=layout, batching=BatchingSpec(samples, micro_batch_size=micro)), LAPTOP)
    assert (got.micro_batch_size, got.grad_accum_steps) == sizes


def test_planned_changes_of_layout_are_resolved_as_the_layout_is() -> None:
    changes = (LayoutChangeSpec(4, pp=2, dp_shard=2), LayoutChangeSpec(6, tp=2), LayoutChangeSpec(8, dp_replicate=4))
    spec = replace(SPEC, cluster=ClusterSpec(devices_per_node=4), scheduler=SchedulerSpec(changes=changes))
    got = plan(spec, LAPTOP)
    assert [change.step for change in got.changes] == [4, 6, 8]
    pipeline, tensor, replicas = got.changes
    assert (pipeline.layout.pp, pipeline.layout.dp_shard, pipeline.layout.dp_replicate) == (2, 2, 1)
    assert (tensor.layout.tp, tensor.layout.data_parallel_size) == (2, 2)
    assert tensor.micro_batch_size * tensor.grad_accum_steps >= 24
    other = got.with_layout(replicas)
    assert (other.layout.dp_replicate, other.micro_batch_size) == (4, replicas.micro_batch_size)
    assert other.spec == spec


def test_a_planned_layout_of_other_sizes_than_the_cluster_is_refused() -> None:
    changes = (LayoutChangeSpec(4, pp=2, dp_shard=2, dp_replicate=2),)
    spec = replace(SPEC, cluster=ClusterSpec(devices_per_node=4), scheduler=SchedulerSpec(changes=changes))
    with pytest.raises(RecipeError, match=r"from step 4 on, .* 8 processes, .* has 4"):
        plan(spec, LAPTOP)


# `comm.gradients: auto` takes fewer bits where that saves more than encoding takes, and says what it goes by


CPUS = Machine("node", 4, 2**35)
H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, gpu_memory_bytes=80 * 2**30, bf16=True)
SMALL, LARGE = DecoderModel(4, 256, 8, 4, 32, 768, 4096), DecoderModel(32, 4096, 32, 8, 128, 14336, 128256)


def planned(machine: Machine, nodes: int, nic: float, model: Any = SMALL, layout: Any = None, **comm: Any) -> Plan:
    spec = RunSpec(
        model=model,
        data=DataSpec(seq_len=128, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=32, micro_batch_size=1),
        train=TrainSection(max_steps=1),
        layout=layout or LayoutSpec(dp_replicate=2 * nodes if machine is CPUS else 8 * nodes, dp_shard=1),
        cluster=ClusterSpec(num_nodes=nodes, devices_per_node=2 if machine is CPUS else 8, nic_gbit_per_s=nic),
        comm=CommSpec(**comm),
    )
    return plan(spec, machine)


def test_auto_compresses_over_slow_links() -> None:
    found = planned(CPUS, 2, 0.1, gradients="auto").comm
    assert (found.gradients, found.across_nodes, found.parameters) == ("int8", "int8", "full")
    assert "predicted" in found.reason and "uncompressed" in found.reason
    assert planned(CPUS, 2, 1000.0, gradients="auto").comm.gradients in ("full", "bf16")


def test_auto_says_where_encoding_takes_more_than_it_saves() -> None:
    inside = planned(H100S, 1, 0.0, LARGE, gradients="auto")
    assert inside.comm.gradients in ("full", "bf16"), "the integers' encoding takes longer than NVLink"
    fast = replace(inside.spec, cluster=replace(inside.spec.cluster, link_gb_per_s=5000.0))
    found = plan(fast, H100S).comm
    assert (found.gradients, found.across_nodes) == ("full", "full")
    assert found.reason.startswith("encoding takes more time than it saves: ")


def test_on_gpus_too() -> None:
    slow = planned(H100S, 4, 1.0, LARGE, gradients="auto")
    assert slow.comm.across_nodes == "int8", "int4 costs loss, and is asked for by name alone"
    seconds = {
        name: estimate_step(
            setup_of(replace(slow, comm=WireFormats(name, "full", name)), H100S),  # type: ignore[arg-type]
            efficiency_of(slow.spec.cluster),
        ).total_s
        for name in ("full", "bf16", "int8", "int4")
    }
    assert min(seconds, key=seconds.__getitem__) == "int4"
    assert seconds["full"] > seconds["bf16"] > seconds["int8"] > seconds["int4"]


def test_what_lies_inside_a_node_is_chosen_apart() -> None:
    found = planned(CPUS, 2, 0.1, gradients="full", across_nodes="auto").comm
    assert (found.gradients, found.across_nodes) == ("full", "int8")
    assert found.describe().startswith("full ") and " int8 across " in found.describe()
    assert planned(CPUS, 2, 0.1, gradients="int8").comm == WireFormats("int8", "full", "int8")


def test_without_the_links_speed_nothing_is_compressed_and_that_is_said() -> None:
    found = planned(CPUS, 2, 0.0, gradients="auto").comm
    assert found.gradients == "full" and "cluster.nic_gbit_per_s" in found.reason
    unknown = replace(H100S, gpu_names=("Some GPU",) * 8)
    found = planned(unknown, 2, 100.0, LARGE, gradients="auto").comm
    assert found.gradients == "full" and "catalogue" in found.reason


def test_each_format_is_its_bytes_and_its_encoding() -> None:
    found = planned(H100S, 2, 10.0, LARGE, LayoutSpec(dp_replicate=2, dp_shard=8))
    setup, eff = setup_of(found, H100S), efficiency_of(found.spec.cluster)
    across = axis_groups(setup.layout, setup.fabric, eff)["dp_replicate"]
    assert across.crosses

    def with_wire(*wire: Any) -> Any:
        return replace(setup, software=replace(setup.software, wire=WireFormats(*wire)))

    full_s, large = scatter_s(across, 4e9, setup, eff), 4e9
    assert scatter_s(across, large, with_wire("int4", "full", "full"), eff) == full_s, "it is for inside the node"
    memory = eff.memory * setup.fabric.chip.memory_tb_per_s * 1e12
    for name, part, encoding in (("bf16", 1 / 2, 16), ("int8", 8.125 / 32, 85), ("int4", 4.125 / 32, 125)):
        compressed = with_wire("full", "full", name)
        expected = full_s * part + encoding * 1e9 / memory
        assert scatter_s(across, large, compressed, eff) == pytest.approx(expected, rel=1e-3)
        expected = 2 * full_s * part + 1.5 * encoding * 1e9 / memory
        assert sum_s(across, large, compressed, eff) == pytest.approx(expected, rel=1e-3)
    of_gloo = replace(across, speaks_gloo=True)
    rows_s = large * (across.size - 1) / across.size / across.nic_bytes_per_s
    assert scatter_s(of_gloo, large, setup, eff) == pytest.approx(rows_s, rel=1e-3), "each rank sends its own rows"
    parameters = gather_s(across, 2e9, with_wire("full", "int8", "full"), eff)
    assert parameters == pytest.approx(full_s / 4 + 85 * 1e9 / memory, rel=2e-3)


def test_feedback_takes_memory() -> None:
    shards = planned(H100S, 1, 0.0, LARGE, LayoutSpec(dp_shard=8), gradients="int8")
    assert feedback_bytes(shards.spec.model, shards.layout, shards.comm) == 4 * shards.params
    assert predict_device(shards, H100S).memory["error feedback"] == 4 * shards.params
    both = planned(H100S, 1, 0.0, LARGE, LayoutSpec(dp_shard=4, dp_replicate=2), gradients="int4")
    assert feedback_bytes(both.spec.model, both.layout, both.comm) == 4 * both.params * (1 + 1 / 4)
    for plain in ("bf16", "full"):
        whole = planned(H100S, 1, 0.0, LARGE, LayoutSpec(dp_shard=8), gradients=plain)
        assert not feedback_bytes(whole.spec.model, whole.layout, whole.comm)
