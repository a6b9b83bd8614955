"""Free text of a table of runs, read: networks, recompute modes, frameworks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Software
from trainspec_cli.spec.recipe.cluster import AcceleratorSpec
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import ModelSpec

GENERATIONS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


@dataclass(frozen=True)
class NamedNetwork:
    gbit_per_device: float
    kind: str
    assumed: bool


def network_of(text: str, per_node: int, chip: AcceleratorSpec) -> NamedNetwork:
    """`8x400 Gbps/node IB`, `4x ConnectX-7 IB NDR 400Gb/s`, `400 Gbps/GPU class`: the compute network alone."""
    lower = text.lower()
    kind = kind_of(lower)
    compute = re.search(r"compute:([^;]*?)(?:,\s*management|,\s*storage|$)", lower)
    part = compute.group(1) if compute else lower
    if not compute and "storage" in part:
        part = re.sub(r"storage[^,]*,", "", part)
    each = re.search(r"(\d+)\s*x\s*(?:\(?[a-z0-9 .\-]*?)?\s(\d+)\s*g(?:b|bps|bit|be)", " " + part.replace("x", "x ", 1))
    plain = re.search(r"(\d+)\s*x\s*(\d+)\s*g", part)
    per_gpu = re.search(r"(\d+)\s*gbps\s*/\s*gpu", part)
    per_host = re.search(r"(\d+)\s*gbps\s*/\s*node", part)
    bytes_each = re.search(r"pcie-nic:\s*(\d+)\s*gb/s", part)
    if per_gpu:
        return NamedNetwork(float(per_gpu.group(1)), kind, False)
    if plain:
        return NamedNetwork(int(plain.group(1)) * int(plain.group(2)) / per_node, kind, False)
    if per_host:
        return NamedNetwork(int(per_host.group(1)) / per_node, kind, False)
    if bytes_each:
        return NamedNetwork(min(400.0, int(bytes_each.group(1)) * 8 / per_node), kind, False)
    if each:
        return NamedNetwork(int(each.group(1)) * int(each.group(2)) / per_node, kind, False)
    for name, rate in GENERATIONS.items():
        if name in part:
            return NamedNetwork(float(rate), kind, True)
    return NamedNetwork(usual_gbit(chip), kind, True)


def usual_gbit(chip: AcceleratorSpec) -> float:
    """Gbit/s per device of the network that servers of a chip's class are sold with."""
    peak = chip.bf16_tflops or chip.fp16_tflops
    if chip.link_kind == "pcie":
        return 50.0
    return 400.0 if peak > 500 else 200.0 if peak > 200 else 100.0


def kind_of(lower: str) -> str:
    if "omni" in lower:
        return "omnipath"
    if "efa" in lower:
        return "efa"
    if "roc" in lower:
        return "roce"
    if ("ethernet" in lower or "gbe" in lower) and "infiniband" not in lower and " ib" not in lower:
        return "ethernet"
    return "infiniband"


def recompute_of(row: Mapping[str, str], model: ModelSpec, layout: Layout) -> tuple[Recompute, bool]:
    """-> (recompute, whether the row leaves it open)."""
    text = (row.get("act_ckpt") or "unstated").lower()
    if text in ("none", "no", "0", "off"):
        return RECOMPUTE["none"], False
    blocks = re.match(r"full_block\((\d+)", text)
    if blocks:
        stage = max(1.0, model.num_layers / layout.pp)
        return Recompute(1.0, 1.0, 1.0, layers=min(1.0, int(blocks.group(1)) / stage)), False
    if text.startswith("full"):
        return RECOMPUTE["full"], False
    if text.startswith("selective_op"):
        return RECOMPUTE["selective_op"], False
    every = re.match(r"selective_layer\((\d+)", text)
    if every:
        return Recompute(1.0, 1.0, 1.0, layers=1 / max(1, int(every.group(1)))), False
    if text.startswith("selective("):
        return Recompute(matmul=0.05, elementwise=0.3, attention=1.0 if "core" in text else 0.0), False
    if text.startswith("selective"):
        return RECOMPUTE["selective"], False
    if "remat" in text:
        return Recompute(attention=1.0, elementwise=1.0), False
    return RECOMPUTE["none"], True


FUSED = r"megatron|nemo|maxtext|paxml|pax|jax|xla|nvidia|ngc|mxnet|rocm|apex|transformer.?engine|mlperf|habana|optimum"


FLAT_STEP_BYTES = 6.0
"""A shard's gradients copied to fp32, and flat in 2 bytes before (DeepSpeed's ZeRO-1 with a fused Adam): with the
states' 12, the 18 bytes that fall with the ranks in the tables of BLOOM's trials (17.8 by least squares)."""
WHOLE_STEP_BYTES = 8.0
"""Bytes of all gradients where ZeRO does not part them: each copied to fp32, the copies flat (DeepSpeed's ZeRO-0)."""
SHARDED = re.compile(r"fsdp|hsdp|zero2|zero3")
FLAT_BUCKET_BYTES = 3 * 5e8 * 2.0
"""Two reduce buckets and a gather bucket of 5e8 elements (DeepSpeed's default; InternEvo's are of 2**29)."""
LIST_STEP_BYTES = 12.0
"""Temporaries of AdamW over lists of sharded tensors, the clipped gradients among them (tables of InternEvo); half as
much where the gradients' flat copies serve."""
CAST_BACK_BYTES = 2.0
"""The updated parameters in 2 bytes, before they replace those that the model computes with."""
TORCH_STEP_BYTES = 4.0
"""One temporary of PyTorch's AdamW over lists of tensors."""


BLOOM_FRAMEWORK, BLOOM_YEAR = "megatron-deepspeed", 2022.0
"""Framework and year of bigscience's trials, where a table of them states neither."""


def framework_of(row: Mapping[str, str]) -> str:
    """Return the framework as stated, else the one that the row's project is known to train with."""
    stated = (row.get("framework") or "").lower()
    if stated:
        return stated
    source = (row.get("source") or "").lower()
    return f"{source} {BLOOM_FRAMEWORK}" if "bigscience" in source else source


def year_of(row: Mapping[str, str]) -> float:
    source = row.get("source") or ""
    cited = re.search(r"\b(20[12]\d)\b", source)
    usual = BLOOM_YEAR if "bigscience" in source else 2024
    return float(row.get("year") or (cited.group(1) if cited else usual))


def step_bytes_of(name: str, dp_mode: str, grad_bytes: float) -> tuple[float, float]:
    """-> (flat copies, temporaries) of a parameter while the optimizer steps."""
    if "deepspeed" in name:
        accumulated = grad_bytes > 4.0  # in fp32, and flat: what the optimizer needs is there
        return 0.0 if accumulated else WHOLE_STEP_BYTES if dp_mode == "ddp" else FLAT_STEP_BYTES, 0.0
    if re.search(FUSED, name) or "korthikanti" in name:
        return 0.0, 0.0
    if re.search(r"torch|composer|foundry|litgpt|hugging|accelerate|titan", name):
        return 0.0, TORCH_STEP_BYTES
    if SHARDED.search(dp_mode):
        return 0.0, LIST_STEP_BYTES
    return FLAT_STEP_BYTES + CAST_BACK_BYTES, LIST_STEP_BYTES / 2


def grad_bytes_of(row: Mapping[str, str], name: str, half: bool) -> float:
    """2 in the compute format, 4 in fp32; DeepSpeed's bf16 optimizer keeps both (its first tables, of 2022, do not)."""
    stated = bool(re.search(r"gradients? (?:are )?accumulated? in fp32|fp32 grad", (row.get("notes") or "").lower()))
    if "deepspeed" in name:
        late = year_of(row) > 2022 and (row.get("dtype") or "bf16").lower() == "bf16"
        return 6.0 if stated or late else 2.0
    return 2.0 if half and not stated else 4.0


def base_weight_bytes(row: Mapping[str, str]) -> float | None:
    """Bytes a parameter of a quantised base under adapters: 4 bits, a scale for 64 (in 8 bits with -dq), and 1 bit for
    what bitsandbytes keeps besides (litgpt's tables)."""
    found = re.search(r"quant=(\S+)", row.get("dtype") or "")
    return {"nf4": 0.69, "nf4-dq": 0.64, "fp4": 0.69, "int8": 1.1}.get(found.group(1)) if found else None


def software_of(row: Mapping[str, str]) -> Software:
    """Return the properties that a framework of that name and year is known to have."""
    name, year = framework_of(row), year_of(row)
    compiled = (row.get("compile") or "") in ("1", "1.0", "True", "true")
    mlperf = "mlperf" in (row.get("source") or "").lower()
    old = year < 2023 and ("megatron" in name or "korthikanti" in name)
    pure = "pure" in (row.get("notes") or "").lower()
    half_gradients = mlperf or bool(re.search(r"nemo|bridge|deepspeed", name))
    sharded = bool(SHARDED.search(row.get("dp_mode") or ""))
    grad_bytes = grad_bytes_of(row, name, pure or half_gradients)
    flat_bytes, temporary_bytes = step_bytes_of(name, (row.get("dp_mode") or "ddp").lower(), grad_bytes)
    flat = "deepspeed" in name or flat_bytes > 0
    return Software(
        fused_attention=not old,
        attention_generation=9 if mlperf or re.search(FUSED, name) else 1 if year <= 2023 else 2,
        fused_kernels=compiled
        or mlperf
        or (not old and bool(re.search(FUSED, name)))
        or (old and "deepspeed" not in name),
        fused_loss=compiled or mlperf or bool(re.search(r"foundry|composer|maxtext|pax|jax|liger|flash", name)),
        fused_accumulation="deepspeed" not in name and bool(re.search(FUSED, name)),
        overlap_dp="deepspeed" not in name and not old,
        overlap_tp=not old,
        split_sends="deepspeed" not in name,
        grouped_experts=year >= 2026 or not year,
        graphs=mlperf or bool(re.search(r"maxtext|pax|jax", name)),
        reduce_bytes=2.0 if pure or half_gradients else 4.0,
        grad_bytes=grad_bytes,
        bucket_bytes=FLAT_BUCKET_BYTES if flat and not sharded else Software.bucket_bytes,
        step_bytes=flat_bytes,
        step_temporary_bytes=temporary_bytes,
        model_groups=bool(re.search(r"megatron|nemo|bridge|intern", name)),
        shifted_logits=bool(re.search(r"litgpt|hugging|accelerate", name)),
        weight_bytes=base_weight_bytes(row) or (4.0 if sharded else 2.0),
        master_bytes=0.0 if sharded else 4.0,
    )
