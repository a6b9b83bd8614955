"""What layers of all kinds are made of: norms, regions of tensor parallelism, feed-forwards."""

from __future__ import annotations

from collections.abc import Callable

from trainspec_cli.planner.engine_memory.shape import Shape
from trainspec_cli.planner.engine_memory.tape import Tape, Value

Part = Callable[[Tape, Value, Shape], Value]


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return tape.norm(x, tape.leaf(shape.hidden), shape.outside_tokens)


def region(tape: Tape, x: Value, shape: Shape, part: Part) -> Value:
    """Between two exchanges over tp. With several samples the exchange along the sequence needs copies."""
    tp, whole = shape.layout.tp, shape.tokens * shape.hidden
    if tp == 1:
        return part(tape, x, shape)
    copied = whole * shape.width if shape.samples > 1 else 0.0
    if shape.layout.sequence_parallel:
        entered = tape.copy(x, whole, scratch=(copied * (1 + 1 / tp), copied))
        return tape.copy(part(tape, entered, shape), whole / tp, scratch=(copied, copied * (1 + 1 / tp)))
    entered = tape.copy_in_backward(x)
    return tape.copy_in_forward(part(tape, entered, shape))


def feed_forward(tape: Tape, x: Value, shape: Shape) -> Value:
    return feed_forward_of(tape, x, shape, shape.decoder.ffn_size)


def feed_forward_of(tape: Tape, x: Value, shape: Shape, width: int) -> Value:
    inner = width // shape.layout.tp
    size, elements = shape.hidden * inner, shape.tokens * inner
    down = tape.leaf(size)
    if not shape.decoder.gated_mlp:
        return tape.linear(activate(tape, tape.linear(x, tape.leaf(size), elements), shape), down, x.elements)
    gated = tape.mul(
        activate(tape, tape.linear(x, tape.leaf(size), elements), shape), tape.linear(x, tape.leaf(size), elements)
    )
    return tape.linear(gated, down, shape.tokens * shape.hidden)


def activate(tape: Tape, x: Value, shape: Shape) -> Value:
    """The square of relu takes two steps, and a power's backward two values on the way."""
    if shape.decoder.activation != "relu2":
        return tape.unary(x)
    relu = tape.apply((x,), x.elements, saves_output=True)
    return tape.apply((relu,), x.elements, saved=(relu,), scratch=(0.0, 2 * x.elements * x.width))
