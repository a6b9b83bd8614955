"""A cluster as the planner sees it: its accelerator, its links, and the corrections of a recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lab.made_up import CHIP, CLUSTER

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.hardware.cluster import accelerator_of, describe_fabric, efficiency_of
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine


def test_a_described_cluster_is_taken_as_it_is() -> None:
    fabric = describe_fabric(CLUSTER, None)
    assert fabric.chip == replace(CHIP, sources=None)
    assert (fabric.num_devices, fabric.devices_per_node, fabric.scaleup_devices) == (8, 4, 4)
    assert (fabric.link_gb_per_s, fabric.nic_gbit_per_s, fabric.nic_kind) == (300, 400, "infiniband")
    own = replace(CLUSTER, scaleup_devices=8, link_gb_per_s=7.0, nic_kind="roce", host_link_gb_per_s=9.0)
    fabric = describe_fabric(own, None)
    assert (fabric.scaleup_devices, fabric.link_gb_per_s) == (8, 7)
    assert (fabric.nic_kind, fabric.host_link_gb_per_s) == ("roce", 9)


def test_links_of_no_known_speed_are_asked_for_where_devices_share_them() -> None:
    bare = replace(CLUSTER, accelerator=replace(CHIP, link_gb_per_s=0.0))
    with pytest.raises(RecipeError, match="4 devices exchange data over these links") as raised:
        describe_fabric(bare, None)
    [problem] = raised.value.problems
    assert (problem.path, problem.code) == ("cluster.accelerator.link_gb_per_s", "missing_value")
    assert problem.hint.startswith("type cluster.accelerator.link_gb_per_s=<GB/s of a device, one direction>")
    for stated in ({"link_gb_per_s": 7.0}, {"devices_per_node": 1}, {"scaleup_devices": 1}):
        assert describe_fabric(replace(bare, **stated), None).link_gb_per_s == stated.get("link_gb_per_s", 0.0)


@pytest.mark.parametrize(("tflops", "gbit"), [(501.0, 400), (500.0, 200), (201.0, 200), (200.0, 100)])
def test_a_network_that_is_not_named_is_that_of_the_chips_class(tflops: float, gbit: float) -> None:
    unnamed = replace(CLUSTER, nic_gbit_per_s=None, accelerator=replace(CHIP, bf16_tflops=tflops))
    assert describe_fabric(unnamed, None).nic_gbit_per_s == gbit
    card = replace(CHIP, bf16_tflops=tflops, link_kind="pcie")
    assert describe_fabric(replace(unnamed, accelerator=card), None).nic_gbit_per_s == 50


@pytest.mark.parametrize(
    ("machine", "devices"),
    [
        (None, 8),
        (Machine("m", 1, 2**30), 1),
        (Machine("m", 16, 2**30), 2),
        (Machine("m", 16, 2**30, gpu_names=("NVIDIA H200",) * 3), 3),
    ],
    ids=["no machine", "one core", "cores", "GPUs"],
)
def test_devices_of_a_node_that_are_left_open(machine: Machine | None, devices: int) -> None:
    fabric = describe_fabric(replace(CLUSTER, devices_per_node=AUTO), machine)
    assert (fabric.devices_per_node, fabric.num_devices, fabric.scaleup_devices) == (devices, 2 * devices, devices)


def test_this_machines_accelerator() -> None:
    gpus = Machine("m", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",), gpu_memory_bytes=79 * 2**30)
    found = accelerator_of(gpus)
    assert (found.name, found.memory_gb) == ("H100-SXM-80GB", 79)
    assert accelerator_of(replace(gpus, gpu_memory_bytes=0)) == find_accelerator("H100-SXM-80GB")
    with pytest.raises(RecipeError, match="the catalogue has no accelerator like Abacus"):
        accelerator_of(replace(gpus, gpu_names=("Abacus",)))
    with pytest.raises(RecipeError, match="names no accelerator"):
        accelerator_of(None)


def test_a_process_has_half_of_a_cpu() -> None:
    cpu = accelerator_of(Machine("m", 8, 2**35, bf16=True))
    assert (cpu.vendor, cpu.link_kind, cpu.link_gb_per_s) == ("cpu", "pcie", 2)
    assert (cpu.bf16_tflops, cpu.fp32_tflops) == pytest.approx((4 * 0.47, 4 * 0.11))
    assert (cpu.memory_gb, cpu.memory_tb_per_s) == pytest.approx((16, 0.024))
    assert accelerator_of(Machine("m", 1, 2**35)).bf16_tflops == pytest.approx(0.11), "one core at least"


@pytest.mark.parametrize("key", ["memory_gb", "memory_tb_per_s", "bf16_tflops"])
def test_rates_of_nothing_are_refused(key: str) -> None:
    chip: Any = replace(CHIP, **{key: 0.0})
    with pytest.raises(RecipeError, match=f"`{key}` is 0; more than 0 is needed") as caught:
        describe_fabric(replace(CLUSTER, accelerator=chip), None)
    assert [problem.path for problem in caught.value.problems] == [f"cluster.accelerator.{key}"]
    half = replace(CHIP, bf16_tflops=0.0, fp16_tflops=100.0)
    assert describe_fabric(replace(CLUSTER, accelerator=half), None).chip.fp16_tflops == 100


def test_corrections_leave_the_other_efficiencies() -> None:
    assert efficiency_of(CLUSTER) == Efficiency()
    corrected = efficiency_of(replace(CLUSTER, efficiency={"nic": 0.5}))
    assert corrected == replace(Efficiency(), nic=0.5)
    with pytest.raises(RecipeError) as caught:
        efficiency_of(replace(CLUSTER, efficiency={"nic": 0.5, "warp": 9.0, "wrap": 1.0}))
    assert [p.path for p in caught.value.problems] == ["cluster.efficiency.warp", "cluster.efficiency.wrap"]
