"""Chips and models by the labels that drivers, papers and tables give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.planner.hardware import rates as catalogue
from trainspec_cli.planner.hardware.rates import accelerators, find_accelerator, find_model, words


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


def test_the_words_of_a_label() -> None:
    assert words("NVIDIA H100-SXM 80GB") == ("h100", "sxm", "80gb")
    assert words("Tesla V100_SXM2") == ("v100", "sxm2")
    assert words("resnet50-v1.5") == ("resnet50", "v1.5")


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
