"""Mamba-2's mixer on the tape, operation by operation as in the engine's own scan.

Sizes of one rank: I inner width, H heads, G groups, N state size, Q tokens of a block, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.engine_memory.shape import Shape
from trainspec_cli.planner.engine_memory.tape import Tape, Value
from trainspec_cli.spec.model import HybridModel

SCAN_BLOCK = 128
"""Tokens of a block of the engine's scan."""
WIDE = 4.0
"""Bytes of what the scan keeps in fp32: steps and decays."""


@dataclass(frozen=True)
class Sizes:
    tokens: float
    inner: int
    heads: int
    groups: int
    states: int
    """G x N."""
    block: int
    blocks: int
    """Of a sample."""

    @property
    def per_head(self) -> float:
        return self.tokens * self.heads

    @property
    def x(self) -> float:
        return self.tokens * self.inner

    @property
    def held(self) -> float:
        """Elements of the states at the blocks' ends."""
        return self.tokens / self.block * self.inner * self.states / self.groups

    @property
    def between(self) -> float:
        """Decays from block to block."""
        return self.per_head / self.block * self.blocks


def sizes_of(shape: Shape) -> Sizes:
    model, tp = shape.model, shape.layout.tp
    assert isinstance(model, HybridModel)
    heads, groups, block = model.mamba_heads // tp, model.mamba_groups // tp, min(SCAN_BLOCK, shape.seq_len)
    padded = -(-shape.seq_len // block)
    inner, states = heads * model.mamba_head_dim, groups * model.mamba_state_size
    return Sizes(shape.tokens, inner, heads, groups, states, block, padded)


def mamba(tape: Tape, source: Value, shape: Shape) -> Value:
    sizes, hidden = sizes_of(shape), shape.decoder.hidden_size
    x, b, c = (convolved(tape, source, hidden, n, sizes) for n in (sizes.inner, sizes.states, sizes.states))
    dt = steps(tape, source, hidden, sizes)
    y = scan(tape, x, dt, b, c, sizes)
    y = tape.add(y, tape.mul_leaf(x, tape.leaf(sizes.heads)))
    normed = gated_norm(tape, y, tape.linear(source, tape.leaf(hidden * sizes.inner), sizes.x), sizes)
    return tape.linear(normed, tape.leaf(sizes.inner * hidden), sizes.tokens * hidden)


def convolved(tape: Tape, source: Value, hidden: int, width: int, sizes: Sizes) -> Value:
    """A matrix, a convolution over a padded copy, an activation."""
    padded = tape.copy(tape.linear(source, tape.leaf(hidden * width), sizes.tokens * width))
    return tape.unary(tape.apply((padded, tape.leaf(5 * width)), padded.elements, saved=(padded,), costly=True))


def steps(tape: Tape, source: Value, hidden: int, sizes: Sizes) -> Value:
    wide = tape.copy_as(tape.linear(source, tape.leaf(hidden * sizes.heads), sizes.per_head), WIDE)
    shifted = tape.copy_with_bias(wide, tape.leaf(sizes.heads))
    return tape.apply((shifted,), sizes.per_head, saved=(shifted,), width=WIDE)


def scan(tape: Tape, x: Value, dt: Value, b: Value, c: Value, sizes: Sizes) -> Value:
    x, dt, b, c = (tape.copy(y) for y in (x, dt, b, c))
    decay = tape.copy(tape.mul_leaf(dt, tape.leaf(sizes.heads)))
    x = tape.mul(x, tape.copy_as(dt, tape.width))
    y = tape.add(within_blocks(tape, x, decay, b, c, sizes), from_earlier_blocks(tape, x, decay, b, c, sizes))
    return tape.copy(y)


def within_blocks(tape: Tape, x: Value, decay: Value, b: Value, c: Value, sizes: Sizes) -> Value:
    pairs = sizes.per_head * sizes.block
    faded = tape.apply((later_masked(tape, decay, pairs),), pairs, saves_output=True, width=WIDE)
    scores = tape.einsum(c, b, sizes.tokens * sizes.groups * sizes.block, copies=sizes.groups > 1)
    narrow = tape.copy_as(tape.apply((scores, faded), pairs, saved=(scores, faded), width=WIDE), tape.width)
    return tape.einsum(narrow, x, sizes.x, copies=True)


def later_masked(tape: Tape, decay: Value, pairs: float) -> Value:
    """Differences of every two tokens of a block."""
    return tape.copy(tape.apply((decay, decay), pairs, width=WIDE))


def from_earlier_blocks(tape: Tape, x: Value, decay: Value, b: Value, c: Value, sizes: Sizes) -> Value:
    to_end = tape.apply((tape.copy(decay),), sizes.per_head, saves_output=True, width=WIDE)
    kept = tape.mul(x, tape.copy_as(to_end, tape.width))
    added = tape.einsum(b, kept, sizes.held, copies=sizes.groups > 1)
    weights = tape.apply((decay,), sizes.between, saves_output=True, width=WIDE)
    entering = tape.copy_as(
        tape.einsum(weights, tape.copy_as(added, WIDE), sizes.held, copies=True, width=WIDE), tape.width
    )
    from_begin = tape.apply((decay,), sizes.per_head, saves_output=True, width=WIDE)
    return tape.mul(tape.einsum(c, entering, sizes.x, copies=sizes.groups > 1), tape.copy_as(from_begin, tape.width))


def gated_norm(tape: Tape, y: Value, z: Value, sizes: Sizes) -> Value:
    gated = tape.mul(y, tape.unary(z))
    normed = tape.apply((gated,), sizes.x, saved=(gated, tape.new(sizes.tokens * sizes.groups, 4.0)))
    return tape.mul_leaf(normed, tape.leaf(sizes.inner))
