"""A cluster as the planner sees it: its accelerator, its links, and the corrections of a recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.gpus.machines import CARDS, play
from lab.made_up import CHIP, CLUSTER

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware import cluster as detected
from trainspec_cli.planner.hardware import rates as catalogue
from trainspec_cli.planner.hardware.cluster import (
    accelerator_of,
    chip_of,
    derive,
    describe_fabric,
    efficiency_of,
    is_derived,
)
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, Machine
from trainspec_cli.run.job.machine import detect


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
    with pytest.raises(RecipeError, match="4 devices ") as raised:
        describe_fabric(bare, None)
    [problem] = raised.value.problems
    assert (problem.path, problem.code) == ("cluster.accelerator.link_gb_per_s", "missing_value")
    assert problem.hint.startswith("set cluster.accelerator.link_gb_per_s=<GB/s per device, in one direction>")
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
        (Machine("m", 16, 2**30), 1),
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
    with pytest.raises(RecipeError, match="like Abacus"):
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
    with pytest.raises(RecipeError, match=f"`{key}` is 0; ") as caught:
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


# The chip of a machine: the catalogue's where its numbers fit, else one derived from what the driver reports


DESCRIBED = {
    "h100_sxm": "H100-SXM-80GB",
    "h100_pcie": "H100-PCIe-80GB",
    "h100_nvl": "H100-NVL-94GB",
    "h200": "H200-SXM-141GB",
    "b200": "B200-SXM",
    "a100_40gb": "A100-SXM-40GB",
    "a100_80gb": "A100-SXM-80GB",
    "a100_pcie": "A100-PCIe-80GB",
    "v100_16gb": "V100-SXM2-16GB",
    "l40s": "L40S",
    "l4": "L4",
    "rtx_3090": "RTX 3090",
    "rtx_4090": "RTX 4090",
    "rtx_5090": "RTX 5090",
    "a10g": "NVIDIA A10G",
    "t4": "T4",
    "rtx_6000_ada": "NVIDIA RTX 6000 Ada Generation",
    "rtx_a6000": "NVIDIA RTX A6000",
    "gb10": "NVIDIA GB10",
}
RATES = ("bf16_tflops", "fp16_tflops", "fp8_tflops", "tf32_tflops", "fp32_tflops")


def chip_on(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[AcceleratorSpec, tuple[str, ...], Machine]:
    play(name, monkeypatch)
    machine = detect()
    chip, notes = chip_of(machine)
    assert chip is not None
    return chip, notes, machine


@pytest.mark.parametrize(("card", "name"), DESCRIBED.items())
def test_cards_that_the_catalogue_has(card: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, notes, machine = chip_on(f"2x{card}", monkeypatch)
    assert (chip.name, notes, is_derived(machine)) == (name, (), False)
    assert chip.memory_gb == machine.gpu_memory_bytes / GIB


@pytest.mark.parametrize("card", [card for card in DESCRIBED if card != "gb10"])
def test_a_derived_chip_is_at_most_what_the_data_sheet_says(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rates are no more than the sheet's, and no less than a third; its memory's bandwidth is the sheet's."""
    chip, _, machine = chip_on(f"1x{card}", monkeypatch)
    derived = derive(machine.gpus[0])
    sheet = find_accelerator(chip.name)
    assert sheet is not None
    for rate in RATES:
        assert getattr(derived, rate) <= getattr(sheet, rate) * 1.001, rate
    half, known = (one.bf16_tflops or one.fp16_tflops for one in (derived, sheet))
    assert half >= known / 3
    assert (derived.bf16_tflops > 0) == (sheet.bf16_tflops > 0)
    assert derived.memory_tb_per_s == pytest.approx(sheet.memory_tb_per_s, rel=0.05)


@pytest.mark.parametrize("card", [card for card in CARDS if card not in DESCRIBED and not card.startswith("mi")])
def test_cards_that_the_catalogue_lacks_are_derived(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, notes, machine = chip_on(f"2x{card}", monkeypatch)
    assert chip.memory_gb == CARDS[card]["memory_mib"] / 1024
    assert min(chip.bf16_tflops or chip.fp16_tflops, chip.memory_tb_per_s, chip.link_gb_per_s) > 0
    assert is_derived(machine)
    (note,) = notes
    assert f"`name: {CARDS[card]['name']}`" in note


def test_what_a_driver_does_not_report_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _, (note,), _ = chip_on("old_nvml", monkeypatch)
    assert "multiprocessors, memory bandwidth" in note


@pytest.mark.parametrize(
    ("card", "name", "cores"),
    [("rtx_4090", "NVIDIA GeForce RTX 4090 Laptop GPU", 9728), ("unknown", "Quadro RTX 6000", 4608)],
)
def test_a_name_alone_makes_no_chip(
    card: str, name: str, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The catalogue has a chip with such words in its name; the driver counts fewer multiprocessors."""
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"gpus": [{"card": card, "name": name, "cores": cores, "sm_mhz": 2100}]}))
    assert find_accelerator(name) is not None
    chip, _, found = chip_on(str(machine), monkeypatch)
    assert chip.name == name
    assert is_derived(found)


@pytest.mark.parametrize(("name", "memory_gib", "share"), [("mig_h100", 9.75, 16 / 132), ("mig_a100", 39.25, 42 / 108)])
def test_a_slice_has_its_own_memory_and_its_part_of_the_rates(
    name: str, memory_gib: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip, _, _ = chip_on(name, monkeypatch)
    whole = find_accelerator(chip.name)
    assert whole is not None
    assert chip.memory_gb == memory_gib
    assert share / 2 < chip.bf16_tflops / whole.bf16_tflops < share


def test_of_gpus_that_differ_the_slowest_and_the_smallest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    chip, notes, _ = chip_on("mixed", monkeypatch)
    assert (chip.name, round(chip.memory_gb, 2)) == ("RTX 3090", 23.99)
    assert len(notes) == 1
    chip, _, _ = chip_on("mixed_memory", monkeypatch)
    assert chip.memory_gb == 40


def test_links_that_are_down_are_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    chip, notes, _ = chip_on("nvlink_down", monkeypatch)
    assert (chip.link_kind, round(chip.link_gb_per_s)) == ("pcie", 63)
    assert len(notes) == 1


def test_one_die_of_a_board_has_half_of_its_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    board = find_accelerator("MI250X")
    assert board is not None
    chip, notes, _ = chip_on("amd_mi250x", monkeypatch)
    assert chip.bf16_tflops == pytest.approx(board.bf16_tflops / 2, rel=0.01)
    assert len(notes) == 2, "AMD was never run, and this is a part"


def test_a_machine_that_is_only_named_has_the_catalogues_chip_or_none() -> None:
    named = Machine("m", 8, 2**30, gpu_names=("NVIDIA H100 80GB HBM3",))
    assert chip_of(named) == (find_accelerator("H100-SXM-80GB"), ())
    assert chip_of(Machine("m", 8, 2**30, gpu_names=("Abacus-9000",))) == (None, ())
    assert chip_of(Machine("m", 8, 2**30)) == (None, ())


def test_a_users_description_takes_the_place_of_a_derived_chip(write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "name: NVIDIA X900\nvendor: nvidia\nbf16_tflops: 321\nmemory_gb: 90\nmemory_tb_per_s: 2\n"
    write("conf/accelerator/mine.yaml", text)
    caches = (catalogue.accelerators, catalogue.find_accelerator, chip_of, detected._chip_of_gpu)
    for cache in caches:
        cache.cache_clear()
    chip, notes, _ = chip_on("1xunheard_of", monkeypatch)
    for cache in caches:
        cache.cache_clear()
    assert (chip.bf16_tflops, chip.memory_gb, notes) == (321, 96, ())
