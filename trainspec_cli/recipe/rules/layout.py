"""Which layouts the engine can run, and why the others are none. What is `auto` is left to the planner."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.lora import NF4_BLOCK, TARGETS
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import RunSpec


def size_of(layout: LayoutSpec, axis: str) -> int:
    """An axis that is left to the planner restricts nothing yet."""
    size = getattr(layout, axis)
    return 1 if size == AUTO else int(size)


def pipeline_of(layout: LayoutSpec, virtual_stages: int = 1) -> Layout:
    """The pipeline alone, with what is left to the planner as it is without one."""
    schedule = layout.pipeline_schedule
    return Layout(
        pp=size_of(layout, "pp"),
        pipeline_schedule="1f1b" if schedule == AUTO else schedule,
        virtual_stages=virtual_stages,
    )


def tensor_parallel(spec: RunSpec) -> Iterator[Problem]:
    """Each rank of tp takes whole heads, and equal parts of the feed-forward and the vocabulary."""
    tp = size_of(spec.layout, "tp")
    if tp == 1:
        return
    if reason := spec.model.record.refuses.get("tp"):
        yield _spread_alone("tp", reason)
        return
    if spec.train.loss:
        yield _spread_alone("tp", f"it cuts the vocabulary, of which {spec.train.loss} (`train.loss`) sees all logits")
    for field in ("num_heads", "num_kv_heads", "ffn_size", "vocab_size", "mamba_heads", "mamba_groups"):
        size = getattr(spec.model, field, 0)
        if size % tp:
            yield _indivisible("tp", tp, f"model.{field}", size)
    if spec.layout.sequence_parallel:
        yield from _sequence(spec, size_of(spec.layout, "cp") * tp, "cp x tp")
        if spec.model.learned_positions:
            message = "a table of positions is added to whole sequences, which sequence parallelism cuts"
            yield Problem("illegal_layout", message, "layout.sequence_parallel", "type layout.sequence_parallel=false")
    elif spec.model.experts is not None:
        message = "experts with tp need sequence parallelism: else every rank of tp would route the same tokens"
        yield Problem("illegal_layout", message, "layout.sequence_parallel", "type layout.sequence_parallel=true")


def adapters(spec: RunSpec) -> Iterator[Problem]:
    """Adapters are plain layers beside frozen ones."""
    if not spec.lora.rank:
        if spec.lora.base != "full":
            message = (
                f"`lora.base` is {spec.lora.base}, and `lora.rank` is 0: weights that are trained are kept in full"
            )
            yield Problem("contradiction", message, "lora.base", "type lora.rank=16, or lora.base=full")
        return
    # The families themselves say what they refuse, so a new family needs no edit here.
    if reason := spec.model.record.refuses.get("lora"):
        message = f"{reason}, and `model.family` is {spec.model.family}"
        yield Problem("unsupported", message, "lora.rank", "type lora.rank=0")
    if pipeline_of(spec.layout).splits_backward:
        got = f"`layout.pipeline_schedule` {spec.layout.pipeline_schedule} splits backwards, which adapters have not"
        yield Problem("unsupported", got, "layout.pipeline_schedule", "type layout.pipeline_schedule=1f1b")
    if spec.precision.matmul == "fp8":
        message = "layers with adapters do not multiply in fp8"
        yield Problem("unsupported", message, "precision.matmul", "type precision.matmul=compute")
    unknown = [target for target in spec.lora.targets if target not in TARGETS]
    if unknown or not spec.lora.targets:
        message = f"`lora.targets` is {list(spec.lora.targets)}; there are {', '.join(TARGETS)}"
        yield Problem("wrong_choice", message, "lora.targets", "type lora.targets=[q,v]")


def quantised_base(spec: RunSpec) -> Iterator[Problem]:
    """4-bit matrices are those of dense layers; a rank of tp holds whole blocks of their rows."""
    model = spec.model
    if not spec.lora.is_quantised or not isinstance(model, DecoderModel):
        return
    if model.experts is not None or model.mla is not None:
        kind = "routed experts" if model.experts is not None else "latent attention"
        message = f"4 bits hold the matrices of attention and feed-forwards alone, and the model has {kind}"
        yield Problem("unsupported", message, "lora.base", "type lora.base=full")
        return
    if spec.offload != "none":
        message = f"`offload` is {spec.offload}, which keeps parameters in host memory; 4-bit ones stay on the device"
        yield Problem("unsupported", message, "offload", "type offload=none")
    heads, tp = model.num_heads * model.head_dim, size_of(spec.layout, "tp")
    for field, size in (("hidden_size", model.hidden_size), ("ffn_size", model.ffn_size), ("head_dim", heads)):
        if size % 2:
            message = f"4-bit weights are held in pairs, and rows of {size} (`model.{field}`) do not divide by 2"
            yield Problem("not_divisible", message, "lora.base", "type lora.base=full")
        elif tp > 1 and field != "hidden_size" and size % (tp * NF4_BLOCK):  # tp cuts rows of these
            # The hint has to be a value that passes this rule.
            largest = max(n for n in range(1, tp) if n == 1 or size % (n * NF4_BLOCK) == 0)
            message = f"rows of {size} (`model.{field}`) do not divide into {tp} (layout.tp) x blocks of {NF4_BLOCK}"
            yield Problem("not_divisible", message, "layout.tp", f"type layout.tp={largest}, or lora.base=full")


def documents(spec: RunSpec) -> Iterator[Problem]:
    """Attention is kept within documents by some models and layouts only."""
    if not spec.data.masks_documents:
        return
    path = "data.document_masks" if spec.data.document_masks else "data.source"
    if not spec.model.rotates:
        message = "documents are kept apart by attention with rotary positions; this model has other ways across them"
        yield Problem("unsupported", message, path, "choose a decoder with rotary positions")
    if size_of(spec.layout, "cp") > 1:
        message = "documents' masks do not go with context parallelism yet"
        yield Problem("unsupported", message, "layout.cp", "type layout.cp=1")


def context_parallel(spec: RunSpec) -> Iterator[Problem]:
    cp, model = size_of(spec.layout, "cp"), spec.model
    if cp == 1:
        return
    if reason := model.record.refuses.get("cp"):
        yield _spread_alone("cp", reason)
    elif spec.layout.context_method == "ulysses":
        yield from _sequence(spec, cp, "cp")
        for field in ("num_heads", "num_kv_heads"):
            heads, tp = getattr(model, field), size_of(spec.layout, "tp")
            if heads % (cp * tp):
                yield _indivisible("cp", cp * tp, f"model.{field}", heads)
    else:
        # A causal mask gives later tokens more work: each rank takes one early chunk and one late one.
        yield from _sequence(spec, 2 * cp, "2 x cp, the zigzag's chunks")
        yield from _whole_attention(spec)


def _whole_attention(spec: RunSpec) -> Iterator[Problem]:
    for field in ("sliding_window", "mla", "attention_sinks"):
        if getattr(spec.model, field, None):
            message = f"ring attention crosses the whole causal half; `model.{field}` needs each head's whole sequence"
            yield Problem("illegal_layout", message, "layout.context_method", "type layout.context_method=ulysses")


def _sequence(spec: RunSpec, parts: int, what: str) -> Iterator[Problem]:
    if spec.data.seq_len % parts:
        near = max(parts, spec.data.seq_len // parts * parts)
        message = f"a sequence of {spec.data.seq_len} tokens does not divide by {parts} ({what})"
        yield Problem("not_divisible", message, "data.seq_len", f"type data.seq_len={near}")


def pipeline(spec: RunSpec) -> Iterator[Problem]:
    if size_of(spec.layout, "pp") == 1:
        return
    if reason := spec.model.record.refuses.get("pp"):
        yield _spread_alone("pp", reason)
        return
    yield from _virtual_stages(spec)
    # A stage without layers would have nothing to send to the next one.
    layers, wanted = spec.model.num_layers, spec.layout.stage_layers
    layout = pipeline_of(spec.layout, size_of(spec.layout, "virtual_stages"))
    stages = layout.num_stages
    if layers < stages:
        message = f"{layers} layers (`model.num_layers`) do not fill {stages} pipeline stages"
        yield Problem("illegal_layout", message, "layout.pp", _fewer_stages(layers, layout))
    if wanted is not None and (len(wanted) != stages or sum(wanted) != layers):
        message = (
            f"`layout.stage_layers` is {list(wanted)}: {len(wanted)} stages with {sum(wanted)} layers; "
            f"the layout has {stages} stages, the model {layers} layers"
        )
        even, spare = divmod(layers, stages)
        fitting = ",".join(str(even + (stage < spare)) for stage in range(stages))
        hint = f"type layout.stage_layers=[{fitting}], or null to cut by planned times"
        yield Problem("illegal_layout", message, "layout.stage_layers", hint)


def _virtual_stages(spec: RunSpec) -> Iterator[Problem]:
    schedule, chunks = spec.layout.pipeline_schedule, spec.layout.virtual_stages
    if chunks == AUTO or schedule == AUTO:
        return
    if schedule == "interleaved" and chunks < 2:
        message = f"the interleaved schedule needs 2 virtual stages or more, `layout.virtual_stages` is {chunks}"
        yield Problem("illegal_layout", message, "layout.virtual_stages", "type layout.virtual_stages=2")
    if schedule != "interleaved" and chunks > 1:
        got = f"`layout.virtual_stages` is {chunks}; the schedule {schedule} has one chunk of layers a rank of its own"
        hint = "type layout.pipeline_schedule=interleaved, or layout.virtual_stages=1"
        yield Problem("illegal_layout", got, "layout.virtual_stages", hint)


def _fewer_stages(layers: int, layout: Layout) -> str:
    chunks = layout.chunks_per_rank
    if chunks > 1 and layers >= layout.pp:
        return f"type layout.pipeline_schedule=1f1b, which has one stage a rank and not {chunks}"
    return f"type layout.pp={max(1, layers // chunks)}"


def expert_parallel(spec: RunSpec) -> Iterator[Problem]:
    ep, etp = size_of(spec.layout, "ep"), size_of(spec.layout, "etp")
    experts = spec.model.experts
    if etp > 1:
        yield Problem("illegal_layout", "the engine spreads whole experts", "layout.etp", "type layout.etp=1")
    if ep == 1:
        return
    if experts is None:
        yield _spread_alone("ep", "the model has no experts")
        return
    if experts.num_experts % ep:
        yield _indivisible("ep", ep, "model.experts.num_experts", experts.num_experts)
    axes = ("dp_shard", "cp", "tp")
    sizes = [getattr(spec.layout, axis) for axis in axes]
    if AUTO not in sizes and (sizes[0] * sizes[1] * sizes[2]) % ep:
        ranks = sizes[0] * sizes[1] * sizes[2]
        message = f"ep={ep} does not divide the {ranks} ranks of {' x '.join(axes)}, which share the experts"
        yield Problem("not_divisible", message, "layout.ep", "experts are spread over those ranks: raise dp_shard")


def capacity(spec: RunSpec) -> Iterator[Problem]:
    """An expert's capacity is its share of each sequence, which a rank must then see whole."""
    experts = spec.model.experts
    cut = [axis for axis in ("cp", "tp") if size_of(spec.layout, axis) > 1]
    if experts is not None and experts.capacity_factor is not None and cut:
        message = f"a capacity of each sequence's experts cannot be kept where {cut[0]} cuts the sequence"
        hint = f"type model.experts.capacity_factor=null, or layout.{cut[0]}=1"
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
    message = f"`layout.{axis}` cannot be used here: {reason}"
    return Problem("illegal_layout", message, f"layout.{axis}", f"type layout.{axis}=1")


def _indivisible(axis: str, parts: int, path: str, size: int) -> Problem:
    fitting = ", ".join(str(n) for n in range(1, parts + 1) if size % n == 0)
    message = f"{size} (`{path}`) does not divide by {parts} (layout.{axis})"
    return Problem("not_divisible", message, f"layout.{axis}", f"it divides by {fitting}")
