"""What layers of all kinds are made of: norms, regions of tensor parallelism, feed-forwards."""

from __future__ import annotations

from collections.abc import Callable

from trainspec_cli.planner.memory.engine.shape import Shape
from trainspec_cli.planner.memory.engine.tape import Tape, Value

Part = Callable[[Tape, Value, Shape], Value]


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return tape.norm(x, tape.leaf(shape.hidden), shape.outside_tokens)


def linear(tape: Tape, x: Value, shape: Shape, name: str, outputs: int, inputs: int) -> Value:
    """A rank's part of a matrix, with its adapter beside it, if it has one."""
    tokens, rank = x.elements / inputs, shape.lora.rank
    y = tape.linear(x, tape.leaf(outputs * inputs), tokens * outputs)
    if not rank or name not in shape.lora.targets:
        return y
    narrow = tape.linear(x, tape.leaf(rank * inputs, frozen=False), tokens * rank)
    return tape.add(y, tape.copy(tape.linear(narrow, tape.leaf(outputs * rank, frozen=False), tokens * outputs)))


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
    if not shape.decoder.gated_mlp:
        wide = activate(tape, linear(tape, x, shape, "up", inner, shape.hidden), shape)
    else:
        wide = tape.mul(
            activate(tape, linear(tape, x, shape, "gate", inner, shape.hidden), shape),
            linear(tape, x, shape, "up", inner, shape.hidden),
        )
    return linear(tape, wide, shape, "down", shape.hidden, inner)


def activate(tape: Tape, x: Value, shape: Shape) -> Value:
    """The square of relu takes two steps, and a power's backward two values on the way."""
    if shape.decoder.activation != "relu2":
        return tape.unary(x)
    relu = tape.apply((x,), x.elements, saves_output=True)
    return tape.apply((relu,), x.elements, saved=(relu,), scratch=(0.0, 2 * x.elements * x.width))
