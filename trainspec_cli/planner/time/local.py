"""A step's parts on this machine's CPU: an eager decoder, from a probe.

A step is what a model next to nothing takes (its blocks, hooks and small collectives), and what sizes add to that:
each operation's time over size beyond its call's own cost, as the probe has measured it; all of it held against
reference models that the probe has trained.

Shapes as in the decoder: D hidden, H heads, K key-value heads, E head size, F feed-forward, V vocabulary, T tokens.
"""

from __future__ import annotations

from trainspec_cli.planner.setup import UPDATE_BYTES, matrix_share, newton_schulz_flops
from trainspec_cli.planner.time.step import ENCODING_BYTES, GRADIENT_BYTES
from trainspec_cli.recipe.keys.model import DecoderModel, loss_chunk_tokens
from trainspec_cli.recipe.keys.training import WireFormat
from trainspec_cli.recipe.results.plan import Plan, PlannedLink
from trainspec_cli.recipe.results.tools import PROBED_HEAD_SIZES, PROBED_HEADS, PROBED_TOKENS, Curve, MachineProbe

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
ADAMW_TRAFFIC_BYTES = 28.0
"""Bytes that one kernel of AdamW moves, a value: it reads a gradient, and reads and writes a weight and two moments."""
CAST_BYTES = 6.0
"""Bytes that a cast from fp32 to bf16 moves through memory, a value."""


def block_matrices(model: DecoderModel) -> tuple[int, ...]:
    """Elements of each matrix of a block."""
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    hidden = model.hidden_size
    ffn = model.ffn_size
    return (hidden * query, hidden * key, hidden * key, query * hidden, hidden * ffn, hidden * ffn, ffn * hidden)


def unit_params(plan: Plan, model: DecoderModel) -> tuple[int, int]:
    """Parameters of a block, and of all that lies outside the blocks: the two kinds of sharded units."""
    block = sum(block_matrices(model)) + 2 * model.hidden_size
    return block, plan.params - model.num_layers * block


def micro_tokens(plan: Plan) -> int:
    return plan.micro_batch_size * plan.spec.data.seq_len


def step_parts_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> dict[str, float]:
    """Seconds by part of a step, named as in the step events.

    The curves give how parts differ between models; the reference models, which were really trained, how long they
    take here and now. Cold caches and other programs' load lengthen both alike; peers are waited for in proportion to
    the work that they do meanwhile.
    """
    parts = curve_parts_s(plan, model, probe)
    held = {part: seconds * _measured_ratio(part, seconds, probe) for part, seconds in parts.items()}
    # Beyond what their messages take, processes wait for one another for a share of the passes' time.
    took = probe.large.parts_s
    beyond_s = took["exposed_comm"] - _curve_parts_of(probe.large.plan, probe)["exposed_comm"]
    waiting_s = max(0.0, beyond_s) / (took["forward"] + took["backward"]) * (held["forward"] + held["backward"])
    return held | {"exposed_comm": parts["exposed_comm"] + waiting_s}


def _measured_ratio(part: str, seconds: float, probe: MachineProbe) -> float:
    """Ratio of the references' measured time to the curves': straight in the logarithm between two of them."""
    ratios: dict[float, float] = {}
    for reference in probe.references:
        curve_s = _curve_parts_of(reference.plan, probe)[part]
        took_s = reference.parts_s[part]
        if curve_s > 0 and took_s > 0:
            ratios[curve_s] = took_s / curve_s
    if not ratios:
        return 1.0
    sizes = tuple(sorted(ratios))
    ratio = Curve(sizes, tuple(ratios[size] for size in sizes))
    return ratio.at(min(seconds, sizes[-1]))


def _curve_parts_of(plan: Plan, probe: MachineProbe) -> dict[str, float]:
    assert isinstance(plan.spec.model, DecoderModel), "the engine probes with decoders"
    return curve_parts_s(plan, plan.spec.model, probe)


def curve_parts_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> dict[str, float]:
    """Seconds of each part of a step, by the curves alone."""
    parts = {part: own + model.num_layers * probe.empty_block_s[part] for part, own in probe.empty_step_s.items()}
    passes_s = zip(block_passes_s(plan, model, probe), outside_passes_s(plan, model, probe), strict=True)
    for part, (block_s, outside_s) in zip(("forward", "backward"), passes_s, strict=True):
        parts[part] = plan.grad_accum_steps * (parts[part] + model.num_layers * block_s + outside_s)
    # FSDP2 exchanges one unit at a time: each block, and all that lies outside the blocks.
    block, outside = unit_params(plan, model)
    parts["exposed_comm"] += model.num_layers * _unit_collectives_s(
        plan, block, probe, is_block=True
    ) + _unit_collectives_s(plan, outside, probe, is_block=False)
    parts["optimizer"] += update_s(plan, model, probe)
    return parts


def update_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> float:
    """Return the seconds of an update, beyond its calls' own cost: AdamW's as measured; of other optimizers by what
    their operations move beside AdamW's, and Newton-Schulz as the products of matrices that it consists of."""
    optimizer = plan.spec.optim.kept_state
    own = plan.params / plan.layout.dp_shard
    usual_s = probe.optimizer.beyond_call(own)
    if optimizer == "adamw8bit":
        return usual_s * UPDATE_BYTES[optimizer] / ADAMW_TRAFFIC_BYTES
    if optimizer == "muon":
        elements = sum(newton_schulz_flops(model)) / plan.layout.dp_shard / (2 * PROBED_TOKENS)
        products_s = _products_s(probe.matmul.forward, int(elements), PROBED_TOKENS)
        return usual_s * (1 + matrix_share(model) * UPDATE_BYTES[optimizer] / ADAMW_TRAFFIC_BYTES) + products_s
    return usual_s


def block_passes_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> tuple[float, float]:
    """-> (forward, backward) of one block on one micro-batch, beyond its calls' own cost."""
    tokens = micro_tokens(plan)
    hidden = model.hidden_size
    query = model.num_heads * model.head_dim
    key = model.num_kv_heads * model.head_dim
    params = unit_params(plan, model)[0]
    forward = backward = 0.0
    for elements in block_matrices(model):
        forward += _products_s(probe.matmul.forward, elements, tokens)
        backward += _products_s(probe.matmul.input_gradient, elements, tokens)
        backward += _products_s(probe.matmul.weight_gradient, elements, tokens)
    for operation, elements in (
        (probe.norm, tokens * hidden),
        (probe.norm, tokens * hidden),
        (probe.rope, tokens * query),
        (probe.rope, tokens * key),
        (probe.swiglu, tokens * model.ffn_size),
    ):
        forward += operation.forward.beyond_call(elements)
        backward += operation.backward.beyond_call(elements)
    forward += _attention_s(probe.attention_narrow.forward, probe.attention.forward, plan, model)
    backward += _attention_s(probe.attention_narrow.backward, probe.attention.backward, plan, model)
    # Residuals: two sums forward; backward their gradients meet, and those of q, k, v and of gate, up.
    forward += 2 * probe.add.beyond_call(tokens * hidden) + probe.cast.beyond_call(params)
    backward += 5 * probe.add.beyond_call(tokens * hidden) + 2 * probe.cast.beyond_call(params)
    return forward, backward


def outside_passes_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> tuple[float, float]:
    """-> (forward, backward) of embedding, last norm, head and loss. The loss makes its gradients in the forward; the
    backward scales them."""
    tokens = micro_tokens(plan)
    hidden = model.hidden_size
    head = model.vocab_size * hidden
    params = unit_params(plan, model)[1]
    products = (probe.matmul.forward, probe.matmul.input_gradient, probe.matmul.weight_gradient)
    forward = sum(_products_s(curve, head, tokens) for curve in products)
    chunk = min(tokens, loss_chunk_tokens(model.vocab_size))
    forward += tokens / chunk * probe.loss.beyond_call(chunk * model.vocab_size)
    forward += tokens / chunk * 2 * probe.cast.beyond_call(head) + probe.cast.beyond_call(params)
    forward += probe.norm.forward.beyond_call(tokens * hidden) + probe.add.beyond_call(tokens * hidden)
    backward = probe.norm.backward.beyond_call(tokens * hidden) + 2 * probe.add.beyond_call(tokens * hidden)
    # Scaled, cast, the embedding's gradient zeroed and filled, then gathered for the collective.
    backward += 2 * probe.cast.beyond_call(head) + 2 * probe.add.beyond_call(head) + 2 * probe.cast.beyond_call(params)
    return forward, backward


def _attention_s(narrow: Curve, wide: Curve, plan: Plan, model: DecoderModel) -> float:
    """Straight over the head size, through both that were probed."""
    seq_len, (small, large) = plan.spec.data.seq_len, PROBED_HEAD_SIZES
    own = narrow.at(seq_len)
    wider = wide.at(seq_len)
    probed = max(0.0, own + (wider - own) * (model.head_dim - small) / (large - small))
    return probed * micro_tokens(plan) / PROBED_TOKENS * model.num_heads / PROBED_HEADS


def _products_s(curve: Curve, elements: int, tokens: int) -> float:
    return max(0.0, curve.at(elements) * tokens / PROBED_TOKENS - curve.seconds[0])


def planned_links(plan: Plan, model: DecoderModel, probe: MachineProbe) -> tuple[PlannedLink, ...]:
    """Return the links of the data-parallel axes that have several ranks."""
    params = max(unit_params(plan, model))
    layout = plan.layout
    links = []
    if layout.dp_shard > 1:
        gathered_bytes = params * COMPUTE_BYTES[plan.compute]
        rate = _sent(gathered_bytes, layout.dp_shard) / probe.all_gather.at(gathered_bytes)
        links.append(PlannedLink("dp_shard", rate))
    if layout.dp_replicate > 1:
        summed_bytes = params / layout.dp_shard * COMPUTE_BYTES[plan.spec.precision.reduce]
        rate = 2 * _sent(summed_bytes, layout.dp_replicate) / probe.all_reduce.at(summed_bytes)
        links.append(PlannedLink("dp_replicate", rate))
    return tuple(links)


def _sent(whole_bytes: float, ranks: int) -> float:
    """Return what each of so many ranks sends in a ring that brings all to all."""
    return whole_bytes * (ranks - 1) / ranks


def _unit_collectives_s(plan: Plan, params: int, probe: MachineProbe, *, is_block: bool) -> float:
    """Parameters are gathered in the compute format, gradients reduced in that of `precision.reduce`."""
    layout = plan.layout
    seconds = 0.0
    reduced_bytes = params * COMPUTE_BYTES[plan.spec.precision.reduce]
    if layout.dp_shard > 1:
        # A block is freed after its forward, and gathered again in the backward.
        gatherings = 1 if layout.keeps_parameters else plan.grad_accum_steps * (2 if is_block else 1)
        seconds += gatherings * probe.all_gather.at(params * COMPUTE_BYTES[plan.compute])
        exchanges = plan.grad_accum_steps if layout.exchanges_every_backward else 1
        seconds += exchanges * _reduce_s(plan.comm.gradients, params, reduced_bytes, probe)
    if layout.dp_replicate > 1 and plan.comm.gradients == "full":
        seconds += probe.all_reduce.beyond_call(reduced_bytes / layout.dp_shard)
    elif layout.dp_replicate > 1:
        seconds += 2 * _reduce_s(plan.comm.gradients, params / layout.dp_shard, 0.0, probe)
    return seconds


def _reduce_s(chosen: WireFormat, values: float, full_bytes: float, probe: MachineProbe) -> float:
    """Seconds of a reduce-scatter. An all-to-all moves as much as a gathering; encoding moves memory as casts do."""
    if chosen == "full":
        return probe.reduce_scatter.at(full_bytes)
    encoding_s = ENCODING_BYTES[chosen] / CAST_BYTES * probe.cast.beyond_call(values)
    return probe.all_gather.at(values * GRADIENT_BYTES[chosen]) + encoding_s
