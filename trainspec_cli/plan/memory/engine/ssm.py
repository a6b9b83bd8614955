"""Mamba-2's mixer on a tape: projections, convolutions over time, the scan in blocks, the gated norm.

Shapes are given as the engine does: B samples, C blocks of Q tokens, G groups, R heads a group, P head size, N state
size. A product of matrices wants its batch dimensions to stand in one piece; where they do not, what enters is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.plan.memory.engine.parts import Shape
from trainspec_cli.plan.memory.engine.tape import PRECISE, Tape, Value
from trainspec_cli.recipe.keys.model_parts import CONV_TAPS, SCAN_BLOCK


@dataclass(frozen=True)
class ScanSizes:
    """Elements of what the scan works with, on one rank."""

    samples: int
    seq_len: int
    heads: float
    groups: float
    inner: float
    """Inner channels of a token, over all heads."""
    states: float
    """State channels of a token, over all groups."""

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def block(self) -> int:
        return min(SCAN_BLOCK, self.seq_len)

    @property
    def blocks(self) -> int:
        return -(-self.seq_len // self.block)

    @property
    def stands_apart(self) -> bool:
        """Return True if blocks of several samples or groups make a batch, and so do not lie in one piece."""
        return self.samples > 1 or self.groups > 1


def scan_of(shape: Shape) -> ScanSizes:
    model, tp = shape.hybrid, shape.layout.tp
    heads, groups = model.mamba_heads / tp, model.mamba_groups / tp
    inner, states = heads * model.mamba_head_dim, groups * model.mamba_state_size
    return ScanSizes(shape.samples, shape.seq_len, heads, groups, inner, states)


def mamba(tape: Tape, x: Value, shape: Shape) -> Value:
    scan = scan_of(shape)
    inner, b, c = (convolved(tape, x, rows, shape) for rows in (scan.inner, scan.states, scan.states))
    dt = tape.cast(tape.linear(x, tape.leaf(shape.hidden * scan.heads), scan.tokens * scan.heads), PRECISE)
    dt = tape.unary(tape.apply((dt,), dt.elements, width=PRECISE))
    y = selective_scan(tape, inner, dt, b, c, scan)
    y = tape.add(y, scaled(tape, inner, tape.leaf(scan.heads)))
    normed = gated_norm(tape, y, tape.linear(x, tape.leaf(shape.hidden * scan.inner), y.elements), scan)
    return tape.linear(normed, tape.leaf(scan.inner * shape.hidden), scan.tokens * shape.hidden)


def convolved(tape: Tape, x: Value, rows: float, shape: Shape) -> Value:
    """Projected, each channel convolved over time, and activated. Channels come first while it convolves."""
    projected = tape.linear(x, tape.leaf(shape.hidden * rows), shape.tokens * rows)
    return tape.unary(conv(tape, tape.copy_in_backward(projected), rows, shape.seq_len))


def conv(tape: Tape, x: Value, rows: float, seq_len: int) -> Value:
    padded = tape.copy(x, x.elements * (1 + (CONV_TAPS - 1) / seq_len))
    weights = tape.leaf(rows * CONV_TAPS), tape.leaf(rows)
    return tape.apply((padded, *weights), x.elements, saved=(padded,), costly=True)


def gated_norm(tape: Tape, y: Value, z: Value, scan: ScanSizes) -> Value:
    gated = tape.mul(y, tape.unary(z))
    groups = scan.tokens * scan.groups
    normed = tape.apply((gated,), gated.elements, saved=(gated, tape.new(groups, PRECISE)))
    return scaled(tape, normed, tape.leaf(scan.inner))


def scaled(tape: Tape, x: Value, factor: Value) -> Value:
    """Multiply by a factor of fewer elements, which is repeated."""
    return tape.mul(x, tape.expand(factor, x.elements))


# The scan


def selective_scan(tape: Tape, x: Value, dt: Value, b: Value, c: Value, scan: ScanSizes) -> Value:
    whole = scan.blocks * scan.block / scan.seq_len
    x, dt, b, c = (tape.copy(value, value.elements * whole) for value in (x, dt, b, c))
    decay = tape.apply((tape.mul(dt, tape.expand(tape.leaf(scan.heads), dt.elements)),), dt.elements, width=PRECISE)
    x = scaled(tape, x, tape.cast(dt, tape.width))
    y = tape.add(within_blocks(tape, x, decay, b, c, scan), from_earlier_blocks(tape, x, decay, b, c, scan))
    return tape.copy(y, y.elements / whole)


def within_blocks(tape: Tape, x: Value, decay: Value, b: Value, c: Value, scan: ScanSizes) -> Value:
    """Attention of c on b, faded by the decay between two tokens: B C G R Q Q of them."""
    pairs = decay.elements * scan.block
    faded_by = exp(tape, tape.copy(difference(tape, tape.expand(decay, pairs), tape.expand(decay, pairs))))
    scores = product(tape, ordered(tape, c, scan), ordered(tape, b, scan), pairs / scan.heads * scan.groups)
    faded = tape.cast(tape.mul(tape.expand(scores, pairs, width=PRECISE), faded_by), tape.width)
    return tape.copy_in_backward(product(tape, faded, tape.copy_in_forward(x), x.elements))


def from_earlier_blocks(tape: Tape, x: Value, decay: Value, b: Value, c: Value, scan: ScanSizes) -> Value:
    """Return what the states at each block's beginning (B C G R P N) add to its tokens."""
    to_end = exp(tape, difference(tape, tape.part(decay, decay.elements), decay))
    fading = ordered(tape, scaled(tape, x, tape.cast(to_end, tape.width)), scan)
    states = x.elements / scan.block * scan.states / scan.groups
    added = tape.copy_in_backward(product(tape, ordered(tape, b, scan), fading, states))
    weights = decay_between_blocks(tape, decay, scan)
    mixed = product(tape, weights, tape.copy_in_forward(tape.cast(added, PRECISE)), states)
    entering = tape.cast(tape.copy_in_backward(mixed), tape.width)
    del mixed
    from_begin = exp(tape, decay)
    read = product(tape, ordered(tape, c, scan), tape.copy_in_forward(entering), x.elements)
    return scaled(tape, tape.copy_in_backward(read), tape.cast(from_begin, tape.width))


def decay_between_blocks(tape: Tape, decay: Value, scan: ScanSizes) -> Value:
    """B G R C C of them: totals summed from one block to another."""
    pairs = scan.samples * scan.heads * scan.blocks**2
    summed = tape.copy(tape.copy(tape.expand(tape.part(decay, pairs / scan.blocks), pairs)))
    return exp(tape, tape.copy(summed))


def ordered(tape: Tape, x: Value, scan: ScanSizes) -> Value:
    return tape.copy_in_forward(x) if scan.stands_apart else x


def product(tape: Tape, left: Value, right: Value, elements: float) -> Value:
    """Multiply a batch of matrices."""
    return tape.apply((left, right), elements, saved=(left, right), width=left.width, costly=True)


def exp(tape: Tape, x: Value) -> Value:
    return tape.apply((x,), x.elements, saves_output=True, width=x.width)


def difference(tape: Tape, left: Value, right: Value) -> Value:
    """Saves nothing; backward, the right one's gradient is the negative, in new memory."""
    return tape.add(left, tape.negated(right))
