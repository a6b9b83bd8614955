"""Attention on a tape: grouped heads, windows, sinks, latents, and the sequence spread over ranks.

Where a mask or a head's size decides which kernel runs, counted is one that never holds the scores, as the fused ones
of GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.plan.memory.engine.parts import Shape, linear
from trainspec_cli.plan.memory.engine.tape import Tape, Value
from trainspec_cli.recipe.keys.model_parts import SINK_DIMS


def attention(tape: Tape, x: Value, shape: Shape) -> Value:
    model, tp = shape.decoder, shape.layout.tp
    query, key = model.num_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    sizes = {"q": query, "k": key, "v": key}
    q, k, v = (linear(tape, x, shape, name, size, model.hidden_size) for name, size in sizes.items())
    if model.qk_norm:
        q, k = (tape.norm(y, tape.leaf(model.head_dim), y.elements / model.head_dim) for y in (q, k))
    if shape.model.rotates:
        q, k = (rotate(tape, y) for y in (q, k))
    if model.attention_sinks:
        q, k = carry_sinks(tape, q, k, model.head_dim)
    mixed = core(tape, q, k, v, shape)
    return linear(tape, mixed, shape, "out", model.hidden_size, query)


def rotate(tape: Tape, x: Value) -> Value:
    """Saves cosines and sines alone, which all layers share."""
    size = 0.0 if tape.fuses else x.elements * x.width
    return tape.apply((x,), x.elements, scratch=(3 * size, 2.5 * size))


def carry_sinks(tape: Tape, q: Value, k: Value, size: int) -> tuple[Value, Value]:
    """A head's logit beside each of its queries, zeros beside the keys."""
    logit = tape.expand(tape.leaf(1), q.elements / size)
    grown = tape.copy(tape.cat(q, logit), q.elements * (size + SINK_DIMS) / size)
    return grown, tape.copy(k, k.elements * (size + SINK_DIMS) / size)


# Latent attention


def latent_attention(tape: Tape, x: Value, shape: Shape) -> Value:
    q = latent_queries(tape, x, shape)
    k, v = latent_keys_values(tape, x, shape)
    mixed = core(tape, q, k, v, shape)
    inputs = shape.decoder.num_heads // shape.layout.tp * shape.latent.v_head_dim
    return linear(tape, mixed, shape, "out", shape.decoder.hidden_size, inputs)


def latent_queries(tape: Tape, x: Value, shape: Shape) -> Value:
    model, mla, tokens = shape.decoder, shape.latent, shape.tokens
    heads, size = model.num_heads // shape.layout.tp, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    source, rank = x, mla.q_lora_rank or model.hidden_size
    if mla.q_lora_rank:
        source = tape.norm(tape.linear(x, tape.leaf(model.hidden_size * rank), tokens * rank), tape.leaf(rank), tokens)
    q = linear(tape, source, shape, "q", heads * size, rank)
    plain, rotated = tape.split(q, *(tokens * heads * part for part in (mla.qk_nope_head_dim, mla.qk_rope_head_dim)))
    return tape.cat(plain, rotate(tape, rotated))


def latent_keys_values(tape: Tape, x: Value, shape: Shape) -> tuple[Value, Value]:
    """The rotated part of the keys is one for all heads."""
    model, mla, tokens, heads = shape.decoder, shape.latent, shape.tokens, shape.decoder.num_heads // shape.layout.tp
    rank, shared, plain_size, value = mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim
    down = tape.linear(x, tape.leaf(model.hidden_size * (rank + shared)), tokens * (rank + shared))
    latent, rotated = tape.split(down, tokens * rank, tokens * shared)
    per_token = heads * (plain_size + value)
    both = tape.linear(tape.norm(latent, tape.leaf(rank), tokens), tape.leaf(rank * per_token), tokens * per_token)
    plain, v = tape.split(both, tokens * heads * plain_size, tokens * heads * value)
    turned = rotate(tape, rotated)
    return tape.cat(plain, tape.expand(turned, tokens * heads * shared)), v


# What crosses the sequence


@dataclass(frozen=True)
class Heads:
    """The heads that a kernel is given, with `samples` times `length` tokens."""

    samples: int
    length: int
    rows: float
    """Rows of the queries, over all of their heads."""
    window: int | None
    sinks: bool

    @property
    def is_cut(self) -> bool:
        return self.window is not None and self.window < self.length


def core(tape: Tape, q: Value, k: Value, v: Value, shape: Shape) -> Value:
    layout = shape.layout
    rows = shape.tokens * shape.decoder.num_heads / layout.tp
    if layout.cp > 1 and layout.context_method == "ring":
        return ring(tape, q, k, v, rows, layout.cp)
    length = shape.seq_len * layout.cp
    seq = Heads(shape.samples, length, rows, shape.layer.window, shape.decoder.attention_sinks)
    if layout.cp == 1:
        mixed = causal_core(tape, q, k, v, seq)
        return tape.copy(mixed) if seq.is_cut or v.elements < k.elements else mixed  # to stand token by token
    q, k, v = (swap(tape, y) for y in (q, k, v))
    return swap(tape, causal_core(tape, q, k, v, seq))


def causal_core(tape: Tape, q: Value, k: Value, v: Value, seq: Heads) -> Value:
    """Kernels take heads of one size."""
    is_narrow, elements = v.elements < k.elements, q.elements * v.elements / k.elements
    if is_narrow:
        v = tape.copy(v, k.elements)
    mixed = windowed(tape, q, k, v, seq) if seq.is_cut else whole(tape, q, k, v, seq=seq)
    return tape.part(mixed, elements) if is_narrow else mixed


def whole(tape: Tape, q: Value, k: Value, v: Value, *, seq: Heads, share: float = 1.0) -> Value:
    """Causal; of the first `share` of the sequence."""
    rows, elements = seq.rows * share, q.elements
    if not seq.sinks:
        return flash(tape, q, k, v, rows)
    longer = 1 + 1 / (seq.length * share)
    q, k, v = pad_front(tape, q, longer), tape.copy_in_forward(pad_front(tape, k, longer)), pad_front(tape, v, longer)
    return tape.part(flash(tape, q, k, v, rows * longer), elements)


def windowed(tape: Tape, q: Value, k: Value, v: Value, seq: Heads) -> Value:
    """The first block by itself, each other one with the keys of the block before."""
    window, elements = float(seq.window or 0), q.elements
    share, blocks = window / seq.length, -(-seq.length // window)
    start = [tape.part(y, y.elements * share) for y in (q, k, v)]
    first = whole(tape, *start, seq=seq, share=share)
    del start
    q, k, v = (tape.copy(y, y.elements * blocks * share) for y in (q, k, v))
    k, v = (beside(tape, y, (blocks - 1) / blocks) for y in (k, v))
    q = tape.part(q, q.elements * (blocks - 1) / blocks)
    if seq.samples > 1:
        q, k, v = (tape.copy(y) for y in (q, k, v))
    if seq.sinks:
        longer = 1 + 0.5 / window
        k, v = tape.copy_in_forward(pad_front(tape, k, longer)), pad_front(tape, v, longer)
    rest = flash(tape, q, k, v, seq.rows * share * (blocks - 1), mask=2 * window * window)
    if first.elements + rest.elements > elements:
        rest = tape.part(rest, elements - first.elements)
    return tape.cat(first, rest)


def beside(tape: Tape, x: Value, share: float) -> Value:
    """Each block's tokens and those of the one after, so that each stands behind the one before."""
    return tape.cat(tape.part(x, x.elements * share), tape.part(x, x.elements * share))


def pad_front(tape: Tape, x: Value, longer: float) -> Value:
    return tape.copy(x, x.elements * longer)


def flash(tape: Tape, q: Value, k: Value, v: Value, rows: float, mask: float = 0.0) -> Value:
    """Saves its inputs, its output and a logarithm a row."""
    saved = (q, k, v, tape.new(rows, 4.0), tape.new(mask))
    return tape.apply((q, k, v), q.elements, saved=saved, saves_output=True, costly=True)


def swap(tape: Tape, x: Value) -> Value:
    """All-to-all between parts of the sequence and parts of the heads: a copy to send, one received, one in order."""
    size = 2 * x.elements * x.width
    return tape.copy(x, scratch=(size, size))


def ring(tape: Tape, q: Value, k: Value, v: Value, rows: float, turns: int) -> Value:
    """Record ring attention on the last rank, whose queries meet every part of the keys.

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
