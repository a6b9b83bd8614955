"""Attention on the tape: grouped-query heads, windows, sinks, latents; whole or spread over context parallelism.

What fused kernels save: queries, keys, values, the output and a logarithm a row.
"""

from __future__ import annotations

from trainspec_cli.planner.engine_memory.shape import Shape
from trainspec_cli.planner.engine_memory.tape import Tape, Value
from trainspec_cli.spec.model import LatentAttention

SINK_DIMS = 8
"""By so much the engine's heads grow where queries carry their head's sink."""


def attention(tape: Tape, x: Value, shape: Shape, window: int | None) -> Value:
    model, tokens, tp = shape.decoder, shape.tokens, shape.layout.tp
    if model.mla is not None:
        return latent_attention(tape, x, shape, model.mla)
    query, key = model.num_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    q, k, v = (tape.linear(x, tape.leaf(model.hidden_size * n), tokens * n) for n in (query, key, key))
    if model.qk_norm:
        q, k = (tape.norm(y, tape.leaf(model.head_dim), y.elements / model.head_dim) for y in (q, k))
    if shape.rotates:
        q, k = (rotate(tape, y) for y in (q, k))
    if model.attention_sinks:
        q, k = carry_sinks(tape, q, shape), widen(tape, k, shape)
    mixed = core(tape, q, k, v, shape, window)
    return tape.linear(mixed, tape.leaf(query * model.hidden_size), tokens * model.hidden_size)


def rotate(tape: Tape, x: Value) -> Value:
    """Saves cosines and sines alone, which all layers share."""
    size = x.elements * x.width
    return tape.apply((x,), x.elements, scratch=(3 * size, 2.5 * size))


def core(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, window: int | None) -> Value:
    layout, rows = shape.layout, rows_of(shape)
    if layout.cp > 1 and layout.context_method == "ring":
        return ring(tape, q, k, v, rows, layout.cp)
    if layout.cp > 1:
        q, k, v = (swap(tape, y) for y in (q, k, v))
    seen = shape.seq_len * layout.cp
    if window is not None and window < seen:
        mixed = windowed(tape, q, k, v, shape, window)
    elif shape.decoder.attention_sinks:
        mixed = after_sink(tape, q, k, v, shape, seen)
    else:
        mixed = flash(tape, q, k, v, rows)
    return swap(tape, mixed) if layout.cp > 1 else mixed


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


# Latent attention (arXiv:2405.04434)


def latent_attention(tape: Tape, x: Value, shape: Shape, mla: LatentAttention) -> Value:
    model, tokens, heads = shape.decoder, shape.tokens, shape.decoder.num_heads // shape.layout.tp
    q = latent_queries(tape, x, shape, mla)
    k, v = latent_keys_values(tape, x, shape, mla)
    mixed = padded_flash(tape, q, k, v, tokens * heads)
    mixed = tape.apply((mixed,), tokens * heads * mla.v_head_dim)  # cut to the values' size
    out = tape.leaf(heads * mla.v_head_dim * model.hidden_size)
    return tape.linear(mixed, out, tokens * model.hidden_size)


def latent_queries(tape: Tape, x: Value, shape: Shape, mla: LatentAttention) -> Value:
    model, tokens, heads = shape.decoder, shape.tokens, shape.decoder.num_heads // shape.layout.tp
    rank, size = mla.q_lora_rank, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if rank:
        x = tape.linear(x, tape.leaf(model.hidden_size * rank), tokens * rank)
        x = tape.norm(x, tape.leaf(rank), tokens)
    q = tape.linear(x, tape.leaf((rank or model.hidden_size) * heads * size), tokens * heads * size)
    return join_rotated(tape, q, tokens * heads * mla.qk_rope_head_dim)


def join_rotated(tape: Tape, x: Value, rotated: float) -> Value:
    """A part of each head is rotated, and the head put together again."""
    size, whole = rotated * x.width, x.elements * x.width
    return tape.apply((x,), x.elements, scratch=(max(4 * size - whole, size), max(3.5 * size - whole, size)))


def latent_keys_values(tape: Tape, x: Value, shape: Shape, mla: LatentAttention) -> tuple[Value, Value]:
    """Keys are put together of two parts; values stay beside one of them."""
    model, tokens, heads = shape.decoder, shape.tokens, shape.decoder.num_heads // shape.layout.tp
    rank, size = mla.kv_lora_rank, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    both, wide = mla.qk_nope_head_dim + mla.v_head_dim, rank + mla.qk_rope_head_dim
    low = tape.linear(x, tape.leaf(model.hidden_size * wide), tokens * wide)
    normed = tape.apply((low, tape.leaf(rank)), tokens * rank, saved=(low, tape.new(tokens, 4.0)))
    pair = tape.linear(normed, tape.leaf(rank * heads * both), tokens * heads * both)
    return tape.apply((pair,), tokens * heads * size), pair


def padded_flash(tape: Tape, q: Value, k: Value, v: Value, rows: float) -> Value:
    """Values narrower than keys (they lie beside parts of them) are padded to their size."""
    return flash(tape, q, k, tape.apply((v,), k.elements), rows)


# Sinks and windows (gpt_oss)


def carry_sinks(tape: Tape, q: Value, shape: Shape) -> Value:
    """One more dimension with the sink's logit, then some zeros."""
    logit = tape.apply((q, tape.leaf(shape.decoder.num_heads)), q.elements * (1 + 1 / shape.decoder.head_dim))
    return widen(tape, logit, shape, SINK_DIMS - 1)


def widen(tape: Tape, x: Value, shape: Shape, dims: int = SINK_DIMS) -> Value:
    """Zeros at each head's end."""
    return tape.apply((x,), x.elements * (1 + dims / (shape.decoder.head_dim + SINK_DIMS - dims)))


def after_sink(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, seq_len: int) -> Value:
    """A token before the first stands for the sink."""
    wide = widen(tape, v, shape)
    mixed = flash_after_sink(tape, q, k, wide, rows_of(shape), seq_len)
    return tape.copy(mixed, rows_of(shape) * shape.decoder.head_dim)


def flash_after_sink(tape: Tape, q: Value, k: Value, v: Value, rows: float, keys: int) -> Value:
    """Keys are copied twice: for the token before them, and for what it reads."""
    more = (keys + 1) / keys
    q, k, v = (
        tape.copy(q, q.elements * more),
        tape.copy(tape.copy(k, k.elements * more)),
        tape.copy(v, v.elements * more),
    )
    return flash(tape, q, k, v, rows * more)


def rows_of(shape: Shape) -> float:
    """Queries of all heads held here."""
    return shape.tokens * (shape.decoder.num_heads // shape.layout.tp)


def windowed(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, window: int) -> Value:
    """The first block by itself; the others, each with the keys of the one before, as samples of their own."""
    sinks, seen = shape.decoder.attention_sinks, shape.seq_len * shape.layout.cp
    part, blocks = window / seen, -(-seen // window)
    wide = widen(tape, v, shape) if sinks else v
    first = first_block(tape, [tape.view(y, y.elements * part) for y in (q, k, wide)], shape, window)
    q, k, v = (tape.copy(y, y.elements * part * blocks) for y in (q, k, wide))
    rest = other_blocks(tape, q, k, v, shape, window, blocks)
    return tape.copy(tape.join(first, rest), rows_of(shape) * shape.decoder.head_dim)


def first_block(tape: Tape, parts: list[Value], shape: Shape, window: int) -> Value:
    """Plain causal attention of its own queries on its own keys."""
    q, k, v = parts
    rows = rows_of(shape) * window / (shape.seq_len * shape.layout.cp)
    if shape.decoder.attention_sinks:
        return flash_after_sink(tape, q, k, v, rows, window)
    return flash(tape, q, k, v, rows)


def other_blocks(tape: Tape, q: Value, k: Value, v: Value, shape: Shape, window: int, blocks: int) -> Value:
    left, sinks = (blocks - 1) / blocks, shape.decoder.attention_sinks
    rows = q.elements * left / (shape.decoder.head_dim + (SINK_DIMS if sinks else 0))
    k, v = (tape.copy(y, 2 * left * y.elements) for y in (k, v))
    if blocks > 2:  # one block alone need not be put in order
        q, k, v = tape.copy(q, left * q.elements), tape.copy(k), tape.copy(v)
    mask = tape.new(window * (2 * window + sinks))
    if sinks:
        more = (2 * window + 1) / (2 * window)
        k, v = tape.copy(tape.copy(k, k.elements * more)), tape.copy(v, v.elements * more)
    saved = (q, k, v, mask, tape.new(rows, 4.0))
    mixed = tape.apply(
        (q, k, v), left * q.elements if blocks == 2 else q.elements, saved=saved, saves_output=True, costly=True
    )
    return tape.copy(mixed)
