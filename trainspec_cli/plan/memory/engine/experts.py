"""A mixture of experts on a tape: router, tokens sorted by expert, the experts' products, tokens back in their places.

Tokens are spread evenly over experts and ranks. The experts' product is GPUs' grouped one: it takes no room beside its
result.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.plan.memory.engine.parts import Shape, activate, feed_forward_of, region
from trainspec_cli.plan.memory.engine.tape import INDEX, PRECISE, Tape, Value


def mixture(tape: Tape, x: Value, shape: Shape) -> Value:
    indices, weights = router(tape, x, shape)
    send = dispatch if shape.layout.ep == 1 else spread_dispatch
    y = send(tape, x, indices, weights, shape)
    if not shape.experts.shared_experts:
        return y
    shared = region(tape, x, shape, shared_experts)
    if shape.experts.shared_gate:
        share = sigmoid(tape, tape.linear(x, tape.leaf(shape.hidden), shape.outside_tokens))
        shared = tape.mul(shared, tape.expand(share, shared.elements))
    return tape.add(y, shared)


def shared_experts(tape: Tape, x: Value, shape: Shape) -> Value:
    spec = shape.experts
    return feed_forward_of(tape, x, shape, spec.shared_experts * (spec.shared_expert_ffn_size or spec.expert_ffn_size))


# Router


def router(tape: Tape, x: Value, shape: Shape) -> tuple[Value, Value]:
    """-> (indices, weights). Scores are in fp32."""
    spec, tokens = shape.experts, shape.outside_tokens
    scored, chosen = tokens * spec.num_experts, tokens * spec.top_k
    logits = tape.linear(x, tape.leaf(shape.hidden * spec.num_experts), scored)
    scores = tape.apply((tape.cast(logits, PRECISE),), scored, saves_output=True, width=PRECISE)
    indices = choose(tape, shape)
    weights = tape.apply((scores,), chosen, saved=(indices,), width=PRECISE)
    if spec.normalise_weights:
        total = tape.apply((weights,), tokens, width=PRECISE)
        weights = tape.apply((weights, total), chosen, saved=(weights, total), width=PRECISE)
    weights = tape.apply((weights,), chosen, width=PRECISE)
    if spec.balance_loss:
        weights = with_loss(tape, weights, scores)
    if spec.capacity_factor is not None:
        indices, weights = within_capacity(tape, weights)
    return indices, weights


def choose(tape: Tape, shape: Shape) -> Value:
    """Choose the experts, from biased scores and from those of the chosen groups."""
    spec = shape.experts
    copies = (spec.balance_rate > 0) + (spec.top_groups < spec.num_groups)
    room = tape.new(copies * shape.outside_tokens * spec.num_experts, PRECISE)
    indices = tape.new(shape.outside_tokens * spec.top_k, INDEX)
    del room
    return indices


def with_loss(tape: Tape, weights: Value, scores: Value) -> Value:
    """Scores that sum to 1 and counted visits make the loss, a scalar."""
    visits = tape.new(scores.elements, PRECISE)
    total = tape.apply((scores,), weights.elements, width=PRECISE)
    normal = tape.apply((scores, total), scores.elements, saved=(scores, total), width=PRECISE)
    loss = tape.apply((normal,), 1, width=PRECISE)
    del visits
    return tape.with_side(weights, loss)


def within_capacity(tape: Tape, weights: Value) -> tuple[Value, Value]:
    """Choices ordered by weight and by expert, and counted."""
    chosen = weights.elements
    indices, kept = tape.new(chosen, INDEX), tape.new(chosen, 1.0)
    return indices, tape.apply((weights,), chosen, saved=(kept,), width=PRECISE, scratch=(6 * INDEX * chosen, 0.0))


# Tokens to experts and back


@dataclass
class SortedCopies:
    x: Value
    """Copies of tokens, in their experts' order."""
    source: Value
    place: Value
    tokens: float


def dispatch(tape: Tape, x: Value, indices: Value, weights: Value, shape: Shape) -> Value:
    """All experts are here."""
    copies = sort_by_expert(tape, x, indices, shape)
    return combine(tape, copies, products(tape, copies.x, shape), weights)


def spread_dispatch(tape: Tape, x: Value, indices: Value, weights: Value, shape: Shape) -> Value:
    """Send copies to the ranks of their experts, sort them by expert again, and send the results back."""
    copies = sort_by_expert(tape, x, indices, shape)
    came = tape.copy(tape.part(copies.x, copies.x.elements))
    order = tape.new(indices.elements, INDEX)
    multiplied = tape.leave(products(tape, tape.enter(permute(tape, came, order)), shape))
    back = tape.copy(permute(tape, multiplied, order))
    return combine(tape, copies, tape.cat(back), weights)


def permute(tape: Tape, x: Value, order: Value) -> Value:
    return tape.apply((x,), x.elements, saved=(order,))


def sort_by_expert(tape: Tape, x: Value, indices: Value, shape: Shape) -> SortedCopies:
    source, place = tape.new(indices.elements, INDEX), tape.new(indices.elements, INDEX)
    copies = take(tape, x, indices.elements * shape.hidden, place)
    return SortedCopies(copies, source, place, shape.outside_tokens)


def take(tape: Tape, x: Value, elements: float, copies: Value) -> Value:
    """Rows of `x`; backward, their gradients are put in order and then summed."""
    rows = INDEX * copies.elements
    return tape.apply((x,), elements, saved=(copies,), scratch=(rows, elements * x.width))


def combine(tape: Tape, copies: SortedCopies, y: Value, weights: Value) -> Value:
    """A token's copies, weighed and summed in one product, of which each token is a matrix of one row."""
    back = take(tape, y, y.elements, copies.source)
    narrow = tape.cast(weights, tape.width)
    summed = y.elements * copies.tokens / weights.elements
    return tape.part(tape.apply((narrow, back), summed, saved=(narrow, back), costly=True), summed)


# The experts themselves


def products(tape: Tape, x: Value, shape: Shape) -> Value:
    """Multiply copies of tokens with their experts' matrices."""
    spec, model = shape.experts, shape.decoder
    rows, held = x.elements / shape.hidden, spec.num_experts / shape.layout.ep
    halves = 2 if model.gated_mlp else 1
    expert = tape.new(rows if spec.bias else 0.0, INDEX)
    x = without_dropped(tape, x, shape)
    inner = grouped(tape, x, halves * spec.expert_ffn_size, rows, held)
    inner = add_bias(tape, inner, expert, shape)
    inner = activated(tape, inner, shape)
    y = grouped(tape, inner, shape.hidden, rows, held)
    y = add_bias(tape, y, expert, shape)
    return without_dropped(tape, y, shape)


def grouped(tape: Tape, x: Value, width: int, rows: float, experts: float) -> Value:
    weight = tape.leaf(experts * width * x.elements / rows)
    return tape.apply((x, weight), rows * width, saved=(x if weight.node else weight,), costly=True)


def add_bias(tape: Tape, y: Value, expert: Value, shape: Shape) -> Value:
    """Each row's own is put beside it first."""
    if not shape.experts.bias:
        return y
    bias = tape.apply((tape.leaf(1),), y.elements, saved=(expert,))
    return tape.add(y, bias)


def activated(tape: Tape, x: Value, shape: Shape) -> Value:
    if not shape.decoder.gated_mlp:
        return activate(tape, x, shape)
    gate, up = tape.split(x, x.elements / 2, x.elements / 2)
    if shape.decoder.gate_limit is None:
        return tape.mul(activate(tape, gate, shape), up)
    return clamped(tape, gate, up)


def clamped(tape: Tape, gate: Value, up: Value) -> Value:
    """gate * sigmoid(1.702 gate) * (up + 1), both bounded."""
    gate, up = tape.unary(gate), tape.unary(up)
    return tape.mul(tape.mul(gate, sigmoid(tape, tape.copy(gate))), tape.copy(up))


def sigmoid(tape: Tape, x: Value) -> Value:
    return tape.apply((x,), x.elements, saves_output=True)


def without_dropped(tape: Tape, x: Value, shape: Shape) -> Value:
    """Zeros in rows that no expert takes."""
    if shape.experts.capacity_factor is None:
        return x
    taken = tape.new(x.elements / shape.hidden, 1.0)
    return tape.apply((x,), x.elements, saved=(taken,))
