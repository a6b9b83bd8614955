"""Free text of published tables, read."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, models
from trainspec_cli.planner.setup import RECOMPUTE, Software, describe_software
from trainspec_cli.planner.validation.backtest import predict
from trainspec_cli.planner.validation.table import (
    RowRefused,
    UnknownFramework,
    framework_of,
    frameworks,
    network_of,
    number,
    recompute_of,
    state,
)
from trainspec_cli.planner.validation.table import software_of as software_from
from trainspec_cli.recipe.keys.framework import FrameworkSpec, ShardingFacts, StateFacts
from trainspec_cli.recipe.keys.layout import SHARDINGS, Layout
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel
from trainspec_cli.recipe.keys.run import RunSpec

# Free text of published tables, read


@pytest.mark.parametrize(
    ("text", "per_node", "gbit", "kind"),
    [
        ("400 Gbps/GPU IB/RoCE class", 8, 400, "roce"),
        ("4x100 Gbps/node Omni-Path", 8, 50, "omnipath"),
        ("8x400 Gbps/node (class)", 8, 400, "infiniband"),
        ("1600 Gbps/node RoCE (8x200)", 8, 200, "roce"),
        ("EFA/IB class 8x400 Gbps", 8, 400, "efa"),
        ("2x ConnectX-6 IB HDR 200Gb/Sec", 4, 100, "infiniband"),
        ("8x ConnectX-7 IB NDR 400Gb/s + 200Gb/s Ethernet NIC", 8, 400, "infiniband"),
        ("Storage: 2x BF3 ConnectX-7 400Gb/s, Compute: 8x BF3 400Gb/s, Management: 100Gb/s NIC", 8, 400, None),
        ("IB HDR class", 8, 200, "infiniband"),
        ("", 8, 400, "infiniband"),
    ],
)
def test_networks(text: str, per_node: int, gbit: float, kind: str | None) -> None:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    gbit_per_s, found, _ = network_of(text, per_node, chip)
    assert gbit_per_s == pytest.approx(gbit)
    assert kind is None or found == kind


@pytest.mark.parametrize(
    ("text", "matmul", "layers", "is_open"),
    [
        ("none", 0.0, 1.0, False),
        ("full", 1.0, 1.0, False),
        ("full_block(5 layers)", 1.0, 5 / 32, False),
        ("selective_layer(2)", 1.0, 0.5, False),
        ("selective_op", 0.5, 1.0, False),
        ("selective", 0.0, 1.0, False),
        ("unstated", 0.0, 1.0, True),
        ("unstated(likely full)", 1.0, 1.0, False),
        ("unstated(depends)", 0.0, 1.0, True),
    ],
)
def test_recompute(text: str, matmul: float, layers: float, is_open: bool) -> None:
    row = {} if text == "unstated" else {"act_ckpt": text}
    found, left_open = recompute_of(row, models()["llama3_8b"], Layout())
    assert (found.matmul, left_open) == (matmul, is_open)
    assert found.layers == pytest.approx(layers)


ROW = {
    "gpu": "H100-SXM-80GB", "n_gpus": "32", "layers": "4", "hidden": "1024", "heads": "8", "ffn": "4096",
    "vocab": "1000", "seq_len": "2048", "mbs": "2", "gbs": "64",
}  # fmt: skip


def test_a_row_states_a_run() -> None:
    stated = state(ROW | {"tp": "2", "dp_mode": "fsdp", "interconnect": "8x400 Gbps/node", "act_ckpt": "full"})
    setup = stated.setup
    assert setup.layout == Layout(dp_shard=16, tp=2)
    assert (setup.micro_batch_size, setup.grad_accum, stated.samples) == (2, 2, 64)
    assert (setup.seq_len, setup.compute, setup.matmul, setup.trainable) == (2048, "bf16", "bf16", 1)
    fabric = setup.fabric
    assert (fabric.num_devices, fabric.devices_per_node, fabric.scaleup_devices) == (32, 8, 8)
    assert (fabric.nic_gbit_per_s, setup.recompute.full, stated.recompute_open) == (400, True, False)
    assert stated.assumed == ("head_dim", "framework")


@pytest.mark.parametrize(
    ("cells", "layout"),
    [
        ({}, Layout(dp_replicate=32, zero_stage=1, sequence_parallel=False)),
        ({"dp_mode": "zero1"}, Layout(dp_shard=32, zero_stage=1, sequence_parallel=False)),
        ({"dp_mode": "zero2"}, Layout(dp_shard=32, zero_stage=2, sequence_parallel=False)),
        ({"dp_mode": "hsdp"}, Layout(dp_replicate=4, dp_shard=8, sequence_parallel=False)),
        ({"dp_mode": "fsdp", "shard_group": "16", "cp": "2"},
         Layout(dp_replicate=2, dp_shard=8, cp=2, sequence_parallel=False)),
        ({"tp": "2", "sp": "0"}, Layout(dp_replicate=16, tp=2, zero_stage=1, sequence_parallel=False)),
        ({"tp": "2", "pp": "2", "vpp": "2"},
         Layout(dp_replicate=8, tp=2, pp=2, zero_stage=1, pipeline_schedule="interleaved", virtual_stages=2)),
        ({"pp": "2", "dp": "8", "tp": "2"}, Layout(dp_replicate=8, tp=2, pp=2, zero_stage=1)),
        ({"ep": "8", "vpp": "3"}, Layout(dp_replicate=32, zero_stage=1, sequence_parallel=False)),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_of_rows(cells: dict[str, str], layout: Layout) -> None:
    assert state(ROW | cells).setup.layout == layout


@pytest.mark.parametrize(
    ("cells", "batch"),
    [
        ({}, (2, 1, 64)),
        ({"mbs": "1"}, (1, 2, 64)),
        ({"mbs": "4", "gbs": ""}, (4, 1, 128)),
        ({"mbs": "4", "gbs": "", "grad_accum": "3"}, (4, 3, 384)),
        ({"mbs": "", "grad_accum": "2"}, (1, 2, 64)),
        ({"mbs": ""}, (2, 1, 64)),
        ({"mbs": "", "pp": "2"}, (1, 4, 64)),
        ({"mbs": "1", "gbs": "", "pp": "2"}, (1, 8, 128)),
        ({"mbs": "3"}, (2, 1, 64)),
    ],
    ids=["both", "accumulated", "no global batch", "all but it", "no micro-batch", "neither", "neither, in stages",
         "stages to fill", "what does not divide"],
)  # fmt: skip
def test_batches_of_rows(cells: dict[str, str], batch: tuple[float, int, float]) -> None:
    stated = state(ROW | cells)
    assert (stated.setup.micro_batch_size, stated.setup.grad_accum, stated.samples) == batch
    assert ("mbs" in stated.assumed) == (cells.get("mbs") == "")


@pytest.mark.parametrize(
    ("dtype", "compute", "matmul"),
    [("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("tf32", "tf32", "tf32"), ("fp32", "fp32", "fp32"),
     ("fp8-cs", "bf16", "fp8"), ("mxfp8", "bf16", "mxfp8"), ("nvfp4", "bf16", "nvfp4"), ("", "bf16", "bf16")],
)  # fmt: skip
def test_formats_of_rows(dtype: str, compute: str, matmul: str) -> None:
    setup = state(ROW | {"dtype": dtype}).setup
    assert (setup.compute, setup.matmul) == (compute, matmul)


@pytest.mark.parametrize(
    ("cells", "says"),
    [
        ({"gpu": "Abacus"}, "unknown accelerator Abacus"),
        ({"n_gpus": ""}, " n_gpus "),
        ({"layers": "many"}, "layers: 'many' "),
        ({"layers": "-1"}, "layers: '-1' "),
        ({"hidden": "1e16"}, "hidden: '1e16' "),
        ({"mbs": "", "gbs": ""}, " mbs and gbs "),
        ({"layers": "", "model": "x"}, "sizes of model x "),
    ],
)
def test_rows_that_state_too_little_are_refused(cells: dict[str, str], says: str) -> None:
    with pytest.raises(RowRefused, match=says):
        state(ROW | cells)


def test_nothing_is_no_number() -> None:
    assert [number({"x": text}, "x", 7.0) for text in ("", " ", "nan", "None", "null", "3.5")] == [7, 7, 7, 7, 7, 3.5]
    assert number({}, "x") is None


def test_hybrids_of_rows_are_a_tenth_attention() -> None:
    row = ROW | {"family": "hybrid", "layers": "20"}
    model = state(row).setup.model
    assert isinstance(model, HybridModel)
    assert (model.mamba_layers, model.attention_layers, model.mlp_layers, model.expert_layers) == (9, 2, 9, 0)
    routed = state(row | {"n_experts": "8", "moe_ffn": "64", "top_k": "4"}).setup.model
    assert isinstance(routed, HybridModel) and routed.experts is not None
    assert (routed.mamba_layers, routed.mlp_layers, routed.expert_layers) == (9, 0, 9)
    assert (routed.experts.num_experts, routed.experts.top_k, routed.experts.expert_ffn_size) == (8, 4, 64)
    assert state(row | {"n_experts": "0"}).setup.model == model
    alone = state(row | {"heads": "", "ffn": "", "model": "mamba2"}).setup.model
    assert isinstance(alone, HybridModel)
    assert (alone.mamba_layers, alone.attention_layers, alone.mlp_layers) == (20, 0, 0)


def test_decoders_of_rows() -> None:
    model = state(ROW | {"kv_heads": "2", "head_dim": "64"}).setup.model
    assert isinstance(model, DecoderModel)
    assert (model.num_layers, model.hidden_size, model.num_heads, model.num_kv_heads) == (4, 1024, 8, 2)
    assert (model.head_dim, model.ffn_size, model.vocab_size) == (64, 4096, 1000)
    experts = ROW | {"n_experts": "8", "top_k": "1", "moe_ffn": "128", "shared_experts": "1"}
    routed = state(experts | {"ep": "4"}).setup
    assert isinstance(routed.model, DecoderModel) and routed.model.experts is not None
    assert (routed.model.experts.num_experts, routed.model.experts.shared_experts, routed.layout.ep) == (8, 1, 4)


def test_adapters_by_their_task() -> None:
    for cells in ({"task": "LoRA"}, {"metric": "LoRA max GPU RAM"}):
        assert state(ROW | cells).setup.trainable == 0.002


@pytest.mark.parametrize(
    ("intra", "gpus_per_node", "scaleup", "kind"),
    [
        ("NVLink", "8", 8, "nvswitch"),
        ("NVL72", "4", 72, "nvswitch"),
        ("PCIe 5", "4", 4, "pcie"),
        ("", "", 8, "nvswitch"),
    ],
)
def test_nodes_of_rows(intra: str, gpus_per_node: str, scaleup: int, kind: str) -> None:
    fabric = state(ROW | {"intra_node": intra, "gpus_per_node": gpus_per_node}).setup.fabric
    assert (fabric.scaleup_devices, fabric.chip.link_kind) == (scaleup, kind)
    assert kind != "pcie" or fabric.link_gb_per_s == 63


@pytest.mark.parametrize(
    ("columns", "rotates"),
    [
        ({"gated_mlp": "0", "kv_heads": ""}, False),
        ({"gated_mlp": "0", "kv_heads": "2"}, True),
        ({"gated_mlp": "1", "kv_heads": ""}, True),
    ],
    ids=["GPT", "shared keys", "gated"],
)
def test_what_has_neither_gates_nor_shared_keys_has_a_table_of_positions(
    columns: dict[str, str], rotates: bool
) -> None:
    assert state(ROW | columns).setup.model.rotates == rotates


# A row's framework, found by the names that conf/framework lists, and its facts in the row's use


MEASURED = Path(__file__).parents[2] / "data" / "measured"


def software_of(row: dict[str, str]) -> Software:
    return software_from(row, framework_of(row)[0])


@pytest.mark.parametrize(
    ("cells", "file"),
    [
        ({"framework": "NeMo/Megatron-Core", "year": "2025"}, "nemo_2025"),
        ({"framework": "Megatron-Bridge/Megatron-Core", "year": "2026"}, "nemo_2026_05"),
        ({"framework": "Megatron-Bridge", "year": "2025", "table": "25.10 NeMo Container"}, "nemo_2025"),
        ({"framework": "Megatron-Bridge", "year": "2025", "table": "25.11 NeMo Container"}, "nemo_2026_05"),
        ({"framework": "Megatron-Bridge", "year": "2026", "table": "26.06.01 NeMo Container"}, "nemo"),
        ({"framework": "NeMo", "year": "2025", "table": "v25.05"}, "nemo_2025"),
        ({"framework": "NeMo", "year": "2026", "table": "v3.26.06 and 126.06"}, "nemo_2026_05"),
        ({"framework": "Primus", "year": "2026"}, "primus"),
        ({"source": "MooreThreads/SimuMax", "framework": "Megatron-LM 0.14", "year": "2026"}, "megatron_plain"),
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
    with pytest.raises(UnknownFramework, match=r"Megatronic: .*conf/framework/.*megatron, "):
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


SUMMED = {"notes": "gradients accumulated in fp32"}


def test_deepspeed_keeps_bf16_gradients_beside_their_fp32_sums() -> None:
    row = {"framework": "Megatron-DeepSpeed", "dp_mode": "ddp_zero1", "dtype": "bf16"}
    assert software_of(row | {"year": "2024"}).grad_bytes == 6.0
    assert software_of(row | {"year": "2024", "dtype": "fp16"}).grad_bytes == 2.0
    assert software_of(row | {"year": "2022"}).grad_bytes == 2.0
    assert software_of(row | {"year": "2022"} | SUMMED).grad_bytes == 6.0


def test_gradients_summed_in_fp32_are_stepped_from_as_they_lie() -> None:
    row = {"framework": "Megatron-DeepSpeed", "dp_mode": "ddp_zero1", "dtype": "fp16"}
    assert software_of(row).step_bytes == 6.0
    assert software_of(row | {"dp_mode": "ddp"}).step_bytes == 8.0
    assert software_of(row | SUMMED).step_bytes == 0.0


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


def test_full_recomputation_by_blocks_leaves_the_number_of_layers_open() -> None:
    full = ROW | {"act_ckpt": "full", "framework": "Megatron-LM"}
    assert not state(full).recompute_open and state(full).setup.recompute == RECOMPUTE["full"]
    by_blocks = state(full | {"source": "MLPerf Training"})
    assert by_blocks.recompute_open and by_blocks.setup.recompute == RECOMPUTE["none"]
    assert not state(full | {"source": "MLPerf Training", "act_ckpt": "full_block(2 layers)"}).recompute_open


@pytest.mark.parametrize(("task", "framework", "window"), [
    ("sft", "NeMo", 256), ("lora", "NeMo", 256), ("pretrain", "NeMo", None), ("sft", "Megatron-LM", None),
])  # fmt: skip
def test_fine_tuning_packs_short_samples(task: str, framework: str, window: int | None) -> None:
    model = state(ROW | {"task": task, "framework": framework}).setup.model
    assert isinstance(model, DecoderModel)
    assert {layer.window for layer in model.layer_list} == {window}


def test_what_a_framework_compiles_by_default_is_compiled_where_a_row_does_not_say() -> None:
    stated = [software_of({"framework": "fms-fsdp", "compile": cell}).fused_kernels for cell in ("", "1", "0")]
    assert stated == [True, True, False]
    assert not software_of({"framework": "torchtitan", "compile": ""}).fused_kernels
