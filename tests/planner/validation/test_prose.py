"""Free text of published tables, read."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.hardware.rates import find_accelerator, models
from trainspec_cli.planner.validation.table import RowRefused, network_of, number, recompute_of, state
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel, HybridModel


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
        ({"n_gpus": ""}, "column n_gpus is empty"),
        ({"layers": "many"}, "column layers: 'many' is no number"),
        ({"layers": "-1"}, "column layers: '-1' is beyond"),
        ({"hidden": "1e16"}, "column hidden: '1e16' is beyond"),
        ({"mbs": "", "gbs": ""}, "columns mbs and gbs are empty"),
        ({"layers": "", "model": "x"}, "the sizes of model x are neither stated"),
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
    assert state(ROW | {"task": "LoRA"}).setup.trainable == state(ROW | {"metric": "LoRA max GPU RAM"}).setup.trainable
    assert state(ROW | {"task": "LoRA"}).setup.trainable == 0.002


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
