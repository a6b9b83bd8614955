"""The decoder's block written down on a tape, with the operations and the lifetimes of the engine's own.

Elements are of one rank and one micro-batch: tokens of its part of the sequence (context parallelism), heads and widths
of its part of the matrices (tensor parallelism).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from trainspec_cli.planner.engine_memory.tape import Tape, Value
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.run import Recompute


@dataclass(frozen=True)
class BlockProfile:
    """Bytes; what comes in is counted where it was made, what goes out here."""

    forward_peak: float
    kept: float
    """From forward to backward, the output included."""
    backward_peak: float
    """The output's gradient, which takes its place, and the parameters' included."""
    put_off: float
    """Kept from a backward of inputs until that of weights, where schedules split them."""


@dataclass(frozen=True)
class Shape:
    """What a block's sizes follow from."""

    model: DecoderModel
    layout: Layout
    samples: int
    seq_len: int
    """Of this rank's part of the sequence."""
    width: float
    """Bytes of an element in the compute format."""
    fp8: bool = False
    """Linear layers multiply in it."""

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def outside_tokens(self) -> float:
        """Between the regions of tensor parallelism."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)


@lru_cache(maxsize=1024)
def profile_block(shape: Shape, recompute: Recompute, split: bool) -> BlockProfile:
    """Of one block, forward and backward. `split`: weights' gradients come later."""
    tape = Tape(shape.width, fp8=shape.fp8)
    tape.put_off = [] if split else None
    source = tape.leaf(shape.outside_tokens * shape.model.hidden_size)
    tape.is_saving = recompute == "none"
    tape.kept = [] if recompute == "selective" else None
    out = block(tape, source, shape)
    forward_peak, kept, saves = tape.meter.peak, tape.meter.live, tape.saves
    gradient, node = tape.new(out.elements), out.node
    del out
    tape.meter.peak = tape.meter.live
    if recompute != "none":
        tape.is_saving, tape.saves, tape.saves_left = True, 0, saves
        tape.recalled, tape.kept = deque(tape.kept or ()), None
        node = block(tape, source, shape).node
    assert node is not None
    tape.backward(node, gradient)
    put_off = {id(storage): storage.size for pair in tape.put_off or () for storage in pair}
    return BlockProfile(forward_peak, kept, tape.meter.peak, sum(put_off.values()))


def block(tape: Tape, x: Value, shape: Shape) -> Value:
    mixed = region(tape, norm(tape, x, shape), shape, attention)
    x = tape.add(x, mixed)
    return tape.add(x, region(tape, norm(tape, x, shape), shape, feed_forward))


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return tape.norm(x, tape.leaf(shape.model.hidden_size), shape.outside_tokens)


Part = Callable[[Tape, Value, Shape], Value]


def region(tape: Tape, x: Value, shape: Shape, part: Part) -> Value:
    """Between two exchanges over tp. With several samples the exchange along the sequence needs copies."""
    tp, whole = shape.layout.tp, shape.tokens * shape.model.hidden_size
    if tp == 1:
        return part(tape, x, shape)
    copied = whole * shape.width if shape.samples > 1 else 0.0
    if shape.layout.sequence_parallel:
        entered = tape.copy(x, whole, scratch=(copied * (1 + 1 / tp), copied))
        return tape.copy(part(tape, entered, shape), whole / tp, scratch=(copied, copied * (1 + 1 / tp)))
    entered = tape.copy_in_backward(x)
    return tape.copy_in_forward(part(tape, entered, shape))


def attention(tape: Tape, x: Value, shape: Shape) -> Value:
    model, tokens, tp = shape.model, shape.tokens, shape.layout.tp
    query, key = model.num_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    q, k, v = (tape.linear(x, tape.leaf(model.hidden_size * n), tokens * n) for n in (query, key, key))
    if model.qk_norm:
        q, k = (tape.norm(y, tape.leaf(model.head_dim), y.elements / model.head_dim) for y in (q, k))
    if not model.learned_positions:
        q, k = (rotate(tape, y) for y in (q, k))
    mixed = core(tape, q, k, v, shape)
    return tape.linear(mixed, tape.leaf(query * model.hidden_size), tokens * model.hidden_size)


def rotate(tape: Tape, x: Value) -> Value:
    """Saves cosines and sines alone, which all layers share."""
    size = x.elements * x.width
    return tape.apply((x,), x.elements, scratch=(3 * size, 2.5 * size))


def core(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    layout, rows = shape.layout, q.elements / shape.model.head_dim
    if layout.cp == 1:
        return flash(tape, q, k, v, rows)
    if layout.context_method == "ulysses":
        q, k, v = (swap(tape, y) for y in (q, k, v))
        return swap(tape, flash(tape, q, k, v, rows))
    return ring(tape, q, k, v, rows, layout.cp)


def flash(tape: Tape, q: Value, k: Value, v: Value, rows: float) -> Value:
    """Saves its inputs, its output and a logarithm a row."""
    saved = (q, k, v, tape.new(rows, 4.0))
    return tape.apply((q, k, v), q.elements, saved=saved, saves_output=True, costly=True)


def swap(tape: Tape, x: Value) -> Value:
    """All-to-all between parts of the sequence and parts of the heads: a copy to send, one received, one in order."""
    size = 2 * x.elements * x.width
    return tape.copy(x, scratch=(size, size))


def ring(tape: Tape, q: Value, k: Value, v: Value, rows: float, turns: int) -> Value:
    """Of the ring's last rank, whose queries meet every part of the keys.

    Keys and values travel with their successors; sums are in fp32, keys of groups repeated for their queries. A
    selective recomputation keeps each turn's result. The whole stands head by head, and is copied to stand token by
    token.
    """
    width, query, pair = q.width, q.elements, k.elements + v.elements
    travelling = 2 * width * pair
    forward = 4 * query + travelling + (2 * width + 8) * query + 2 * width * query
    backward = 4 * query + 2 * width * pair + 2 * 4 * pair + (8 * width + 4) * query
    tape.keep((query * width + 4 * rows) * turns)
    saved = (q, k, v, tape.new(rows, 4.0))
    return tape.copy(tape.apply((q, k, v), query, saved=saved, saves_output=True, scratch=(forward, backward)))


def feed_forward(tape: Tape, x: Value, shape: Shape) -> Value:
    model, inner = shape.model, shape.model.ffn_size // shape.layout.tp
    size, elements = model.hidden_size * inner, shape.tokens * inner
    down = tape.leaf(size)
    if not model.gated_mlp:
        return tape.linear(tape.unary(tape.linear(x, tape.leaf(size), elements)), down, x.elements)
    gated = tape.mul(tape.unary(tape.linear(x, tape.leaf(size), elements)), tape.linear(x, tape.leaf(size), elements))
    return tape.linear(gated, down, shape.tokens * model.hidden_size)
