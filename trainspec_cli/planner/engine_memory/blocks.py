"""A block written down on a tape, with the operations and the lifetimes of the engine's own.

Elements are of one rank and one micro-batch: tokens of its part of the sequence (context parallelism), heads and widths
of its part of the matrices (tensor parallelism).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache, partial

from trainspec_cli.planner.engine_memory.attention import attention
from trainspec_cli.planner.engine_memory.feed_forward import Part, feed_forward, mixture
from trainspec_cli.planner.engine_memory.shape import Layer, Shape
from trainspec_cli.planner.engine_memory.ssm import mamba
from trainspec_cli.planner.engine_memory.tape import Tape, Value
from trainspec_cli.spec.run import Recompute


@dataclass(frozen=True)
class BlockProfile:
    """Bytes; what comes in is counted where it was made, what goes out here."""

    forward_peak: float
    kept: float
    """From forward to backward, the output included."""
    backward_peak: float
    """The output's gradient, which takes its place, and the parameters' included. With experts that are sharded by
    themselves: after their gradients were taken away."""
    put_off: float
    """Kept from a backward of inputs until that of weights, where schedules split them."""
    experts_peak: float = 0.0
    """Of the backward until the gradients of such experts are there, these included; 0 without such."""
    experts_live: float = 0.0
    """When they were taken away."""


@lru_cache(maxsize=1024)
def profile_block(shape: Shape, layer: Layer, recompute: Recompute, split: bool) -> BlockProfile:
    """Of one block, forward and backward. `split`: weights' gradients come later."""
    tape = Tape(shape.width, fp8=shape.fp8)
    tape.put_off = [] if split else None
    source = tape.leaf(shape.outside_tokens * shape.decoder.hidden_size)
    tape.is_saving = recompute == "none"
    tape.kept = [] if recompute == "selective" else None
    out = block(tape, source, shape, layer)
    forward_peak, kept, saves = tape.meter.peak, tape.meter.live, tape.saves
    gradient, node = tape.new(out.elements), out.node
    del out
    tape.meter.peak = tape.meter.live
    if recompute != "none":
        tape.is_saving, tape.saves, tape.saves_left = True, 0, saves
        tape.apart.clear()
        tape.recalled, tape.kept = deque(tape.kept or ()), None
        node = block(tape, source, shape, layer).node
    assert node is not None
    tape.backward(node, gradient)
    put_off = {id(storage): storage.size for pair in tape.put_off or () for storage in pair}
    return BlockProfile(forward_peak, kept, tape.meter.peak, sum(put_off.values()), *tape.taken)


def block(tape: Tape, x: Value, shape: Shape, layer: Layer) -> Value:
    if layer.mixer != "none":
        mix = partial(attention, window=layer.window) if layer.mixer == "attention" else mamba
        mixed = region(tape, norm(tape, x, shape), shape, mix)
        if shape.decoder.attention_bias == "all":
            mixed = tape.copy_with_bias(mixed, tape.leaf(shape.decoder.hidden_size))
        x = tape.add(x, mixed)
    if layer.feed == "dense":
        return tape.add(
            x, region(tape, norm(tape, x, shape), shape, partial(feed_forward, width=shape.decoder.ffn_size))
        )
    return x if layer.feed == "none" else tape.add(x, mixture(tape, norm(tape, x, shape), shape, region))


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return tape.norm(x, tape.leaf(shape.decoder.hidden_size), shape.outside_tokens)


def region(tape: Tape, x: Value, shape: Shape, part: Part) -> Value:
    """Between two exchanges over tp. With several samples the exchange along the sequence needs copies."""
    tp, whole = shape.layout.tp, shape.tokens * shape.decoder.hidden_size
    if tp == 1:
        return part(tape, x, shape)
    copied = whole * shape.width if shape.samples > 1 else 0.0
    if shape.layout.sequence_parallel:
        entered = tape.copy(x, whole, scratch=(copied * (1 + 1 / tp), copied))
        return tape.copy(part(tape, entered, shape), whole / tp, scratch=(copied, copied * (1 + 1 / tp)))
    entered = tape.copy_in_backward(x)
    return tape.copy_in_forward(part(tape, entered, shape))
