"""Feed-forwards and experts on the tape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from trainspec_cli.planner.engine_memory.shape import Shape
from trainspec_cli.planner.engine_memory.tape import Tape, Value
from trainspec_cli.spec.model import DecoderModel, ExpertSpec

Part = Callable[[Tape, Value, Shape], Value]
Region = Callable[[Tape, Value, Shape, Part], Value]
"""A part between two exchanges over tp."""


def feed_forward(tape: Tape, x: Value, shape: Shape, width: int) -> Value:
    model, inner = shape.decoder, width // shape.layout.tp
    size, elements = model.hidden_size * inner, shape.tokens * inner
    down = tape.leaf(size)
    if not model.gated_mlp:
        return tape.linear(activation(tape, tape.linear(x, tape.leaf(size), elements), model), down, x.elements)
    gated = tape.mul(
        activation(tape, tape.linear(x, tape.leaf(size), elements), model), tape.linear(x, tape.leaf(size), elements)
    )
    return tape.linear(gated, down, shape.tokens * model.hidden_size)


def mixture(tape: Tape, x: Value, shape: Shape, region: Region) -> Value:
    """Router, routed experts on this rank's own tokens, shared experts."""
    model, experts = shape.decoder, shape.decoder.experts
    assert experts is not None
    y = dispatch(tape, x, route(tape, x, experts, shape), experts, shape)
    if not experts.shared_experts:
        return y
    width = experts.shared_experts * (experts.shared_expert_ffn_size or experts.expert_ffn_size)
    shared = region(tape, x, shape, partial(feed_forward, width=width))
    if experts.shared_gate:
        shared = tape.mul(shared, tape.unary(tape.product(x, tape.leaf(model.hidden_size), shape.outside_tokens)))
    return tape.add(y, shared)


def route(tape: Tape, x: Value, experts: ExpertSpec, shape: Shape) -> Value:
    """-> the chosen experts' weights, in fp32; saved are scores, choices and what normalised them."""
    tokens, chosen = shape.outside_tokens, shape.outside_tokens * experts.top_k
    scores_bytes = 4.0 * tokens * experts.num_experts
    logits = tape.product(x, tape.leaf(shape.decoder.hidden_size * experts.num_experts), tokens * experts.num_experts)
    wide = tape.copy_as(logits, 4.0)
    del logits
    scores = tape.apply((wide,), wide.elements, saves_output=True, width=4.0)
    del wide
    choosing = scores_bytes * ((1 if experts.balance_rate else 0) + (experts.top_groups < experts.num_groups))
    index = tape.new(chosen, 8.0)
    weights = tape.apply((scores,), chosen, saved=(index,), width=4.0, scratch=(choosing, scores_bytes))
    if experts.normalise_weights:
        weights = tape.apply((weights,), chosen, saved=(weights, tape.new(tokens, 4.0)), width=4.0)
    weights = tape.copy(weights)
    if experts.balance_loss:
        weights = balance(tape, weights, scores)
    return weights


def balance(tape: Tape, weights: Value, scores: Value) -> Value:
    """The gradient of the loss that evens out visits: of scores over their sums."""
    size = scores.elements * 4.0
    return tape.apply((weights, scores), weights.elements, saved=(scores,), width=4.0, scratch=(2 * size, size))


def dispatch(tape: Tape, x: Value, weights: Value, experts: ExpertSpec, shape: Shape) -> Value:
    """Copies of tokens to their experts and back. Over ep they travel, evenly spread."""
    hidden, copies = shape.decoder.hidden_size, shape.outside_tokens * experts.top_k
    source, place = tape.new(copies, 8.0), tape.new(copies, 8.0)
    rows = tape.apply((x,), copies * hidden, saved=(place,), scratch=(8.0 * copies, copies * hidden * x.width))
    done = travel(tape, rows, experts, shape) if shape.layout.ep > 1 else run_experts(tape, rows, experts, shape)
    home = tape.apply((done,), copies * hidden, saved=(source,), scratch=(0.0, copies * hidden * x.width))
    narrow = tape.copy_as(weights, home.width)
    return tape.apply((narrow, home), x.elements, saved=(narrow, home), costly=True)


def travel(tape: Tape, rows: Value, experts: ExpertSpec, shape: Shape) -> Value:
    """Evenly spread over ep: rows are sent, sorted, worked on, sorted back and sent home, each into new memory."""
    came = tape.copy(rows)
    order = tape.new(came.elements / shape.decoder.hidden_size, 8.0)
    done = run_experts(tape, tape.apply((came,), came.elements, saved=(order,)), experts, shape)
    back = tape.copy(tape.apply((done,), came.elements, saved=(order,)))
    return tape.copy(back)


def run_experts(tape: Tape, rows: Value, experts: ExpertSpec, shape: Shape) -> Value:
    model, held = shape.decoder, experts.num_experts // shape.layout.ep
    hidden, inner = model.hidden_size, experts.expert_ffn_size
    copies, halves = rows.elements / hidden, 2 if model.gated_mlp else 1
    leaf = tape.leaf if shape.layout.ep == 1 else tape.leaf_apart
    up = tape.product(rows, leaf(held * hidden * halves * inner), copies * halves * inner)
    if experts.bias:
        up = with_bias(tape, up, leaf(held * halves * inner))
    active = activate(tape, up, model)
    del up
    down = tape.product(active, leaf(held * inner * hidden), copies * hidden)
    return with_bias(tape, down, leaf(held * hidden)) if experts.bias else down


def with_bias(tape: Tape, x: Value, bias: Value) -> Value:
    """Each row's own bias is gathered and added."""
    return tape.apply((x, bias), x.elements, scratch=(x.elements * x.width, 0.0))


def activate(tape: Tape, up: Value, model: DecoderModel) -> Value:
    """Of a gate and a linear half that lie in one matrix."""
    if not model.gated_mlp:
        return activation(tape, up, model)
    gate, linear = tape.halves(up)
    if model.gate_limit is None:
        return tape.mul(activation(tape, gate, model), linear)
    gate, linear = tape.unary(gate), tape.unary(linear)
    weighed = tape.mul(gate, tape.apply((tape.copy(gate),), gate.elements, saves_output=True))
    return tape.mul(weighed, tape.copy(linear))


def activation(tape: Tape, x: Value, model: DecoderModel) -> Value:
    if model.activation != "relu2":
        return tape.unary(x)
    positive = tape.apply((x,), x.elements, saves_output=True)
    return tape.apply((positive,), x.elements, saved=(positive,), scratch=(0.0, 2 * x.elements * x.width))
