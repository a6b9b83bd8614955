"""Read a row in a table of measured runs as a Setup. Empty values are replaced by assumptions, which are listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from trainspec_cli.planner.hardware.cluster import Fabric, usual_gbit
from trainspec_cli.planner.hardware.rates import (
    find_accelerator,
    find_model,
    load_group,
    without_defaults,
)
from trainspec_cli.planner.setup import RECOMPUTE, Recompute, Setup, Software, describe_software
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.field_types import LARGEST_OF
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.framework import FrameworkSpec
from trainspec_cli.recipe.keys.layout import Layout, PipelineSchedule, Sharding, ZeroStage
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, LatentAttentionSpec, ModelSpec
from trainspec_cli.recipe.records import from_plain

Row = Mapping[str, str]
SHARDED = ("fsdp", "hsdp", "zero2", "zero3")
"""Words in the column dp_mode that mean sharded parameters (for zero2, sharded gradients)."""
ADAPTER_SHARE = 0.002
"""Parameters of rank-16 adapters as a fraction of those of the base."""


class RowRefused(ValueError):  # noqa: N818 - a result, not a failure
    """A value that a prediction needs is missing from the row; the message states which one."""


@dataclass(frozen=True)
class Stated:
    """The setup of a row, ready for prediction."""

    setup: Setup
    samples: float
    """Number of samples per step, over all devices."""
    assumed: tuple[str, ...]
    recompute_open: bool
    """True if the row does not state the recomputation; the lightest one that fits is then used."""


SHOWN_CHARS = 40
LARGEST_CELL = 1e15
COLUMNS = {"layers": "num_layers", "hidden": "hidden_size", "n_experts": "num_experts", "n_gpus": "num_nodes"}
"""Column -> the recipe key whose maximum also applies to the column."""


def number(row: Row, key: str, default: float | None = None) -> float | None:
    text = (row.get(key) or "").strip()
    if not text or text.lower() in ("nan", "none", "null"):
        return default
    try:
        value = float(text)
    except ValueError:
        raise RowRefused(f"column {key}: {text[:SHOWN_CHARS]!r} is not a number") from None
    if not 0 <= value <= LARGEST_OF.get(COLUMNS.get(key, key), LARGEST_CELL):
        raise RowRefused(f"column {key}: {text[:SHOWN_CHARS]!r} is out of range")
    return value


def whole(row: Row, key: str, default: int) -> int:
    value = number(row, key)
    return default if value is None else max(1, round(value))


def need(row: Row, key: str) -> float:
    value = number(row, key)
    if value is None:
        raise RowRefused(f"column {key} is empty")
    return value


def model_of(row: Row) -> tuple[ModelSpec, tuple[str, ...]]:
    """Build the model from the sizes in the columns or, if there are none, from its name."""
    if number(row, "layers") is None or number(row, "hidden") is None:
        known = find_model(row.get("model", ""))
        if known is None:
            raise RowRefused(f"the sizes of model {row.get('model') or '?'} are neither stated nor in conf/model")
        return known, () if known.unit == "samples" else ("model",)
    if "hybrid" in (row.get("family") or "") or "mamba" in (row.get("model") or "").lower():
        return hybrid_of(row)
    return decoder_of(row)


def experts_of(row: Row, layers: int, plain: DecoderModel) -> ExpertSpec | None:
    """Return the experts. `every` and `first_dense_layers` are derived from the parameter count, because tables contain
    neither."""
    count = number(row, "n_experts")
    if not count or count <= 1:
        return None
    experts = ExpertSpec(
        num_experts=int(count),
        top_k=whole(row, "top_k", 2),
        expert_ffn_size=int(number(row, "moe_ffn") or need(row, "ffn")),
        shared_experts=int(number(row, "shared_experts", 0) or 0),
    )
    total = number(row, "params_b")
    if not total:
        return experts
    options = [experts, replace(experts, every=2), replace(experts, first_dense_layers=1)]
    options.append(replace(experts, first_dense_layers=min(3, layers - 1)))
    return min(options, key=lambda option: abs(count_params(replace(plain, experts=option)) / 1e9 - total))


def decoder_of(row: Row) -> tuple[DecoderModel, tuple[str, ...]]:
    hidden = int(need(row, "hidden"))
    heads = whole(row, "heads", 1)
    layers = int(need(row, "layers"))
    head_dim = number(row, "head_dim") or hidden / heads
    stated = number(row, "gated_mlp")
    gated = stated is None or bool(stated)
    kv_heads = whole(row, "kv_heads", heads)
    # Tables do not state position encodings. Models with gates, or with keys shared by several queries, use rotary
    # embeddings. Others are GPTs with learned position embeddings or ALiBi slopes, which cost nothing.
    is_gpt = not gated and kv_heads == heads
    # Use DeepSeek's latent widths if the row names latent attention or omits the head width, as tables of such models
    # do.
    text = (row.get("model") or "").lower() + (row.get("act_ckpt") or "")
    is_latent = "mla" in text or (number(row, "head_dim") is None and re.search(r"deepseek-?v[23]|kimi", text))
    # If the hidden width is not divisible by the number of heads (bloom's trials), keep it, and round the width of a
    # head.
    model = DecoderModel(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(head_dim) if head_dim == int(head_dim) else round(head_dim),
        ffn_size=int(number(row, "ffn") or 4 * hidden),
        vocab_size=int(number(row, "vocab") or 32000),
        name=row.get("model", ""),
        gated_mlp=gated,
        mla=LatentAttentionSpec(kv_lora_rank=512, q_lora_rank=1536) if is_latent else None,
        learned_positions=whole(row, "seq_len", 1) if is_gpt else 0,
    )
    total = number(row, "params_b")
    experts = experts_of(row, layers, model)
    model = replace(model, experts=experts)
    if total and experts is None:
        options = [model, replace(model, tied_embeddings=True)]
        if stated is None:
            options += [replace(option, gated_mlp=False) for option in options]
        model = min(options, key=lambda option: abs(count_params(option) / 1e9 - total))
    assumed = tuple(key for key in ("ffn", "vocab", "head_dim") if number(row, key) is None)
    return model, assumed


def hybrid_of(row: Row) -> tuple[HybridModel, tuple[str, ...]]:
    """Return the hybrid model. Tables state the number of layers but not their pattern. The assumption is that a tenth
    is attention, and that the rest is half Mamba, half feed-forward or experts."""
    layers = int(need(row, "layers"))
    hidden = int(need(row, "hidden"))
    heads = whole(row, "heads", 1)
    attention = max(1, round(layers * 0.1)) if number(row, "heads") else 0
    rest = layers - attention
    routed = bool(number(row, "n_experts"))
    plain = bool(number(row, "ffn")) or routed
    mamba = (rest + 1) // 2 if plain else rest
    width = int(number(row, "ffn") or 0)
    experts = None
    if routed:
        experts = ExpertSpec(
            num_experts=int(need(row, "n_experts")),
            top_k=whole(row, "top_k", 2),
            expert_ffn_size=int(number(row, "moe_ffn") or width),
            shared_experts=int(number(row, "shared_experts", 0) or 0),
        )
    model = HybridModel(
        hidden_size=hidden,
        vocab_size=int(number(row, "vocab") or 32000),
        mamba_layers=mamba,
        attention_layers=attention,
        mlp_layers=0 if routed else rest - mamba,
        expert_layers=rest - mamba if routed else 0,
        num_heads=heads,
        num_kv_heads=whole(row, "kv_heads", heads),
        head_dim=int(number(row, "head_dim") or 128),
        ffn_size=width,
        gated_mlp=bool(number(row, "gated_mlp", 0.0)),
        experts=experts,
        name=row.get("model", ""),
    )
    return model, ("layer pattern",)


def fabric_of(row: Row, chip: AcceleratorSpec, num_devices: int) -> tuple[Fabric, tuple[str, ...]]:
    per_node = min(whole(row, "gpus_per_node", min(8, num_devices)), max(num_devices, 1))
    intra = (row.get("intra_node") or "").lower()
    rack = "nvl72" in intra or chip.name in ("GB200", "GB300")
    scaleup = 72 if rack else per_node
    network = row.get("interconnect") or ""
    gbit_per_s, kind, is_assumed = network_of(network, whole(row, "gpus_per_node", per_node), chip)
    if "pcie" in intra and "nvlink" not in intra and chip.link_kind != "pcie":
        chip = replace(chip, link_kind="pcie", link_gb_per_s=63.0 if "5" in intra else 31.0)
    assumed = ("interconnect",) if is_assumed and num_devices > scaleup else ()
    fabric = Fabric(chip, num_devices, per_node, scaleup, chip.link_gb_per_s, gbit_per_s, kind)
    return fabric, assumed


def layout_of(row: Row, num_devices: int, model: ModelSpec) -> Layout:
    tp = whole(row, "tp", 1)
    pp = whole(row, "pp", 1)
    cp = whole(row, "cp", 1)
    dp = whole(row, "dp", max(1, num_devices // (tp * pp * cp)))
    mode = (row.get("dp_mode") or "ddp").lower()
    shard = 1
    stage: ZeroStage = 1
    if any(word in mode for word in SHARDED):
        group = number(row, "shard_group")  # this includes context-parallel ranks
        shard = max(1, min(dp, round(group / cp))) if group else (min(8, dp) if "hsdp" in mode else dp)
        while dp % shard:
            shard -= 1
        stage = 2 if "zero2" in mode else 3
    elif "zero1" in mode or "distributed" in mode:
        shard = dp
    vpp = whole(row, "vpp", 1) if pp > 1 else 1
    schedule: PipelineSchedule = "interleaved" if vpp > 1 or "interleaved" in (row.get("pp_schedule") or "") else "1f1b"
    etp = re.search(r"ETP=(\d+)", row.get("notes") or "")
    ep = whole(row, "ep", 1) if model.experts else 1
    return Layout(
        dp_replicate=max(1, dp // shard),
        dp_shard=shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        zero_stage=stage,
        etp=int(etp.group(1)) if etp else 1,
        sequence_parallel=bool(number(row, "sp", 1.0)) if tp > 1 else False,
        pipeline_schedule=schedule,
        virtual_stages=vpp,
    )


def formats_of(row: Row, chip: AcceleratorSpec) -> tuple[str, str]:
    """Return (the compute format, the matmul format)."""
    text = (row.get("dtype") or "bf16").lower()
    half = "bf16" if chip.bf16_tflops else "fp16"
    for name in ("mxfp8", "nvfp4", "fp8"):
        if text.startswith(name):
            return half, name
    if text in ("fp32", "tf32"):
        return text, text if chip.tf32_tflops or text == "fp32" else "fp32"
    if text == "fp16":
        return "fp16", "fp16"
    return half, half


def state(row: Row) -> Stated:
    """Read a row. Raises RowRefused if a required column is empty or a label is unknown."""
    chip = find_accelerator(row.get("gpu") or "")
    if chip is None:
        raise RowRefused(f"unknown accelerator {row.get('gpu') or '?'}: describe it in conf/accelerator")
    num_devices = int(need(row, "n_gpus"))
    model, assumed = model_of(row)
    fabric, assumed_network = fabric_of(row, chip, num_devices)
    layout = layout_of(row, num_devices, model)
    compute, matmul = formats_of(row, chip)
    micro, accum, samples, assumed_batch = batch_of(row, layout)
    recompute, is_open = recompute_of(row, model, layout)
    facts, framework_open = framework_of(row)
    if facts.block_recompute and (row.get("act_ckpt") or "").lower() == "full":
        recompute, is_open = RECOMPUTE["none"], True
    software = software_of(row, facts)
    if facts.packed_tokens and row.get("task") in ("sft", "lora") and isinstance(model, DecoderModel):
        model = replace(model, sliding_window=facts.packed_tokens, global_attention_every=0)
    images = model.unit == "samples"
    is_adapter = any("lora" in (row.get(column) or "").lower() for column in ("task", "metric"))
    setup = Setup(
        model=model,
        layout=layout,
        fabric=fabric,
        seq_len=1 if images else int(need(row, "seq_len")),
        micro_batch_size=micro,
        grad_accum=accum,
        compute=compute,
        matmul=matmul,
        recompute=recompute,
        software=software,
        trainable=ADAPTER_SHARE if is_adapter else 1.0,
        tabled=True,
    )
    opened = ("recompute",) * is_open + ("framework",) * framework_open
    return Stated(setup, samples, (*assumed, *assumed_network, *assumed_batch, *opened), is_open)


STATED_SUMS = re.compile(r"gradients? (?:are )?accumulated? in fp32|fp32 grad")
QUANTISED_BYTES = {"nf4": 0.69, "nf4-dq": 0.64, "fp4": 0.69, "int8": 1.1}
"""Bytes per parameter of a quantised base under adapters: 4 bits, one scale per 64 weights (8-bit with -dq), and 1 bit
for bitsandbytes' other data (litgpt's tables)."""


def software_of(row: Row, facts: FrameworkSpec) -> Software:
    """Return the framework's properties for this row's run."""
    mode = (row.get("dp_mode") or "ddp").lower()
    notes = (row.get("notes") or "").lower()
    sharding: Sharding = "zero1" if "zero1" in mode or "distributed" in mode else "replicated"
    if any(word in mode for word in SHARDED):
        sharding = "zero3"
    half = (row.get("dtype") or "bf16").lower() == "fp16"
    sums = facts.accumulate_fp16 if half else facts.accumulate
    wire = facts.reduce
    if "pure" in notes:
        sums = wire = "compute"
    elif STATED_SUMS.search(notes):
        sums = "fp32"
    stated = (row.get("compile") or "").lower()
    compiled = stated in ("1", "1.0", "true") if stated else facts.compiles
    software = describe_software(facts, sharding, compiled, sums, wire)
    quantised = re.search(r"quant=(\S+)", row.get("dtype") or "")
    base_bytes = QUANTISED_BYTES.get(quantised.group(1)) if quantised else None
    return software if base_bytes is None else replace(software, weight_bytes=base_bytes)


def batch_of(row: Row, layout: Layout) -> tuple[float, int, float, tuple[str, ...]]:
    """Return (micro-batch size, accumulation, samples per step, assumptions). A specified global batch is kept."""
    micro = number(row, "mbs")
    accum = number(row, "grad_accum")
    samples = number(row, "gbs")
    width = layout.data_parallel_size
    if samples is None:
        if micro is None:
            raise RowRefused("columns mbs and gbs are empty")
        samples = micro * (accum or 1) * width
    if micro is None and accum is None:
        return (
            max(1.0, samples / width) if layout.pp == 1 else 1.0,
            (1 if layout.pp == 1 else max(1, round(samples / width))),
            samples,
            ("mbs",),
        )
    if micro is None:
        assert accum is not None
        return samples / width / accum, int(accum), samples, ("mbs",)
    if accum is None and number(row, "gbs") is None and layout.pp > 1:
        accum = 4.0 * layout.pp * layout.virtual_stages  # enough micro-batches to fill the pipeline
        samples = micro * accum * width
    accum = accum or max(1, round(samples / width / micro))
    if micro * accum * width != samples:
        micro = samples / width / accum
    return micro, int(accum), samples, ()


GENERATIONS = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


def network_of(text: str, per_node: int, chip: AcceleratorSpec) -> tuple[float, str, bool]:
    """Parse `8x400 Gbps/node IB`, `4x ConnectX-7 IB NDR 400Gb/s` or `400 Gbps/GPU class`. Return (Gbit/s per device,
    kind of network, whether the rate is assumed) for the compute network."""
    lower = text.lower()
    kind = "infiniband"
    if "omni" in lower:
        kind = "omnipath"
    elif "efa" in lower:
        kind = "efa"
    elif "roc" in lower:
        kind = "roce"
    elif ("ethernet" in lower or "gbe" in lower) and "infiniband" not in lower and " ib" not in lower:
        kind = "ethernet"
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
        return float(per_gpu.group(1)), kind, False
    if plain:
        return int(plain.group(1)) * int(plain.group(2)) / per_node, kind, False
    if per_host:
        return int(per_host.group(1)) / per_node, kind, False
    if bytes_each:
        return min(400.0, int(bytes_each.group(1)) * 8 / per_node), kind, False
    if each:
        return int(each.group(1)) * int(each.group(2)) / per_node, kind, False
    named = (float(rate) for name, rate in GENERATIONS.items() if name in part)
    return next(named, usual_gbit(chip)), kind, True


def recompute_of(row: Mapping[str, str], model: ModelSpec, layout: Layout) -> tuple[Recompute, bool]:
    """Return (recomputation, whether the row leaves it open)."""
    text = (row.get("act_ckpt") or "unstated").lower()
    if likely := re.match(r"unstated\(likely ([^)]+)\)", text):
        text = likely.group(1)
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


# The framework of a row, found by exact matches of full words with the names listed in the files of conf/framework.


UNSTATED = "pytorch"
"""The file in conf/framework for rows that do not name a framework; it describes plain PyTorch."""


class UnknownFramework(RowRefused):
    """No file has the framework's name; the message lists the files and what to write."""


@lru_cache(maxsize=1)
def frameworks() -> dict[str, FrameworkSpec]:
    """Return every framework in conf/framework by file name."""
    return load_group("framework", lambda values: from_plain(FrameworkSpec, without_defaults(values)))


def framework_of(row: Mapping[str, str]) -> tuple[FrameworkSpec, bool]:
    """Return (the framework as of the row's date, whether it is assumed because the row does not name one). Raises
    UnknownFramework.

    It looks first for a file that claims the entire table, then in the column `framework` or, if that is empty, in
    `source`."""
    stated = (row.get("framework") or "").strip()
    source = (row.get("source") or "").strip()
    claimed = [
        (one, table)
        for one in frameworks().values()
        for table in one.tables
        if table.source.casefold() == source.casefold()
    ]
    date = date_of(row)
    if date is None and claimed and claimed[0][1].year:
        date = claimed[0][1].year, 1
    if claimed:
        return of_date([one for one, _ in claimed], date), False
    named = named_in(stated or source)
    if named:
        return of_date(named, date), False
    if stated:
        there_are = ", ".join(sorted(frameworks()))
        raise UnknownFramework(f"unknown framework {stated[:40]}: write conf/framework/NAME.yaml (known: {there_are})")
    return frameworks()[UNSTATED], True


RELEASE = re.compile(r"(?<![\d.])v?(2\d)\.(0[1-9]|1[0-2])(?![\d])")
"""A release named by year and month: `25.11 NeMo Container`, `v25.05`."""


def date_of(row: Row) -> tuple[int, int] | None:
    """Return the year and month of a row's software: those of the release that its table names, or the beginning of
    its year."""
    release = RELEASE.search(row.get("table") or "")
    if release:
        return 2000 + int(release.group(1)), int(release.group(2))
    return (round(float(row["year"])), 1) if row.get("year") else None


def named_in(text: str) -> list[FrameworkSpec]:
    """Return the versions of the first framework that a text names. If two names start at the same word, the longer one
    wins."""
    words = words_of(text)
    for start in range(len(words)):
        found: dict[tuple[str, ...], list[FrameworkSpec]] = {}
        for one in frameworks().values():
            for name in set(map(words_of, one.names)):
                if name and words[start : start + len(name)] == name:
                    found.setdefault(name, []).append(one)
        if found:
            return found[max(found, key=len)]
    return []


@lru_cache(maxsize=1024)
def words_of(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9.]+", text.casefold()))


def of_date(versions: list[FrameworkSpec], date: tuple[int, int] | None) -> FrameworkSpec:
    """Return the version in use in the given month, or the newest one if the date is unknown."""
    order = sorted(versions, key=last_month)
    return next((one for one in order if date is not None and last_month(one) >= date), order[-1])


def last_month(version: FrameworkSpec) -> tuple[int, int]:
    return version.until_year or 10**4, version.until_month
