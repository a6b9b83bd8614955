"""Free text of a table of runs, read: networks and recompute modes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainspec_cli.planner.hardware.cluster import usual_gbit
from trainspec_cli.planner.setup import RECOMPUTE, Recompute
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec

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
