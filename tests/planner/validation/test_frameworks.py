"""A row's framework, found by the names that conf/framework lists, and its facts in the row's use."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Software, describe_software
from trainspec_cli.planner.validation.backtest import predict
from trainspec_cli.planner.validation.table import UnknownFramework, framework_of, frameworks
from trainspec_cli.planner.validation.table import software_of as software_and_whether_open
from trainspec_cli.recipe.keys.framework import FrameworkSpec, ShardingFacts, StateFacts
from trainspec_cli.recipe.keys.layout import SHARDINGS
from trainspec_cli.recipe.keys.run import RunSpec

MEASURED = Path(__file__).parents[2] / "data" / "measured"


def software_of(row: dict[str, str]) -> Software:
    return software_and_whether_open(row)[0]


@pytest.mark.parametrize(
    ("cells", "file"),
    [
        ({"framework": "NeMo/Megatron-Core", "year": "2025"}, "nemo_2025"),
        ({"framework": "Megatron-Bridge/Megatron-Core", "year": "2026"}, "nemo"),
        ({"framework": "Megatron-LM", "year": "2019"}, "megatron_2022"),
        ({"framework": "megatron-lm"}, "megatron"),
        ({"framework": "Megatron-DeepSpeed", "year": "2024"}, "megatron_deepspeed"),
        ({"framework": "llm-foundry/Composer (PyTorch FSDP)", "year": "2023"}, "llm_foundry_2023"),
        ({"framework": "JAX Paxml", "year": "2024"}, "maxtext"),
        ({"framework": "PyTorch 21.03", "year": "2021"}, "pytorch_2023"),
        ({"framework": "NVIDIA NeMo", "source": "MLPerf Training", "year": "2025"}, "mlperf"),
        ({"source": "bigscience-workshop/bigscience"}, "megatron_deepspeed_2022"),
        ({"source": "Korthikanti 2022 (arXiv:2205.05198)"}, "megatron_2022"),
        ({"source": "runs of torchtitan at home"}, "torchtitan"),
        ({"source": "runs of torchtitan at home", "framework": "nanotron"}, "nanotron"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_are_found_as_whole_words(cells: dict[str, str], file: str) -> None:
    assert framework_of(cells) == (frameworks()[file], False)


def test_a_part_of_a_word_is_no_name() -> None:
    with pytest.raises(UnknownFramework, match=r"unknown framework Megatronic: .*conf/framework/.*megatron, "):
        framework_of({"framework": "Megatronic"})


def test_a_row_that_names_no_framework_is_taken_for_pytorch() -> None:
    assert framework_of({"source": "a blog"}) == (frameworks()["pytorch"], True)


def test_rows_of_unknown_frameworks_are_refused() -> None:
    with (MEASURED / "throughput.csv").open(newline="", encoding="utf-8") as lines:
        row = next(csv.DictReader(lines))
    refused = predict(row | {"framework": "Abacus", "source": ""}, Efficiency()).refused
    assert refused is not None and refused.startswith("unknown framework Abacus: write conf/framework/NAME.yaml")


def test_every_row_of_the_measured_tables_has_a_framework() -> None:
    for name, unstated in (
        ("throughput.csv", set()),
        ("memory.csv", {"hpcaitech/ColossalAI", "NVIDIA/dgxc-benchmarking"}),
    ):
        with (MEASURED / name).open(newline="", encoding="utf-8") as lines:
            assert {row["source"] for row in csv.DictReader(lines) if framework_of(row)[1]} == unstated


def test_every_framework_says_where_its_facts_are_from() -> None:
    usual = FrameworkSpec(name="")
    for file, facts in frameworks().items():
        sources = facts.sources or {}
        assert "default" in sources, file
        assert sources.keys() - {"default"} <= FrameworkSpec.__dataclass_fields__.keys(), file
        if facts.states != usual.states:
            assert "states" in sources, file


def test_trainspecs_own_file_says_what_a_recipe_means_without_one() -> None:
    own = frameworks()["trainspec"]
    default = RunSpec.__dataclass_fields__["framework"].default_factory()  # type: ignore[misc]
    for sharding in SHARDINGS:
        for compiled in (False, True):
            found = [describe_software(one, sharding, compiled, "fp32", "fp32") for one in (own, default)]
            assert found[0] == found[1] and found[0].counted


def test_the_facts_of_the_sharding_are_taken() -> None:
    states = ShardingFacts(*(StateFacts(weight_bytes=size) for size in (1.0, 2.0, 3.0)))
    facts = FrameworkSpec(name="", states=states)
    found = [describe_software(facts, sharding, False, "compute", "fp32") for sharding in SHARDINGS]
    assert [one.weight_bytes for one in found] == [1, 2, 3]
    assert {(one.grad_bytes, one.reduce_bytes, one.counted) for one in found} == {(2, 4, False)}


def test_frameworks_by_name_and_year() -> None:
    old = software_of({"framework": "Megatron-LM", "year": "2022"})
    assert not old.fused_attention and not old.overlap_tp
    eager = software_of({"framework": "torchtitan", "compile": "0", "dp_mode": "fsdp_zero3"})
    assert not eager.fused_kernels and eager.weight_bytes == 4.0
    assert software_of({"framework": "torchtitan", "compile": "1"}).fused_kernels


@pytest.mark.parametrize(
    ("framework", "year", "data_parallel", "tensor_parallel"),
    [
        ("Megatron-LM", "2024", True, True),
        ("Megatron-LM", "2022", False, False),
        ("DeepSpeed", "2024", False, False),
        ("Megatron-DeepSpeed", "2022", False, False),
        ("torchtitan", "2022", True, False),
    ],
)
def test_early_megatron_overlaps_no_exchanges_and_deepspeed_none_of_data_parallelism(
    framework: str, year: str, data_parallel: bool, tensor_parallel: bool
) -> None:
    software = software_of({"framework": framework, "year": year})
    assert (software.overlap_dp, software.overlap_tp) == (data_parallel, tensor_parallel)


def test_deepspeed_keeps_bf16_gradients_beside_their_fp32_sums() -> None:
    row = {"framework": "Megatron-DeepSpeed", "dp_mode": "ddp_zero1", "dtype": "bf16"}
    assert software_of(row | {"year": "2024"}).grad_bytes == 6.0
    assert software_of(row | {"year": "2024", "dtype": "fp16"}).grad_bytes == 2.0
    assert software_of(row | {"year": "2022"}).grad_bytes == 2.0
    assert software_of(row | {"year": "2022", "notes": "gradients accumulated in fp32"}).grad_bytes == 6.0


def test_gradients_summed_in_fp32_are_stepped_from_as_they_lie() -> None:
    row = {"framework": "Megatron-DeepSpeed", "dp_mode": "ddp_zero1", "dtype": "fp16"}
    assert software_of(row).step_bytes == 6.0
    assert software_of(row | {"dp_mode": "ddp"}).step_bytes == 8.0
    assert software_of(row | {"notes": "gradients accumulated in fp32"}).step_bytes == 0.0


def test_optimizers_over_lists_of_tensors_need_temporaries() -> None:
    lists = software_of({"framework": "PyTorch", "dp_mode": "fsdp_zero3"})
    assert (lists.step_bytes, lists.step_temporary_bytes) == (0.0, 4.0)
    fused = software_of({"framework": "torchtitan", "dp_mode": "fsdp_zero3"})
    assert (fused.step_bytes, fused.step_temporary_bytes) == (0.0, 0.0)
    megatron = software_of({"framework": "Megatron-LM", "year": "2024"})
    assert (megatron.step_bytes, megatron.step_temporary_bytes) == (0.0, 0.0)


def test_flat_buckets_are_held_where_gradients_are_flattened() -> None:
    flat = software_of({"framework": "DeepSpeed", "dp_mode": "ddp_zero1"})
    assert flat.bucket_bytes > software_of({"framework": "torchtitan", "dp_mode": "fsdp_zero3"}).bucket_bytes
