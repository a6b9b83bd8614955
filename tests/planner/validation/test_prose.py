"""Free text of published tables, read."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.hardware.catalogue import find_accelerator, models
from trainspec_cli.planner.validation.prose import network_of, recompute_of, software_of
from trainspec_cli.spec.recipe.layout import Layout


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
    network = network_of(text, per_node, chip)
    assert network.gbit_per_device == pytest.approx(gbit)
    assert kind is None or network.kind == kind


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
    found, left_open = recompute_of({"act_ckpt": text}, models()["llama3_8b"], Layout())
    assert (found.matmul, left_open) == (matmul, is_open)
    assert found.layers == pytest.approx(layers)


def test_frameworks_by_name_and_year() -> None:
    old = software_of({"framework": "Megatron-LM", "year": "2022"})
    assert not old.fused_attention and not old.overlap_tp
    eager = software_of({"framework": "torchtitan", "compile": "0", "dp_mode": "fsdp_zero3"})
    assert not eager.fused_kernels and eager.weight_bytes == 4.0
    assert software_of({"framework": "torchtitan", "compile": "1"}).fused_kernels


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
    titan = software_of({"framework": "torchtitan", "dp_mode": "fsdp_zero3"})
    assert (titan.step_bytes, titan.step_temporary_bytes) == (0.0, 4.0)
    megatron = software_of({"framework": "Megatron-LM", "year": "2024"})
    assert (megatron.step_bytes, megatron.step_temporary_bytes) == (0.0, 0.0)


def test_flat_buckets_are_held_where_gradients_are_flattened() -> None:
    flat = software_of({"framework": "DeepSpeed", "dp_mode": "ddp_zero1"})
    assert flat.bucket_bytes > software_of({"framework": "torchtitan", "dp_mode": "fsdp_zero3"}).bucket_bytes
