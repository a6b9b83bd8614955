"""Rules for the model and its layout: axes, sizes, networks, pools, exchange formats, replica groups and layout
changes. Values that are `auto` are left to the planner."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import (
    ConvModel,
    DecoderModel,
    HybridModel,
    TextModel,
    TransformersModel,
    departs,
)
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import (
    GROUPED_ROWS,
    NF4_BLOCK,
    ONLY_REHEARSED,
    FaultSyntaxError,
    parse_faults,
)
from trainspec_cli.recipe.records import UNKNOWN


def size_of(layout: LayoutSpec, axis: str) -> int:
    """Return the size of an axis. An axis left to the planner does not restrict anything yet, so it is treated as 1."""
    size = getattr(layout, axis)
    return 1 if size == AUTO else int(size)


def pipeline_of(layout: LayoutSpec, virtual_stages: int = 1) -> Layout:
    """Return a layout with only the pipeline's axis and schedule, where `auto` means no pipeline and 1F1B."""
    schedule = layout.pipeline_schedule
    return Layout(
        pp=size_of(layout, "pp"),
        pipeline_schedule="1f1b" if schedule == AUTO else schedule,
        virtual_stages=virtual_stages,
    )


def tensor_parallel(spec: RunSpec) -> Iterator[Problem]:
    """Require that each tp rank gets complete heads, and equal parts of the feed-forward and the vocabulary."""
    tp = size_of(spec.layout, "tp")
    if tp == 1:
        return
    if reason := spec.model.record.refuses.get("tp"):
        yield _spread_alone("tp", reason)
        return
    if spec.train.loss:
        yield _spread_alone("tp", f"it shards the vocabulary, but {spec.train.loss} (`train.loss`) needs all logits")
    for field in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size", "mamba_heads", "mamba_groups"):
        # A family without this size has nothing to shard there.
        size = getattr(spec.model, field, 0)
        if size % tp:
            yield _indivisible("tp", tp, f"model.{field}", size)
    model = spec.model
    if isinstance(model, DecoderModel) and model.qk_norm and model.qk_norm_over == "all" and model.norm == "layer":
        yield _spread_alone("tp", "it splits heads, but a LayerNorm of queries and keys covers all of them together")
    if spec.layout.sequence_parallel:
        # Each cp rank has part of the sequence, which the tp ranks divide further.
        yield from _sequence(spec, size_of(spec.layout, "cp") * tp, "cp x tp")
        if spec.model.learned_positions:
            message = "learned position embeddings need full sequences, but sequence parallelism divides them"
            yield Problem("illegal_layout", message, "layout.sequence_parallel", "set layout.sequence_parallel=false")
    elif spec.model.experts is not None:
        message = "experts with tp need sequence parallelism; otherwise, every tp rank would route the same tokens"
        yield Problem("illegal_layout", message, "layout.sequence_parallel", "set layout.sequence_parallel=true")


def adapters(spec: RunSpec) -> Iterator[Problem]:
    """Reject adapters where frozen layers and their adapters cannot be plain linear layers."""
    if not spec.lora.rank:
        if spec.lora.base != "full":
            message = f"`lora.base` is {spec.lora.base}, but `lora.rank` is 0: trained weights are not quantised"
            yield Problem("contradiction", message, "lora.base", "set lora.rank=16, or lora.base=full")
        return
    # Each family lists what it does not support, so new families need no changes here.
    if reason := spec.model.record.refuses.get("lora"):
        message = f"{reason}; `model.family` is {spec.model.family}"
        yield Problem("unsupported", message, "lora.rank", "set lora.rank=0")
    if pipeline_of(spec.layout).splits_backward:
        got = f"adapters do not support the split backward pass of {spec.layout.pipeline_schedule}"
        yield Problem("unsupported", got, "layout.pipeline_schedule", "set layout.pipeline_schedule=1f1b")
    if spec.precision.matmul == "fp8":
        message = "layers with adapters do not support fp8"
        yield Problem("unsupported", message, "precision.matmul", "set precision.matmul=compute")
    if not spec.lora.expert_targets or isinstance(spec.model, TransformersModel):
        return
    if spec.lora.magnitude:
        message = (
            "`lora.magnitude` needs matrices of their own, but those of experts are stacked (PEFT has no such adapters)"
        )
        yield Problem("unsupported", message, "lora.magnitude", "set lora.magnitude=false, or remove experts.*")
    if not isinstance(spec.model, DecoderModel) or spec.model.experts is None:
        message = f"`lora.targets` names {' and '.join(spec.lora.expert_targets)}, but the model has no routed experts"
        yield Problem("contradiction", message, "lora.targets", "set lora.targets=[q,v]")
    if spec.lora.rank % GROUPED_ROWS:
        message = (
            f"adapters of experts need a rank that is a multiple of {GROUPED_ROWS}; `lora.rank` is {spec.lora.rank}"
        )
        rank = GROUPED_ROWS * -(-spec.lora.rank // GROUPED_ROWS)
        yield Problem("not_divisible", message, "lora.rank", f"set lora.rank={rank}")


WHOLE_ROWS = ("hidden_size", "experts.expert_ffn_size")
"""Rows of matrices that tensor parallelism does not divide."""


def quantised_base(spec: RunSpec) -> Iterator[Problem]:
    """Reject 4-bit matrices of latent attention, and rows that tp does not divide into complete blocks."""
    model = spec.model
    if not spec.lora.is_quantised:
        return
    if reason := model.record.refuses.get("nf4"):
        yield Problem("unsupported", reason, "lora.base", "set lora.base=full")
    if not isinstance(model, DecoderModel):
        return
    if model.mla is not None:
        message = "the matrices of latent attention cannot be stored in 4 bits"
        yield Problem("unsupported", message, "lora.base", "set lora.base=full")
        return
    if spec.offload != "none":
        message = f"`offload` is {spec.offload}, which moves parameters to host memory; 4-bit ones stay on the device"
        yield Problem("unsupported", message, "offload", "set offload=none")
    tp = size_of(spec.layout, "tp")
    rows = {"hidden_size": model.hidden_size, "head_dim": model.num_heads * model.head_dim}
    if model.experts is None or any(not model.is_expert_layer(layer) for layer in range(model.num_layers)):
        rows["ffn_size"] = model.ffn_size
    if model.experts is not None:
        rows["experts.expert_ffn_size"] = model.experts.expert_ffn_size  # ep divides the experts, but tp does not
        rows |= {"experts.shared_experts": model.experts.shared_width} if model.experts.shared_experts else {}
    for field, size in rows.items():
        if size % 2:
            message = f"4-bit weights are stored in pairs, but rows of {size} (`model.{field}`) are not divisible by 2"
            yield Problem("not_divisible", message, "lora.base", "set lora.base=full")
        elif tp > 1 and field not in WHOLE_ROWS and size % (tp * NF4_BLOCK):  # tp divides the rows of these
            # Suggest only a value that passes this rule.
            largest = max(n for n in range(1, tp) if n == 1 or size % (n * NF4_BLOCK) == 0)
            message = f"rows of {size} (`model.{field}`) do not split into {tp} (layout.tp) x blocks of {NF4_BLOCK}"
            yield Problem("not_divisible", message, "layout.tp", f"set layout.tp={largest}, or lora.base=full")


def documents(spec: RunSpec) -> Iterator[Problem]:
    """Reject document masks for models or layouts that do not support them."""
    if not spec.data.masks_documents:
        return
    path = "data.document_masks" if spec.data.document_masks else "data.source"
    if not spec.model.rotates or spec.model.scans:
        message = "only attention with rotary embeddings keeps documents apart; this model mixes tokens in other ways"
        yield Problem("unsupported", message, path, "choose a decoder with rotary embeddings")
    if size_of(spec.layout, "cp") > 1:
        message = "document masks do not work with context parallelism yet"
        yield Problem("unsupported", message, "layout.cp", "set layout.cp=1")


def context_parallel(spec: RunSpec) -> Iterator[Problem]:
    cp = size_of(spec.layout, "cp")
    model = spec.model
    if cp == 1:
        return
    if reason := model.record.refuses.get("cp"):
        yield _spread_alone("cp", reason)
    elif spec.layout.context_method == "ulysses":
        yield from _sequence(spec, cp, "cp")
        for field in ("num_heads", "num_kv_heads"):
            heads = getattr(model, field)
            tp = size_of(spec.layout, "tp")
            if heads % (cp * tp):
                yield _indivisible("cp", cp * tp, f"model.{field}", heads)
    else:
        # A causal mask makes later tokens more expensive, so each rank takes one early chunk and one late chunk.
        yield from _sequence(spec, 2 * cp, "2 x cp chunks")
        for field in ("sliding_window", "mla", "attention_sinks", "attention_softcap"):
            if getattr(model, field, None):
                message = f"ring attention is plain causal attention, but `model.{field}` needs a head's full sequence"
                yield Problem("illegal_layout", message, "layout.context_method", "set layout.context_method=ulysses")


def _sequence(spec: RunSpec, parts: int, what: str) -> Iterator[Problem]:
    if spec.data.seq_len % parts:
        near = max(parts, spec.data.seq_len // parts * parts)
        message = f"a sequence of {spec.data.seq_len} tokens is not divisible by {parts} ({what})"
        yield Problem("not_divisible", message, "data.seq_len", f"set data.seq_len={near}")


def pipeline(spec: RunSpec) -> Iterator[Problem]:
    if size_of(spec.layout, "pp") == 1:
        return
    if reason := spec.model.record.refuses.get("pp"):
        yield _spread_alone("pp", reason)
        return
    schedule = spec.layout.pipeline_schedule
    chunks = spec.layout.virtual_stages
    path = "layout.virtual_stages"
    if schedule == "interleaved" and chunks != AUTO and chunks < 2:
        message = f"the interleaved schedule needs 2 virtual stages or more, but `{path}` is {chunks}"
        yield Problem("illegal_layout", message, path, f"set {path}=2")
    elif schedule not in ("interleaved", AUTO) and chunks != AUTO and chunks > 1:
        got = f"`{path}` is {chunks}, but the schedule {schedule} sets the chunks of layers per rank itself"
        hint = f"set layout.pipeline_schedule=interleaved, or {path}=1"
        yield Problem("illegal_layout", got, path, hint)
    # A stage without layers would have nothing to send to the next one.
    layers = spec.model.num_layers
    wanted = spec.layout.stage_layers
    layout = pipeline_of(spec.layout, size_of(spec.layout, "virtual_stages"))
    stages = layout.num_stages
    if layers < stages:
        message = f"{layers} layers (`model.num_layers`) do not fill {stages} pipeline stages"
        of_rank = layout.chunks_per_rank
        hint = f"set layout.pp={max(1, layers // of_rank)}"
        if of_rank > 1 and layers >= layout.pp:
            hint = f"set layout.pipeline_schedule=1f1b, which has one stage per rank instead of {of_rank}"
        yield Problem("illegal_layout", message, "layout.pp", hint)
    if wanted is not None and (len(wanted) != stages or sum(wanted) != layers):
        message = (
            f"`layout.stage_layers` is {list(wanted)}: {len(wanted)} stages with {sum(wanted)} layers; "
            f"the layout has {stages} stages and the model {layers} layers"
        )
        even, spare = divmod(layers, stages)
        fitting = ",".join(str(even + (stage < spare)) for stage in range(stages))
        hint = f"set layout.stage_layers=[{fitting}], or null to divide by planned times"
        yield Problem("illegal_layout", message, "layout.stage_layers", hint)


def expert_parallel(spec: RunSpec) -> Iterator[Problem]:
    ep = size_of(spec.layout, "ep")
    etp = size_of(spec.layout, "etp")
    experts = spec.model.experts
    if etp > 1:
        yield Problem(
            "illegal_layout", "the engine does not shard individual experts", "layout.etp", "set layout.etp=1"
        )
    if ep == 1:
        return
    if experts is None:
        yield _spread_alone("ep", spec.model.record.refuses.get("ep", "the model has no experts"))
        return
    if experts.num_experts % ep:
        yield _indivisible("ep", ep, "model.experts.num_experts", experts.num_experts)
    # Experts are distributed among the ranks of one replica and stage. Their number is known only if no axis is `auto`.
    axes = ("dp_shard", "cp", "tp")
    sizes = [getattr(spec.layout, axis) for axis in axes]
    if AUTO not in sizes and (sizes[0] * sizes[1] * sizes[2]) % ep:
        ranks = sizes[0] * sizes[1] * sizes[2]
        message = f"ep={ep} does not divide the {ranks} ranks of {' x '.join(axes)}, which share the experts"
        yield Problem("not_divisible", message, "layout.ep", "experts are distributed over those ranks: raise dp_shard")


def capacity(spec: RunSpec) -> Iterator[Problem]:
    """Reject a per-sequence capacity if the layout divides sequences among ranks."""
    experts = spec.model.experts
    cut = [axis for axis in ("cp", "tp") if size_of(spec.layout, axis) > 1]
    if experts is not None and experts.capacity_factor is not None and cut:
        message = f"experts cannot have a capacity per sequence if {cut[0]} divides the sequence"
        hint = f"set model.experts.capacity_factor=null, or layout.{cut[0]}=1"
        yield Problem("illegal_layout", message, f"layout.{cut[0]}", hint)


LAYOUT_RULES = (
    tensor_parallel,
    context_parallel,
    pipeline,
    expert_parallel,
    capacity,
    adapters,
    quantised_base,
    documents,
)


def _spread_alone(axis: str, reason: str) -> Problem:
    message = f"`layout.{axis}` cannot be used: {reason}"
    return Problem("illegal_layout", message, f"layout.{axis}", f"set layout.{axis}=1")


def _indivisible(axis: str, parts: int, path: str, size: int) -> Problem:
    fitting = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
    message = f"{size} (`{path}`) is not divisible by {parts} (layout.{axis})"
    return Problem("not_divisible", message, f"layout.{axis}", f"it is divisible by {fitting}")


# Rules for a model's sizes: for all models, for one family, and for models that the engine can train.


MAX_PHANTOM_CLASSES = 8
"""Maximum number of tissue or lesion types in phantoms that can still be clearly distinguished."""


def expert_choice(spec: RunSpec) -> Iterator[Problem]:
    experts = spec.model.experts
    if experts is not None and experts.top_k > experts.num_experts:
        message = f"a token cannot visit {experts.top_k} (`model.experts.top_k`) of {experts.num_experts} experts"
        hint = f"set model.experts.top_k={experts.num_experts} or less"
        yield Problem(code="out_of_range", path="model.experts.top_k", message=message, hint=hint)


def expert_groups(spec: RunSpec) -> Iterator[Problem]:
    """Require groups of equal size, and enough experts in the groups available to a token."""
    experts = spec.model.experts
    if experts is None or experts.num_groups == 1:
        return
    number = experts.num_experts
    groups = experts.num_groups
    if number % groups:
        message = f"{number} experts (`model.experts.num_experts`) cannot be divided evenly into {groups} groups"
        yield not_divisible("model.experts.num_groups", message, number, groups)
    elif experts.top_groups * number // groups < experts.top_k or experts.top_groups > groups:
        message = (
            f"{experts.top_groups} of {groups} groups (`model.experts.top_groups`) must hold a token's "
            f"{experts.top_k} experts, but a group has {number // groups}"
        )
        # Rounded up, because these groups must contain at least as many experts as a token visits.
        fewest = min(groups, -(-experts.top_k * groups // number))
        allowed = f"{groups} or less" if experts.top_groups > groups else f"{fewest} or more"
        hint = f"set model.experts.top_groups={allowed}"
        yield Problem(code="out_of_range", path="model.experts.top_groups", message=message, hint=hint)


def expert_width(spec: RunSpec) -> Iterator[Problem]:
    """Require rows in multiples of 16 bytes for grouped matrix multiplications."""
    experts = spec.model.experts
    if experts is None:
        return
    sizes = {"model.experts.expert_ffn_size": experts.expert_ffn_size, "model.hidden_size": spec.model.hidden_size}
    for path, size in sizes.items():
        if size % 8:
            message = f"`{path}` is {size}; matrices of experts need a multiple of 8"
            yield Problem(code="not_divisible", path=path, message=message, hint=f"set {path}={size + -size % 8}")


def position_table(spec: RunSpec) -> Iterator[Problem]:
    rows = spec.model.learned_positions
    if rows and spec.data.seq_len > rows:
        message = f"`data.seq_len` is {spec.data.seq_len}; the model has {rows} positions (`model.learned_positions`)"
        yield Problem(code="out_of_range", path="data.seq_len", message=message, hint=f"set data.seq_len={rows}")


# Text models


def prediction_layers(spec: RunSpec) -> Iterator[Problem]:
    """Reject what the layers that predict further tokens do not support."""
    model = spec.model
    if not model.prediction_layers:
        return
    reasons = {
        "layout.cp": size_of(spec.layout, "cp") > 1 and "a layer reads tokens that other ranks hold",
        "lora.rank": spec.lora.rank > 0 and "adapters for them have no place in PEFT's format",
        "model.learned_positions": model.learned_positions > 0 and "they have no positions of their own",
    }
    for path, reason in reasons.items():
        if reason:
            message = f"`model.prediction_layers` is {model.prediction_layers}, which `{path}` rules out: {reason}"
            yield Problem("unsupported", message, path, "set model.prediction_layers=0")


def heads(spec: RunSpec) -> Iterator[Problem]:
    """Require that all key-value heads serve the same number of heads."""
    model = spec.model
    if isinstance(model, TextModel) and model.num_kv_heads and model.num_heads % model.num_kv_heads:
        message = f"{model.num_heads} heads (`model.num_heads`) are not a multiple of {model.num_kv_heads} KV heads"
        yield not_divisible("model.num_kv_heads", message, model.num_heads, model.num_kv_heads)


def rotary_width(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, TextModel) or not model.rotates:
        return
    if model.head_dim % 2:
        message = f"`model.head_dim` is {model.head_dim}; rotary embeddings rotate pairs of values, so it must be even"
        yield Problem("not_divisible", message, "model.head_dim", f"set model.head_dim={model.head_dim + 1}")
    elif model.rotary_fraction != 1 and model.rotated_size % 2:
        message = f"{model.rotated_size} of {model.head_dim} values are rotated (`model.rotary_fraction`), but in pairs"
        yield Problem("not_divisible", message, "model.rotary_fraction", "set a fraction that rotates an even number")


def decoder_features(spec: RunSpec) -> Iterator[Problem]:
    """Reject features of decoders that do not work together."""
    model = spec.model
    if not isinstance(model, DecoderModel):
        return
    apart = {
        "mla": (
            *("attention_scale", "attention_softcap", "attention_bias", "rotary_fraction", "local_rope_theta"),
            *("rotated_layers", "unrotated_every", "qk_norm"),
        ),
        "attention_sinks": ("attention_softcap",),
    }
    for feature, others in apart.items():
        for other in others if getattr(model, feature) else ():
            if departs(model, other):
                message = f"`model.{other}` is {getattr(model, other)}, which does not work with `model.{feature}`"
                yield Problem("unsupported", message, f"model.{other}", f"leave out model.{other}")
    if model.norm == "rms" and model.norm_bias:
        message = "RMSNorm has no bias (`model.norm_bias`)"
        yield Problem("contradiction", message, "model.norm_bias", "set model.norm=layer, or model.norm_bias=false")
    scaling = model.rope_scaling
    if scaling and scaling.kind != "linear" and not scaling.original_seq_len:
        message = f"scaling of the kind {scaling.kind} needs the length of the original training"
        path = "model.rope_scaling.original_seq_len"
        yield Problem("missing_value", message, path, f"set {path} to it, in tokens")
    if scaling and scaling.kind == "yarn" and model.rotary_fraction != 1:
        message = "yarn's temperature applies to whole heads, but `model.rotary_fraction` rotates a part of each"
        yield Problem("unsupported", message, "model.rotary_fraction", "set model.rope_scaling=null")


def layer_pattern(spec: RunSpec) -> Iterator[Problem]:
    """Require one letter in the pattern for each layer of each kind."""
    model = spec.model
    if not isinstance(model, HybridModel) or not model.layer_pattern:
        return
    pattern = model.layer_pattern
    counts = model.layer_counts
    if {letter: pattern.count(letter) for letter in counts} != counts or len(pattern) != model.num_layers:
        wanted = ", ".join(f"{count} x {letter}" for letter, count in counts.items() if count)
        message = f"`model.layer_pattern` is {pattern}; the model has {wanted} (M Mamba, * attention, - MLP, E experts)"
        hint = "give one letter per layer, or leave it empty to distribute each kind evenly"
        yield Problem("wrong_value", message, "model.layer_pattern", hint)


def mamba_heads(spec: RunSpec) -> Iterator[Problem]:
    """Require that all groups serve the same number of heads."""
    model = spec.model
    if isinstance(model, HybridModel) and model.mamba_layers and model.mamba_heads % model.mamba_groups:
        message = f"{model.mamba_heads} Mamba heads cannot be divided evenly into {model.mamba_groups} groups"
        yield not_divisible("model.mamba_groups", message, model.mamba_heads, model.mamba_groups)


# Convolutional networks


def known_architecture(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel):
        return
    if not model.is_built:
        message = f"the engine trains a resnet or a unet; a {model.architecture} can be planned"
        yield Problem("unsupported", message, "model.architecture", "set model.architecture=resnet")
    elif model.architecture == "resnet" and len(model.widths) != len(model.blocks):
        message = f"{len(model.widths)} stages in `model.widths`, {len(model.blocks)} in `model.blocks`"
        yield Problem("not_divisible", message, "model.blocks", "give one number per stage in each of the two")


def fitting_input(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel):
        return
    dims = len(model.input_size)
    if dims not in ((2, 3) if model.segments else (2,)):
        allowed = "a unet takes 2 or 3" if model.segments else f"a {model.architecture} takes 2"
        yield Problem("out_of_range", f"`model.input_size` has {dims} dimensions; {allowed}", "model.input_size")
    # Each level halves the size in every dimension, and sizes on the way up must match those on the way down.
    shrinks_by = 2 ** len(model.widths)
    if model.segments and any(extent % shrinks_by for extent in model.input_size):
        message = f"`model.input_size` is {list(model.input_size)}; {len(model.widths)} levels halve every size"
        near = ",".join(str(max(1, round(extent / shrinks_by)) * shrinks_by) for extent in model.input_size)
        yield Problem("not_divisible", message, "model.input_size", f"set model.input_size=[{near}]")


def phantom_classes(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel):
        return
    fewest = 2 if model.segments else 1
    if spec.data.source == "phantom" and not fewest <= model.num_classes <= MAX_PHANTOM_CLASSES:
        message = f"`model.num_classes` is {model.num_classes}; phantoms have {fewest} to {MAX_PHANTOM_CLASSES} classes"
        yield Problem("out_of_range", message, "model.num_classes", f"set model.num_classes={MAX_PHANTOM_CLASSES}")


MODEL_RULES = (
    *(expert_choice, expert_groups, expert_width, position_table),
    *(heads, rotary_width, decoder_features, layer_pattern, mamba_heads),
)
TRAINING_RULES = (prediction_layers, known_architecture, fitting_input, phantom_classes)
"""Rules for models that the engine should train; a model that it cannot train can still be planned."""


def not_divisible(path: str, message: str, total: int, part: int) -> Problem:
    fitting = ", ".join(map(str, divisors(total)))
    return Problem(code="not_divisible", path=path, message=message, hint=f"{path} may be {fitting}")


def divisors(number: int, most: int = 8) -> list[Any]:
    """Return all divisors of a number, or only the smallest few if the number is large."""
    # Sizes may be as large as 1e9, but nobody uses more ranks than this.
    found: list[Any] = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found if len(found) <= most else [*found[:most], "..."]


# Rules for a network: each tier contains more devices than the one below, and the last one contains all of them. The
# planes connect all NICs.


TIERS = "cluster.fabric.tiers"


def tiers(spec: RunSpec) -> Iterator[Problem]:
    """Require a scale-up domain and at least one network tier, whose sizes are increasing multiples of the node size,
    up to the total number of devices."""
    described = spec.cluster.fabric.tiers
    if len(described) == 1:
        message = f"`{TIERS}` has one tier, `{described[0].name}`; expected a scale-up domain and a network"
        yield Problem("missing_value", message, TIERS, "add the tier that connects the domains, or set fabric=flat")
    for place, tier in enumerate(described):
        if tier.devices is None and 0 < place < len(described) - 1:
            path = f"{TIERS}.{place}.devices"
            message = f"`{path}` has no value; only the first and the last tier take it from the cluster"
            yield Problem("missing_value", message, path, "set the number of devices in one element of the tier")
    if described and described[0].kind is not None:
        path = f"{TIERS}.0.kind"
        message = f"`{path}` is {described[0].kind}, but the first tier is the devices' own links"
        yield Problem(
            "unsupported", message, path, "leave it out: cluster.accelerator.link_kind sets the kind of these links"
        )
    per_node = spec.cluster.devices_per_node
    known = [(place, tier.name, tier.devices) for place, tier in enumerate(described) if tier.devices is not None]
    # The first tier is the scale-up domain. If the tier does not state its size, the cluster's keys determine it.
    domain = spec.cluster.scaleup_devices or (None if per_node == AUTO else per_node)
    if described and described[0].devices is None and domain is not None:
        known.insert(0, (0, described[0].name, domain))
    whole = 1 if per_node == AUTO else per_node
    for (_, below, inner), (place, name, outer) in pairwise(known):
        if outer > inner and outer % whole == 0:
            continue
        path = f"{TIERS}.{place}.devices"
        holds = f"a `{name}` must contain several `{below}` elements ({inner} devices each)"
        message = f"`{path}` is {outer}; {holds}" + (f", and entire nodes of {whole}" if whole > 1 else "")
        near = whole * max(math.floor(inner / whole) + 1, round(outer / whole))
        yield Problem("not_divisible", message, path, f"set a multiple of {whole}, such as {near}")
    if described and described[-1].devices is not None and per_node != AUTO:
        wanted = spec.cluster.num_nodes * per_node
        if described[-1].devices < wanted:
            path = f"{TIERS}.{len(described) - 1}.devices"
            message = f"`{path}` is {described[-1].devices}, but the cluster has {wanted} devices"
            hint = f"set {wanted} or more, or null for all devices, or add the tier that connects these"
            yield Problem("out_of_range", message, path, hint)


def network(spec: RunSpec) -> Iterator[Problem]:
    """Reject several nodes whose links have no bandwidth."""
    cluster = spec.cluster
    described = cluster.fabric.tiers[1:]
    is_described = bool(described) and all(tier.gbit_per_s for tier in described)
    if cluster.nic_gbit_per_s == 0 and cluster.num_nodes > 1 and not is_described:
        path = "cluster.nic_gbit_per_s"
        message = f"`{path}` is 0, but {cluster.num_nodes} nodes exchange data over their NICs"
        hint = f"set {path}=400, or the bandwidth per device in Gbit/s; null takes the usual value for the accelerator"
        yield Problem("out_of_range", message, path, hint)


def planes(spec: RunSpec) -> Iterator[Problem]:
    """Require an even number of ports per switch, half of which are uplinks, and tiers that connect every device's
    NIC."""
    found = spec.cluster.fabric.planes
    per_node = spec.cluster.devices_per_node
    if found is None:
        return
    radix = found.switch_tbit_per_s * 1e3 * found.planes / found.nic_gbit_per_s
    if abs(radix - round(radix)) > 1e-6 or round(radix) % 2 or radix < 2:
        path = "cluster.fabric.planes.planes"
        message = (
            f"`{path}` is {found.planes}: a switch of {found.switch_tbit_per_s:g} Tbit/s would have {radix:g} ports of "
            f"{found.nic_gbit_per_s / found.planes:g} Gbit/s; expected an even whole number"
        )
        yield Problem(
            "not_divisible", message, path, "choose planes, nic_gbit_per_s and switch_tbit_per_s that divide evenly"
        )
        return
    # Half of a switch's ports are uplinks, except in the last tier: radix^2 / 2 NICs in two tiers, radix^3 / 4 in
    # three.
    most = round(radix) ** found.switch_tiers // (2 if found.switch_tiers == 2 else 4)
    nics = None if per_node == AUTO else spec.cluster.num_nodes * per_node
    if nics is not None and nics > most:
        path = "cluster.fabric.planes.switch_tiers"
        message = f"`{path}` is {found.switch_tiers}, which connect {most:,} NICs, but the cluster has {nics:,} devices"
        hint = f"set {path}=3" if found.switch_tiers == 2 else "choose more planes, or fewer nodes"
        yield Problem("out_of_range", message, path, hint)


FABRIC_RULES = (tiers, network, planes)


# Rules for a cluster with several pools: keys that must not be set, and features that cannot be used with pools.


POOLS = "cluster.pools"
MOST = 4
"""Maximum number of pools. Pipelines through the pools are tried in every order: 24 orders for four pools."""


def instead_of_nodes(spec: RunSpec) -> Iterator[Problem]:
    """Reject keys of an ordinary cluster alongside pools, which describe the nodes themselves."""
    cluster = spec.cluster
    if not cluster.pools:
        if cluster.pool_link_gbit_per_s is not None:
            path = "cluster.pool_link_gbit_per_s"
            message = f"`{path}` is {cluster.pool_link_gbit_per_s:g}, but the cluster has no pools"
            yield Problem("unsupported", message, path, f"set {path}=null, or {POOLS}=[...]")
        return
    if cluster.accelerator is not None:
        message = f"`{POOLS}` names the accelerators, but `cluster.accelerator` is {cluster.accelerator.name}"
        yield Problem("unsupported", message, POOLS, "set cluster=auto, and set these keys in each pool")
        return
    # A rule cannot distinguish a key set to its default value from a key that was not set.
    set_besides = {
        "num_nodes": (cluster.num_nodes, 1),
        "devices_per_node": (cluster.devices_per_node, AUTO),
        "scaleup_devices": (cluster.scaleup_devices, None),
        "link_gb_per_s": (cluster.link_gb_per_s, None),
    }
    for key, (value, usual) in set_besides.items():
        if value != usual:
            message = f"`cluster.{key}` is {value}, but each of `{POOLS}` has its own"
            yield Problem("unsupported", message, f"cluster.{key}", f"set cluster=auto, or leave out {POOLS}")


def joined_with(spec: RunSpec) -> Iterator[Problem]:
    """Reject too many pools, and keys that assume identical nodes."""
    cluster = spec.cluster
    if not cluster.pools:
        return
    if len(cluster.pools) > MOST:
        message = f"`{POOLS}` has {len(cluster.pools)} pools; at most {MOST} are planned together"
        yield Problem("out_of_range", message, POOLS, "merge identical ones")
    if cluster.fabric.tiers or cluster.fabric.planes:
        message = (
            f"the fabric {cluster.fabric.name or 'of this recipe'} has tiers, but `{POOLS}` are connected by one link"
        )
        hint = "set fabric=flat, and cluster.pool_link_gbit_per_s=<Gbit/s of a device> for the link between pools"
        yield Problem("unsupported", message, "cluster.fabric.tiers", hint)
    if cluster.nic_gbit_per_s == 0:
        path = "cluster.nic_gbit_per_s"
        message = f"`{path}` is 0, but the nodes of `{POOLS}` exchange data over their NICs"
        yield Problem("out_of_range", message, path, f"set {path}=null, and set it in each pool")
    if cluster.reliability.spare_nodes:
        path = "cluster.reliability.spare_nodes"
        message = f"`{path}` is {cluster.reliability.spare_nodes}, but does not state in which of `{POOLS}`"
        yield Problem("unsupported", message, path, f"set {path}=null, or count the spare nodes in a pool")
    if cluster.cost.owned:
        message = f"`cluster.cost.owned` has one price per device, but `{POOLS}` have several kinds of devices"
        hint = f"set cost=rented, and set price_usd_per_device_hour in each of {POOLS}"
        yield Problem("unsupported", message, "cluster.cost.owned", hint)


def only_planned(spec: RunSpec) -> Iterator[Problem]:
    """Reject pools in a launch, because the engine does not place ranks by pool."""
    if not spec.cluster.pools:
        return
    sizes = {pool.devices_per_node for pool in spec.cluster.pools}
    nodes = sum(pool.num_nodes for pool in spec.cluster.pools)
    message = f"`{POOLS}` can be planned (trainspec plan) but not launched: layouts are not placed by kind of node"
    if len(sizes) > 1:
        hint = "launch on the nodes of one pool: ~cluster.pools cluster.num_nodes=<its nodes>"
    else:
        hint = (
            f"type ~{POOLS} cluster.num_nodes={nodes} cluster.devices_per_node={sizes.pop()}: every rank then has "
            "an equal share of the work"
        )
    yield Problem("unsupported", message, POOLS, hint)


POOL_RULES = (instead_of_nodes, joined_with)


# Rules for the formats in which gradients and parameters are exchanged.


GRADIENTS = "comm.gradients"
PARAMETERS = "comm.parameters"
ACROSS = "comm.across_nodes"
BUCKETS = "comm.bucket_bytes"
LEFT_OPEN = ("full", AUTO, None)
"""Values that do not request compression."""


def fp32_sums(spec: RunSpec) -> Iterator[Problem]:
    """Require fp32 sums for compressed gradients."""
    asked = {GRADIENTS: spec.comm.gradients, ACROSS: spec.comm.across_nodes}
    path = next((path for path, value in asked.items() if value not in ("full", None)), None)
    if path is not None and spec.precision.reduce != "fp32":
        message = f"`{path}` is {asked[path]}, which is summed in fp32, but `precision.reduce` is bf16"
        yield Problem("unsupported", message, "precision.reduce", f"set precision.reduce=fp32, or {path}=full")


def parameter_format(spec: RunSpec) -> Iterator[Problem]:
    """Reject int4 parameters: four bits could only represent differences from the previous step, and each rank would
    have to keep that step's parameters in full."""
    if spec.comm.parameters == "int4":
        message = f"`{PARAMETERS}` is int4; 4 bits are too few for full weights, and no rank keeps the previous ones"
        yield Problem("unsupported", message, PARAMETERS, f"set {PARAMETERS}=int8")


def several_nodes(spec: RunSpec) -> Iterator[Problem]:
    if spec.comm.across_nodes is not None and spec.cluster.num_nodes == 1 and not spec.cluster.pools:
        message = f"`{ACROSS}` is {spec.comm.across_nodes}, but `cluster.num_nodes` is 1"
        yield Problem("unsupported", message, ACROSS, f"set {ACROSS}=null, or {GRADIENTS}={spec.comm.across_nodes}")


def exchanged(spec: RunSpec, layout: Layout, replica_groups: int) -> Iterator[Problem]:
    """Reject formats for exchanges that do not occur in the layout."""
    comm = spec.comm
    described = layout.describe()
    asked = {GRADIENTS: comm.gradients, ACROSS: comm.across_nodes}
    path = next((path for path, value in asked.items() if value not in LEFT_OPEN), None)
    if path is not None and layout.shards * layout.dp_replicate * replica_groups == 1:
        message = f"`{path}` is {asked[path]}, but in this layout ({described}) no ranks sum gradients"
        hint = f"set {path}=full, or choose a layout with dp_shard or dp_replicate of 2 or more"
        yield Problem("unsupported", message, path, hint)
    if comm.parameters != "full" and layout.shards == 1:
        message = f"`{PARAMETERS}` is {comm.parameters}, but in this layout ({described}) no rank gathers parameters"
        yield Problem("unsupported", message, PARAMETERS, f"set {PARAMETERS}=full, or layout.dp_shard=2 (or more)")


def joined(spec: RunSpec, layout: Layout, device: str) -> Iterator[Problem]:
    """Reject a bucket size if the gradients of several blocks are never exchanged together."""
    size = spec.comm.bucket_bytes
    why = ""
    if not size:
        return
    if device == "cuda":
        why = "on GPUs, FSDP2 sums the gradients of each block separately"
    elif layout.shards * layout.dp_replicate == 1:
        why = f"in this layout ({layout.describe()}) no ranks sum gradients"
    elif spec.comm.gradients not in LEFT_OPEN or spec.comm.across_nodes not in LEFT_OPEN:
        why = "compressed gradients are exchanged block by block"
    if why:
        yield Problem("unsupported", f"`{BUCKETS}` is {size:,}, but {why}", BUCKETS, f"set {BUCKETS}=null")


COMM_RULES = (fp32_sums, parameter_format, several_nodes)


# Rules for replica groups and injected faults.


ELASTIC_WITHOUT_NUMBER = 2
"""Number of groups if neither `resilience.replica_groups` nor `layout.dp_replicate` specifies it."""


def wanted_groups(spec: RunSpec) -> int:
    """Return the number of replica groups in a launch."""
    if spec.resilience.mode != "elastic":
        return 1
    if spec.resilience.replica_groups != AUTO:
        return int(spec.resilience.replica_groups)
    replicas = spec.layout.dp_replicate
    return ELASTIC_WITHOUT_NUMBER if replicas in (AUTO, 1) else int(replicas)


def fixed_groups(spec: RunSpec) -> int:
    """Return the number of groups in addition to the layout's axes, because `layout.dp_replicate` may already count the
    groups."""
    counted_by_layout = spec.resilience.replica_groups == AUTO and spec.layout.dp_replicate not in (AUTO, 1)
    return 1 if counted_by_layout else wanted_groups(spec)


def groups(spec: RunSpec) -> Iterator[Problem]:
    """Require at least two groups with the same number of processes."""
    path = "resilience.replica_groups"
    number = spec.resilience.replica_groups
    if spec.resilience.mode != "elastic":
        if number not in (AUTO, 1):
            message = f"`{path}` is {number}, but `resilience.mode` is {spec.resilience.mode}, which has no groups"
            yield Problem("unsupported", message, path, "set resilience=elastic")
        return
    number = wanted_groups(spec)
    if number == 1:
        message = f"`{path}` is 1; a single group has no other to heal from"
        yield Problem("out_of_range", message, path, f"set {path}=2 or more, or resilience=restart")
    if spec.resilience.min_groups > number:
        path = "resilience.min_groups"
        message = f"`{path}` is {spec.resilience.min_groups}, but there are {number} replica groups"
        yield Problem("out_of_range", message, path, f"set {path}={number} or less")


def group_processes(spec: RunSpec) -> Iterator[Problem]:
    devices = spec.cluster.devices_per_node
    number = wanted_groups(spec)
    if devices == AUTO or spec.cluster.num_nodes * devices % number == 0:
        return
    processes = spec.cluster.num_nodes * devices
    message = f"{processes} processes cannot be divided evenly among {number} replica groups"
    hint = f"set cluster.devices_per_node={max(1, devices // number) * number}, or another resilience.replica_groups"
    yield Problem("not_divisible", message, "resilience.replica_groups", hint)


def whole_hosts(num_nodes: int, number: int) -> Iterator[Problem]:
    """Reject a placement where losing one node would take down parts of several replica groups."""
    if number == 1 or num_nodes % number == 0 or number % num_nodes == 0:
        return
    path = "resilience.replica_groups"
    message = f"{num_nodes} nodes cannot be divided evenly among {number} replica groups, nor vice versa"
    fitting = [n for n in range(2, 2 * num_nodes + 1) if num_nodes % n == 0 or n % num_nodes == 0]
    # The values nearest to the requested one, in ascending order.
    near = sorted(fitting, key=lambda n: abs(n - number))[:3]
    yield Problem("not_divisible", message, path, f"set {path}={' or '.join(map(str, sorted(near)))}")


def faults(spec: RunSpec) -> Iterator[Problem]:
    try:
        parsed = parse_faults(spec.fault)
    except FaultSyntaxError as error:
        yield Problem("bad_fault", f"`fault`: {error}", "fault", "set fault='kill(group=1,step=40)'")
        return
    number = wanted_groups(spec)
    for fault in parsed:
        if fault.group >= number:
            message = f"`fault` is for replica group {fault.group}, but the groups are numbered 0 to {number - 1}"
            yield Problem("out_of_range", message, "fault", "set fault='kill(group=0,step=40)'")
        if fault.kind in ("lighthouse", "bitflip") and number == 1:
            message = f"`fault` {fault.kind} affects only replica groups"
            yield Problem("unsupported", message, "fault", "set resilience=elastic")


def injected_faults(spec: RunSpec) -> Iterator[Problem]:
    """Reject faults that only a rehearsal can simulate."""
    try:
        parsed = parse_faults(spec.fault)
    except FaultSyntaxError:
        return  # the rule `faults` reports this error
    for fault in parsed:
        if fault.kind in ONLY_REHEARSED:
            message = f"`fault` {fault.kind} cannot be injected into a run; `trainspec rehearse` predicts its cost"
            yield Problem("unsupported", message, "fault", "set fault='kill(step=40)'")


ELASTIC_RULES = (groups, group_processes, faults)


# Rules for a layout that changes during the run.


PATH = "scheduler.changes"


def changed_specs(spec: RunSpec) -> list[RunSpec]:
    """Return one recipe per layout change, as if the run started with that layout."""
    if spec.layout is UNKNOWN:
        return []
    return [replace(spec, layout=change.of(spec.layout)) for change in spec.scheduler.changes]


def changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """Require that each layout that the run switches to is legal and depends only on axes known before the search."""
    for place, (changed, change) in enumerate(zip(changed_specs(spec), spec.scheduler.changes, strict=False)):
        # The planner searches for one layout before the run starts, so a change must specify the axes that it depends
        # on.
        open_axes = [axis for axis in ("cp", "tp", "pp", "ep") if getattr(changed.layout, axis) == AUTO]
        if open_axes:
            message = f"the layout from step {change.step} leaves {', '.join(open_axes)} to the planner"
            hint = f"name {open_axes[0]} in {PATH}.{place}, or set layout.{open_axes[0]}=1"
            yield Problem("unsupported", message, f"{PATH}.{place}.{open_axes[0]}", hint)
        for problem in (found for rule in LAYOUT_RULES for found in rule(changed)):
            field = problem.path.rpartition(".")[2]
            path = f"{PATH}.{place}.{field}" if hasattr(change, field) else problem.path
            message = f"the layout from step {change.step}: {problem.message}"
            hint = problem.hint and f"in {PATH}.{place}: {problem.hint.replace('layout.', '')}"
            yield replace(problem, message=message, path=path, hint=hint)


def order_of_changes(spec: RunSpec) -> Iterator[Problem]:
    """Require changes in ascending step order, all before the last step."""
    changes = spec.scheduler.changes
    for place, (before, change) in enumerate(pairwise(changes), 1):
        if change.step <= before.step:
            message = f"`{PATH}.{place}.step` is {change.step}, but the change before it is at {before.step}"
            hint = f"order the changes by step: {before.step + 1} or more"
            yield Problem("out_of_range", message, f"{PATH}.{place}.step", hint)
    # A changing batch size changes the number of steps, so the last step is unknown.
    late = [place for place, change in enumerate(changes) if change.step >= spec.train.max_steps]
    if late and spec.batching.schedule.kind == "constant":
        message = f"`{PATH}.{late[0]}.step` is {changes[late[0]].step}, but the run has {spec.train.max_steps} steps"
        yield Problem("out_of_range", message, f"{PATH}.{late[0]}.step", f"set {spec.train.max_steps - 1} or less")


def one_replica_group(spec: RunSpec) -> Iterator[Problem]:
    """Reject layout changes with replica groups. Groups copy their state from one another part by part, and therefore
    need the same layout."""
    if spec.scheduler.changes and spec.resilience.mode == "elastic":
        message = "replica groups (`resilience.mode` is elastic) keep their layout: they heal from one another"
        yield Problem("unsupported", message, PATH, f"set resilience=restart, or ~{PATH}")


RELAYOUT_RULES = (changed_layouts, order_of_changes, one_replica_group)
