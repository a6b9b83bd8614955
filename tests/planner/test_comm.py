"""`comm.gradients: auto` takes fewer bits where that saves more than encoding takes, and says what it goes by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.planner.hardware.cluster import axis_groups, efficiency_of
from trainspec_cli.planner.memory.predict import feedback_bytes
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.this_machine import predict_device, setup_of
from trainspec_cli.planner.time.step import estimate_step, gather_s, scatter_s, sum_s
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, CommSpec, OptimSpec, WireFormats
from trainspec_cli.recipe.results.plan import Plan

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
    assert "predicted" in found.reason and "in full" in found.reason
    assert planned(CPUS, 2, 1000.0, gradients="auto").comm.gradients in ("full", "bf16")


def test_auto_says_where_encoding_takes_more_than_it_saves() -> None:
    inside = planned(H100S, 1, 0.0, LARGE, gradients="auto")
    assert inside.comm.gradients in ("full", "bf16"), "the integers' encoding takes longer than NVLink"
    fast = replace(inside.spec, cluster=replace(inside.spec.cluster, link_gb_per_s=5000.0))
    found = plan(fast, H100S).comm
    assert (found.gradients, found.across_nodes) == ("full", "full")
    assert found.reason.startswith("encoding takes more than it saves: ")


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
    assert found.describe() == "full inside nodes and int8 across them"
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
