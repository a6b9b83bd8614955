"""A row of a table of measured runs -> the Setup it states; what it leaves empty is assumed, and listed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainspec_cli.planner.hardware.rates import find_accelerator, find_model
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.setup import Setup, Software, describe_software
from trainspec_cli.planner.validation.fit import UnknownFramework, framework_of
from trainspec_cli.planner.validation.prose import network_of, recompute_of
from trainspec_cli.recipe.field_types import LARGEST_OF
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import Layout, PipelineSchedule, Sharding, ZeroStage
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, LatentAttentionSpec, ModelSpec

Row = Mapping[str, str]
ADAPTER_SHARE = 0.002
"""Parameters of rank-16 adapters over the base's."""


class RowRefused(ValueError):  # noqa: N818 - an answer, not a fault
    """The row lacks what a prediction needs; the message says what."""


@dataclass(frozen=True)
class Stated:
    """The setup that a row states, ready to be predicted."""

    setup: Setup
    samples: float
    """Samples of a step, over all devices."""
    assumed: tuple[str, ...]
    recompute_open: bool
    """The row leaves the recompute open: the lightest that fits is taken."""


SHOWN_CHARS = 40
LARGEST_CELL = 1e15
COLUMNS = {"layers": "num_layers", "hidden": "hidden_size", "n_experts": "num_experts", "n_gpus": "num_nodes"}
"""Column -> the key whose largest value holds for it."""


def number(row: Row, key: str, default: float | None = None) -> float | None:
    text = (row.get(key) or "").strip()
    if not text or text.lower() in ("nan", "none", "null"):
        return default
    try:
        value = float(text)
    except ValueError:
        raise RowRefused(f"column {key}: {text[:SHOWN_CHARS]!r} is no number") from None
    if not 0 <= value <= LARGEST_OF.get(COLUMNS.get(key, key), LARGEST_CELL):
        raise RowRefused(f"column {key}: {text[:SHOWN_CHARS]!r} is beyond what is reckoned with")
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
    """Make the model from the sizes in the columns; by its name only where there are none."""
    if number(row, "layers") is None or number(row, "hidden") is None:
        known = find_model(row.get("model", ""))
        if known is None:
            raise RowRefused(f"the sizes of model {row.get('model') or '?'} are neither stated nor in conf/model")
        return known, () if known.unit == "samples" else ("model",)
    if "hybrid" in (row.get("family") or "") or "mamba" in (row.get("model") or "").lower():
        return hybrid_of(row)
    return decoder_of(row)


def experts_of(row: Row, layers: int, plain: DecoderModel) -> ExpertSpec | None:
    """`every` and `first_dense_layers` follow from the parameters: a table states neither."""
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
    from trainspec_cli.planner.workload import count_params

    options = [experts, replace(experts, every=2), replace(experts, first_dense_layers=1)]
    options.append(replace(experts, first_dense_layers=min(3, layers - 1)))
    return min(options, key=lambda option: abs(count_params(replace(plain, experts=option)) / 1e9 - total))


def latent_of(row: Row) -> LatentAttentionSpec | None:
    """DeepSeek's ranks, where the row names latent attention or leaves out the head's width as tables of it do."""
    name = (row.get("model") or "").lower() + (row.get("act_ckpt") or "")
    if "mla" in name or (number(row, "head_dim") is None and re.search(r"deepseek-?v[23]|kimi", name)):
        return LatentAttentionSpec(kv_lora_rank=512, q_lora_rank=1536)
    return None


def positions_of(row: Row, gated: bool) -> int:
    """Return the rows of a position table: tables do not state it. Rotations came with gates, or with keys that several
    queries share; what has neither is a GPT, with a table of positions or with ALiBi's slopes, which cost nothing."""
    is_gpt = not gated and whole(row, "kv_heads", whole(row, "heads", 1)) == whole(row, "heads", 1)
    return whole(row, "seq_len", 1) if is_gpt else 0


def decoder_of(row: Row) -> tuple[DecoderModel, tuple[str, ...]]:
    hidden = int(need(row, "hidden"))
    heads = whole(row, "heads", 1)
    layers = int(need(row, "layers"))
    head_dim = number(row, "head_dim") or hidden / heads
    stated = number(row, "gated_mlp")
    gated = stated is None or bool(stated)
    # A width that heads do not divide (bloom's trials) is kept by rounding the width of one head.
    model = DecoderModel(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=whole(row, "kv_heads", heads),
        head_dim=int(head_dim) if head_dim == int(head_dim) else round(head_dim),
        ffn_size=int(number(row, "ffn") or 4 * hidden),
        vocab_size=int(number(row, "vocab") or 32000),
        name=row.get("model", ""),
        gated_mlp=gated,
        mla=latent_of(row),
        learned_positions=positions_of(row, gated),
    )
    total = number(row, "params_b")
    experts = experts_of(row, layers, model)
    model = replace(model, experts=experts)
    if total and experts is None:
        from trainspec_cli.planner.workload import count_params

        options = [model, replace(model, tied_embeddings=True)]
        if stated is None:
            options += [replace(option, gated_mlp=False) for option in options]
        model = min(options, key=lambda option: abs(count_params(option) / 1e9 - total))
    assumed = tuple(key for key in ("ffn", "vocab", "head_dim") if number(row, key) is None)
    return model, assumed


def hybrid_of(row: Row) -> tuple[HybridModel, tuple[str, ...]]:
    """Tables state layers, not their pattern: a tenth attention, the rest half Mamba, half feed-forward or experts."""
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
    network = network_of(row.get("interconnect") or "", whole(row, "gpus_per_node", per_node), chip)
    if "pcie" in intra and "nvlink" not in intra and chip.link_kind != "pcie":
        chip = replace(chip, link_kind="pcie", link_gb_per_s=63.0 if "5" in intra else 31.0)
    assumed = ("interconnect",) if network.assumed and num_devices > scaleup else ()
    fabric = Fabric(chip, num_devices, per_node, scaleup, chip.link_gb_per_s, network.gbit_per_device, network.kind)
    return fabric, assumed


def layout_of(row: Row, num_devices: int, model: ModelSpec) -> Layout:
    tp = whole(row, "tp", 1)
    pp = whole(row, "pp", 1)
    cp = whole(row, "cp", 1)
    dp = whole(row, "dp", max(1, num_devices // (tp * pp * cp)))
    mode = (row.get("dp_mode") or "ddp").lower()
    shard, stage = sharding_of(mode, dp, cp, number(row, "shard_group"))
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


def sharding_of(mode: str, dp: int, cp: int, group: float | None) -> tuple[int, ZeroStage]:
    """-> (dp_shard, ZeRO stage). A shard group counts context-parallel ranks, which share the shards."""
    if "fsdp" in mode or "zero3" in mode or "hsdp" in mode or "zero2" in mode:
        shard = max(1, min(dp, round(group / cp))) if group else (min(8, dp) if "hsdp" in mode else dp)
        while dp % shard:
            shard -= 1
        return shard, 2 if "zero2" in mode else 3
    if "zero1" in mode or "distributed" in mode:
        return dp, 1
    return 1, 1


def formats_of(row: Row, chip: AcceleratorSpec) -> tuple[str, str]:
    """-> (compute, matmul)."""
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
    """Raises RowRefused where a needed column is empty or a label is unknown."""
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
    software, framework_open = software_of(row)
    images = model.unit == "samples"
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
        trainable=ADAPTER_SHARE if is_adapter(row) else 1.0,
        tabled=True,
    )
    opened = ("recompute",) * is_open + ("framework",) * framework_open
    return Stated(setup, samples, (*assumed, *assumed_network, *assumed_batch, *opened), is_open)


STATED_SUMS = re.compile(r"gradients? (?:are )?accumulated? in fp32|fp32 grad")
SHARDED = ("fsdp", "hsdp", "zero2", "zero3")
"""Words of the column dp_mode that say that parameters (with zero2, gradients) are sharded."""
QUANTISED_BYTES = {"nf4": 0.69, "nf4-dq": 0.64, "fp4": 0.69, "int8": 1.1}
"""Bytes a parameter of a quantised base under adapters: 4 bits, a scale for 64 (in 8 bits with -dq), and 1 bit for what
bitsandbytes keeps besides (litgpt's tables)."""


def software_of(row: Row) -> tuple[Software, bool]:
    """-> (the properties of the row's framework as the row uses it, whether the row leaves the framework open)."""
    try:
        facts, is_open = framework_of(row)
    except UnknownFramework as unknown:
        raise RowRefused(str(unknown)) from None
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
    compiled = (row.get("compile") or "").lower() in ("1", "1.0", "true")
    software = describe_software(facts, sharding, compiled, sums, wire)
    quantised = re.search(r"quant=(\S+)", row.get("dtype") or "")
    base_bytes = QUANTISED_BYTES.get(quantised.group(1)) if quantised else None
    return (software if base_bytes is None else replace(software, weight_bytes=base_bytes)), is_open


def is_adapter(row: Row) -> bool:
    return "lora" in (row.get("task") or "").lower() or "lora" in (row.get("metric") or "").lower()


def batch_of(row: Row, layout: Layout) -> tuple[float, int, float, tuple[str, ...]]:
    """-> (micro-batch, accumulation, samples a step, assumed). The stated global batch is kept."""
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
        accum = 4.0 * layout.pp * layout.virtual_stages  # enough to fill the pipeline
        samples = micro * accum * width
    accum = accum or max(1, round(samples / width / micro))
    if micro * accum * width != samples:
        micro = samples / width / accum
    return micro, int(accum), samples, ()
