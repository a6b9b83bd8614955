"""Predicts a run on this machine's CPU from a probe of it: an eager decoder, its step's parts and a process's memory.

A step is what a model next to nothing takes (its blocks, hooks and small collectives), and what sizes add to that:
each operation's time over size beyond its call's own cost, as the probe has measured it.

Shapes as in the decoder: D hidden, H heads, K key-value heads, E head size, F feed-forward, V vocabulary, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.local import LocalPrediction
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import PROBED_HEAD_SIZES, PROBED_HEADS, PROBED_TOKENS, Curve, MachineProbe

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}
CHUNK_BYTES = 128 * 2**20
"""Logits that the engine's cross-entropy holds at once, as fp32."""
LOSS_BYTES_A_LOGIT = 22
"""fp32 logits, softmax, target and gradient, with one more between them (5 x 4), and logits in the compute format."""
ALLOCATOR_PAD_BYTES = 64 * 2**20
"""What the heap grows by at a time (MALLOC_TOP_PAD_ of the workers)."""


def is_predictable(plan: Plan) -> bool:
    """No probe speaks of GPUs, of other families of models, or of compiled blocks."""
    return plan.device == "cpu" and not plan.spec.compile and isinstance(plan.spec.model, DecoderModel)


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Of a plan that `is_predictable`."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(time_s=step_parts_s(plan, model, probe), memory=peak_memory(plan, model, probe))


# Sizes


def block_matrices(model: DecoderModel) -> tuple[int, ...]:
    """Elements of each matrix of a block."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, ffn = model.hidden_size, model.ffn_size
    return (hidden * query, hidden * key, hidden * key, query * hidden, hidden * ffn, hidden * ffn, ffn * hidden)


def unit_params(plan: Plan, model: DecoderModel) -> tuple[int, int]:
    """Parameters of a block, and of all that lies outside the blocks: the two kinds of sharded units."""
    block = sum(block_matrices(model)) + 2 * model.hidden_size
    return block, plan.params - model.num_layers * block


def micro_tokens(plan: Plan) -> int:
    return plan.micro_batch_size * plan.spec.data.seq_len


# Time


@dataclass(frozen=True)
class _Pass:
    forward_s: float
    backward_s: float


def step_parts_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> dict[str, float]:
    """Seconds by part of a step, named as in the step events."""
    parts = {part: own + model.num_layers * probe.empty_block_s[part] for part, own in probe.empty_step_s.items()}
    block, outside = block_pass(plan, model, probe), outside_pass(plan, model, probe)
    for part, block_s, outside_s in (
        ("forward", block.forward_s, outside.forward_s),
        ("backward", block.backward_s, outside.backward_s),
    ):
        parts[part] = plan.grad_accum_steps * (parts[part] + model.num_layers * block_s + outside_s)
    parts["exposed_comm"] += collectives_s(plan, model, probe)
    parts["optimizer"] += probe.optimizer.beyond_call(plan.params / plan.layout.dp_shard)
    return parts


def block_pass(plan: Plan, model: DecoderModel, probe: MachineProbe) -> _Pass:
    """One block on one micro-batch, beyond its calls' own cost."""
    tokens, hidden = micro_tokens(plan), model.hidden_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
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
    return _Pass(forward, backward)


def outside_pass(plan: Plan, model: DecoderModel, probe: MachineProbe) -> _Pass:
    """Embedding, last norm, head and loss. The loss makes its gradients in the forward; the backward scales them."""
    tokens, hidden = micro_tokens(plan), model.hidden_size
    head, params = model.vocab_size * hidden, unit_params(plan, model)[1]
    products = (probe.matmul.forward, probe.matmul.input_gradient, probe.matmul.weight_gradient)
    forward = sum(_products_s(curve, head, tokens) for curve in products)
    chunk = min(tokens, chunk_tokens(model.vocab_size))
    forward += tokens / chunk * probe.loss.beyond_call(chunk * model.vocab_size)
    forward += tokens / chunk * 2 * probe.cast.beyond_call(head) + probe.cast.beyond_call(params)
    forward += probe.norm.forward.beyond_call(tokens * hidden) + probe.add.beyond_call(tokens * hidden)
    backward = probe.norm.backward.beyond_call(tokens * hidden) + 2 * probe.add.beyond_call(tokens * hidden)
    # Scaled, cast, the embedding's gradient zeroed and filled, then gathered for the collective.
    backward += 2 * probe.cast.beyond_call(head) + 2 * probe.add.beyond_call(head) + 2 * probe.cast.beyond_call(params)
    return _Pass(forward, backward)


def _attention_s(narrow: Curve, wide: Curve, plan: Plan, model: DecoderModel) -> float:
    """Straight over the head size, through both that were probed."""
    seq_len, (small, large) = plan.spec.data.seq_len, PROBED_HEAD_SIZES
    own, wider = narrow.at(seq_len), wide.at(seq_len)
    probed = max(0.0, own + (wider - own) * (model.head_dim - small) / (large - small))
    return probed * micro_tokens(plan) / PROBED_TOKENS * model.num_heads / PROBED_HEADS


def _products_s(curve: Curve, elements: int, tokens: int) -> float:
    return max(0.0, curve.at(elements) * tokens / PROBED_TOKENS - curve.seconds[0])


def chunk_tokens(vocab_size: int) -> int:
    return max(64, CHUNK_BYTES // (4 * vocab_size))


def collectives_s(plan: Plan, model: DecoderModel, probe: MachineProbe) -> float:
    """Parameters are gathered in the compute format, gradients reduced in that of `precision.reduce`."""
    block, outside = unit_params(plan, model)
    return model.num_layers * _unit_collectives_s(plan, block, probe, is_block=True) + _unit_collectives_s(
        plan, outside, probe, is_block=False
    )


def _unit_collectives_s(plan: Plan, params: int, probe: MachineProbe, *, is_block: bool) -> float:
    layout, seconds = plan.layout, 0.0
    reduced_bytes = params * COMPUTE_BYTES[plan.spec.precision.reduce]
    if layout.dp_shard > 1:
        gathers = _gathers(plan, is_block=is_block)
        seconds += gathers * probe.all_gather.at(params * COMPUTE_BYTES[plan.compute])
        seconds += plan.grad_accum_steps * probe.reduce_scatter.at(reduced_bytes)
    if layout.dp_replicate > 1:
        seconds += probe.all_reduce.beyond_call(reduced_bytes / layout.dp_shard)
    return seconds


def _gathers(plan: Plan, *, is_block: bool) -> int:
    """Of one unit in a step: where a block is freed after its forward (ZeRO-3), the backward gathers it again."""
    again = is_block and plan.layout.zero_stage == 3
    return plan.grad_accum_steps * (2 if again else 1)


# Memory


def peak_memory(plan: Plan, model: DecoderModel, probe: MachineProbe) -> dict[str, float]:
    """Resident bytes of one process at its peak, by cause.

    That is in the backward, or when a long text is written at the end: what training has freed is used again there.
    """
    training, writing = training_bytes(plan, model), {"sample": sample_bytes(plan, model, probe)}
    return {
        "worker": probe.bare_bytes,
        **state_bytes(plan, model),
        **max(training, writing, key=lambda causes: sum(causes.values())),
        "allocator": ALLOCATOR_PAD_BYTES,
    }


def state_bytes(plan: Plan, model: DecoderModel) -> dict[str, float]:
    """What lasts from step to step."""
    block, outside = unit_params(plan, model)
    freed = plan.layout.dp_shard > 1 and plan.layout.zero_stage == 3
    gathered = (2 * block if freed else model.num_layers * block) + outside
    own = plan.params / plan.layout.dp_shard
    moments = 8 if plan.spec.optim.name == "adamw" else 0
    return {"parameters": 4 * own + COMPUTE_BYTES[plan.compute] * gathered, "optimizer": moments * own}


def training_bytes(plan: Plan, model: DecoderModel) -> dict[str, float]:
    """What a step makes and frees."""
    formats = COMPUTE_BYTES[plan.compute] + COMPUTE_BYTES[plan.spec.precision.reduce]
    activations = model.num_layers * activation_bytes_per_token(model, plan.compute)
    return {
        "gradients": 4 * plan.params / plan.layout.dp_shard,
        "activations": micro_tokens(plan) * activations,
        "loss": loss_bytes(plan, model),
        "collectives": formats * max(unit_params(plan, model)),
    }


def activation_bytes_per_token(model: DecoderModel, compute: str) -> int:
    """What a block saves for its backward, a token: inputs of norms (twice, in fp32) and of matrices, the attention's
    q, k, v, output and log-sums, and the feed-forward's gate, its activation, up and their product."""
    unit = COMPUTE_BYTES[compute]
    norms = 2 * (8 + unit) * model.hidden_size + 8
    attention = unit * model.head_dim * 2 * (model.num_heads + model.num_kv_heads) + 4 * model.num_heads
    return norms + attention + 4 * unit * model.ffn_size


def loss_bytes(plan: Plan, model: DecoderModel) -> float:
    """A chunk of logits with all that is made of them, and the head's gradient in fp32."""
    chunk = min(micro_tokens(plan), chunk_tokens(model.vocab_size))
    return chunk * model.vocab_size * LOSS_BYTES_A_LOGIT + 4.0 * model.vocab_size * model.hidden_size


def sample_bytes(plan: Plan, model: DecoderModel, probe: MachineProbe) -> float:
    """Each length of a text that grows by a token is a new shape for every matrix product."""
    shapes = len(set(block_matrices(model))) + 1
    return plan.spec.sample.max_new_tokens * shapes * probe.matmul_shape_bytes


# What would fit


def fits(prediction: LocalPrediction, plan: Plan, memory_bytes: float) -> bool:
    """All processes share the machine's memory."""
    return prediction.peak_memory_bytes * plan.devices_per_node <= memory_bytes


def suggest(plan: Plan, probe: MachineProbe, memory_bytes: float) -> str:
    """The first change, of those that keep the result the same, with which the plan fits; "" where none does."""
    per_rank = plan.micro_batch_size * plan.grad_accum_steps
    sharded = Layout(dp_shard=plan.world_size)
    for layout, words in ((plan.layout, ""), (sharded, f"layout.dp_shard={plan.world_size}")):
        for micro in (size for size in range(plan.micro_batch_size, 0, -1) if per_rank % size == 0):
            other = replace(plan, layout=layout, micro_batch_size=micro, grad_accum_steps=per_rank // micro)
            prediction = predict_local(other, probe)
            if fits(prediction, other, memory_bytes):
                return " ".join(filter(None, (words, f"batching.micro_batch_size={micro}")))
    return ""
