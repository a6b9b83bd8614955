"""What a chip and its links achieve: makers' figures times efficiencies, in round numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainspec_cli.planner.hardware import rates as catalogue
from trainspec_cli.planner.hardware.cluster import Fabric, Group, axis_groups, group_of
from trainspec_cli.planner.hardware.rates import (
    Efficiency,
    accelerators,
    find_accelerator,
    find_model,
    link_bytes_per_s,
    matmul_flops_per_s,
    memory_bytes_per_s,
)
from trainspec_cli.planner.time.step import rates_of
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import Layout

CHIP = AcceleratorSpec(
    *("chip", "maker", 100.0, 80.0, 3.0),
    fp16_tflops=80.0,
    tf32_tflops=50.0,
    fp32_tflops=20.0,
    fp8_tflops=200.0,
    fp4_tflops=400.0,
    matmul_bf16_tflops=60.0,
    link_kind="nvswitch",
)
EFF = Efficiency(
    matmul=0.375,
    matmul_fp8=0.3125,
    matmul_fp4=0.1875,
    memory=0.625,
    link_nvswitch=0.5,
    link_mesh=0.25,
    link_pcie=0.125,
    nic=0.5625,
)
NO_FORMATS = {"fp16_tflops": 0.0, "tf32_tflops": 0.0, "fp8_tflops": 0.0, "fp4_tflops": 0.0}


@pytest.mark.parametrize(
    ("fmt", "changes", "tera"),
    [
        ("bf16", {}, 0.375 * 0.6 * 100),
        ("fp16", {}, 0.375 * 0.6 * 80),
        ("tf32", {}, 0.375 * 0.6 * 50),
        ("fp32", {}, 0.375 * 0.6 * 20),
        ("fp8", {}, 0.3125 * 0.6 * 200 * 0.95),
        ("mxfp8", {"matmul_fp8_tflops": 150.0}, 0.3125 * 150),
        ("nvfp4", {}, 0.1875 * 0.6 * 400),
        ("nvfp4", {"fp4_tflops": 0.0}, 0.1875 * 0.6 * 200),
        *((fmt, NO_FORMATS, 0.375 * 0.6 * 100) for fmt in ("fp16", "fp8", "mxfp8", "nvfp4")),
        ("tf32", NO_FORMATS, 0.375 * 0.6 * 20),
        ("fp32", {"fp32_tflops": 0.0}, 0.375 * 0.6 * 50),
        ("fp16", {"bf16_tflops": 0.0, "matmul_bf16_tflops": 0.0}, 0.375 * 0.75 * 80),
        ("bf16", {"bf16_tflops": 0.0, "matmul_bf16_tflops": 0.0}, 0.375 * 0.75 * 80),
        ("bf16", {"bf16_tflops": 0.0}, 0.375 * 0.75 * 80),
    ],
)
def test_a_large_product_in_each_format_or_the_next_wider(fmt: str, changes: dict[str, float], tera: float) -> None:
    chip = replace(CHIP, **changes)  # type: ignore[arg-type]
    assert matmul_flops_per_s(chip, fmt, EFF) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(("tdp_w", "fraction"), [(0, 0.75), (70, 0.8), (700, 0.8), (35, 0.8 * 0.5**0.3)])
def test_a_rate_that_was_not_measured_is_usual_less_where_power_is_short(tdp_w: float, fraction: float) -> None:
    unmeasured = replace(CHIP, matmul_bf16_tflops=0.0, tdp_w=tdp_w)
    assert matmul_flops_per_s(unmeasured, "bf16", EFF) == pytest.approx(0.375 * fraction * 100e12)
    assert matmul_flops_per_s(replace(CHIP, tdp_w=tdp_w), "bf16", EFF) == pytest.approx(0.375 * 0.6 * 100e12)


def test_rates_beside_the_products() -> None:
    rates = rates_of(CHIP, "bf16", "bf16", EFF)
    assert (rates.exponentials, rates.load_store) == pytest.approx((0.4e12, 4.7 * 3e12))
    assert rates_of(replace(CHIP, bf16_tflops=0.0), "bf16", "bf16", EFF).exponentials == pytest.approx(0.32e12)
    described = replace(CHIP, tera_exponentials_per_s=7.0, load_store_tb_per_s=9.0)
    rates = rates_of(described, "bf16", "bf16", EFF)
    assert (rates.exponentials, rates.load_store) == (7e12, 9e12)
    assert memory_bytes_per_s(CHIP, EFF) == 0.625 * 3e12


@pytest.mark.parametrize(
    ("kind", "peers", "gb_per_s"),
    [
        ("nvswitch", 2, 50),
        ("mesh", 8, 25),
        ("mesh", 3, 25 * 2 / 7),
        ("mesh", 1, 25 / 7),
        ("mesh", 16, 25),
        ("bridge", 2, 50),
        ("bridge", 3, 63 / 8),
        ("torus", 2, 25),
        ("pcie", 2, 12.5),
    ],
)
def test_links_by_their_kind(kind: str, peers: int, gb_per_s: float) -> None:
    chip = replace(CHIP, link_kind=kind)  # type: ignore[arg-type]
    assert link_bytes_per_s(chip, 100.0, peers, EFF) == pytest.approx(gb_per_s * 1e9)


FABRIC = Fabric(CHIP, 96, 8, 8, 100.0, 400.0)


@pytest.mark.parametrize(
    ("kind", "ratio"),
    [
        ("infiniband", 1),
        ("roce", 0.92),
        ("efa", 0.8),
        ("omnipath", 0.8),
        ("ethernet", 0.6),
        ("measured", 1),
        ("smoke", 0.8),
    ],
)
def test_networks_by_their_kind(kind: str, ratio: float) -> None:
    found = group_of(replace(FABRIC, nic_kind=kind), 16, 1, EFF)
    assert (found.nic_bytes_per_s, found.link_bytes_per_s) == pytest.approx((0.5625 * 50e9 * ratio, 50e9))
    assert group_of(replace(FABRIC, nic_gbit_per_s=0.0), 16, 1, EFF).nic_bytes_per_s == 1, "and not 0, to divide by"


def test_each_axis_has_its_ranks_in_a_domain_by_the_rank_order() -> None:
    """tp innermost, then cp, shards, replicas and stages; 8 devices share the fast links."""
    layout = Layout(dp_replicate=2, dp_shard=4, cp=2, tp=2, pp=3, ep=4, etp=2)
    groups = axis_groups(layout, FABRIC, EFF)
    assert {axis: (group.size, group.per_domain, group.domains) for axis, group in groups.items()} == {
        "tp": (2, 2, 1),
        "cp": (2, 2, 1),
        "etp": (2, 2, 1),
        "ep": (4, 4, 1),
        "dp": (16, 4, 4),
        "dp_shard": (8, 4, 2),
        "dp_replicate": (2, 1, 2),
        "expert_dp": (4, 1, 4),
        "pp": (3, 1, 3),
    }
    mesh = replace(FABRIC, chip=replace(CHIP, link_kind="mesh"))
    assert axis_groups(layout, mesh, EFF)["dp"].link_bytes_per_s == pytest.approx(25e9 * 3 / 7)
    assert axis_groups(Layout(ep=8), FABRIC, EFF)["expert_dp"].size == 1


def test_domains_of_a_group_that_does_not_fill_them() -> None:
    assert [Group(size, 8, 1.0, 1.0).domains for size in (1, 8, 9, 16, 17)] == [1, 1, 2, 2, 3]
    assert [Group(size, 8, 1.0, 1.0).crosses for size in (8, 9)] == [False, True]


def test_stages_are_as_far_apart_as_their_ranks_are_many() -> None:
    """Eight devices share the fast links: stages of two, four and eight ranks."""
    for layout, per_domain in (
        (Layout(pp=4, tp=2), 4),
        (Layout(pp=4, dp_replicate=2, tp=2), 2),
        (Layout(pp=4, dp_shard=2, tp=2), 2),
        (Layout(pp=4, dp_replicate=2, dp_shard=2, cp=2), 1),
    ):
        assert axis_groups(layout, FABRIC, EFF)["pp"].per_domain == per_domain


# Chips and models by the labels that drivers, papers and tables give them


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("H100-SXM-80GB", "H100-SXM-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("H100", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA H200", "H200-SXM-141GB"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("Tesla V100-SXM2-16GB", "V100-SXM2-16GB"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", "L40"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA B200", "B200-SXM"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_label_names_the_chip_that_is_meant(label: str, name: str) -> None:
    """The words that tell variants apart are in a label that means them; memory alone names no chip."""
    found = find_accelerator(label)
    assert found is not None and found.name == name


@pytest.mark.parametrize("label", ["", "NVIDIA", "80GB", "Abacus-9000 80GB", "GPU SXM"])
def test_a_label_that_shares_no_number_with_a_chip_names_none(label: str) -> None:
    assert find_accelerator(label) is None


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("llama3-8b", "llama3_8b"),
        ("Llama3 8B", "llama3_8b"),
        ("llama3_70b_instruct", "llama3_70b"),
        ("mixtral-8x7b", "mixtral_8x7b"),
        ("8b", None),
    ],
)
def test_a_model_by_its_name_or_its_beginning(label: str, name: str | None) -> None:
    found = find_model(label)
    assert found is (catalogue.models()[name] if name else None)


def test_chips_are_read_without_their_sources_so_that_they_can_be_keys() -> None:
    assert len({chip.name for chip in accelerators()}) == len(set(accelerators())) == len(accelerators()) > 30
    assert all(chip.sources is None for chip in accelerators())


def test_a_users_own_description_comes_before_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "conf" / "accelerator"
    folder.mkdir(parents=True)
    figures = "vendor: me\nbf16_tflops: 1\nmemory_gb: 2\nmemory_tb_per_s: 3\n"
    (folder / "h100_sxm.yaml").write_text(f"name: Abacus-9000\n{figures}")
    monkeypatch.chdir(tmp_path)
    accelerators.cache_clear()
    find_accelerator.cache_clear()
    try:
        names = [chip.name for chip in accelerators()]
        assert "Abacus-9000" in names and "H100-SXM-80GB" not in names and "H200-NVL" in names
        own = find_accelerator("abacus 9000")
        assert own is not None and own.memory_gb == 2
    finally:
        accelerators.cache_clear()
        find_accelerator.cache_clear()


HEADLINE = ("name", "vendor", "bf16_tflops", "memory_gb", "memory_tb_per_s", "link_gb_per_s", "link_kind")
"""What the first page of a data sheet states."""


def headline_only(chip: AcceleratorSpec) -> AcceleratorSpec:
    return AcceleratorSpec(**{key: getattr(chip, key) for key in HEADLINE})


MEASURED_MATMULS = {chip.name: chip for chip in accelerators() if chip.matmul_bf16_tflops}


def test_a_chip_of_which_little_is_known_is_not_taken_for_a_better_one() -> None:
    """Its rates are those that half of the known chips of its kind exceed."""
    ratios = [
        matmul_flops_per_s(headline_only(chip), "bf16", EFF) / matmul_flops_per_s(chip, "bf16", EFF)
        for chip in MEASURED_MATMULS.values()
    ]
    assert len(ratios) >= 14 and sorted(ratios)[len(ratios) // 2] <= 1


@pytest.mark.parametrize("name", MEASURED_MATMULS)
def test_the_peak_tells_the_generation_where_no_format_does(name: str) -> None:
    chip = MEASURED_MATMULS[name]
    generations = [rates_of(one, "bf16", "bf16", EFF).generation for one in (chip, headline_only(chip))]
    if chip.vendor == "nvidia":
        assert generations[0] == generations[1]
    assert generations[1] >= min(generations[0], 3 if chip.bf16_tflops >= 500 else 2)
