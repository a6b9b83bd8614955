"""Record a layer's forward and backward passes on a tape, with the same operations and lifetimes as in the engine's
blocks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from trainspec_cli.planner.memory.engine.tape import INDEX, PRECISE, Kernels, Storage, Stretch, Tape, Value
from trainspec_cli.planner.memory.engine.units import norms_of
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    CONV_TAPS,
    SCAN_BLOCK,
    SINK_DIMS,
    DecoderModel,
    ExpertSpec,
    HybridModel,
    LatentAttentionSpec,
    Layer,
    LayerNorms,
    Mixer,
    TextModel,
)
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.parameter_names import block_names

# The sizes of a layer (`Shape`), and the parts that all kinds of layers share: norms, regions, feed-forwards.


@dataclass(frozen=True)
class Shape:
    """Sizes on one rank: the tokens in its part of the sequence (context parallelism), and the heads and widths of its
    part of the matrices (tensor parallelism)."""

    model: TextModel
    layer: Layer
    layout: Layout
    samples: int
    seq_len: int
    """Length of this rank's part of the sequence."""
    width: float
    """Bytes per element in the compute format."""
    fp8: bool = False
    """True if linear layers use fp8."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    compiled: bool = False
    """True if element-wise operations are fused."""
    frozen: frozenset[str] = frozenset()
    """Names of the block's parameters that the recipe freezes. The tape knows only blocks that are frozen entirely."""

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def outside_tokens(self) -> float:
        """Return the number of tokens per rank outside the tensor-parallel regions."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def hidden(self) -> int:
        return self.model.hidden_size

    @property
    def decoder(self) -> DecoderModel:
        return self.model.as_decoder

    @property
    def hybrid(self) -> HybridModel:
        assert isinstance(self.model, HybridModel)
        return self.model

    @property
    def experts(self) -> ExpertSpec:
        assert self.model.experts is not None
        return self.model.experts

    @property
    def latent(self) -> LatentAttentionSpec:
        assert self.decoder.mla is not None
        return self.decoder.mla


def block_layout(layout: Layout) -> Layout:
    """Return the part of the layout that determines the sizes in a block, so that layouts can share profiles."""
    return Layout(
        tp=layout.tp,
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        context_method=layout.context_method,
    )


Part = Callable[[Tape, Value, Shape], Value]


def norm(tape: Tape, x: Value, shape: Shape) -> Value:
    return norm_of(tape, x, shape, shape.hidden, shape.outside_tokens)


def norm_of(tape: Tape, x: Value, shape: Shape, size: int, rows: float) -> Value:
    """Record a norm of the model's kind. LayerNorm also saves each row's mean, and may add a bias."""
    if shape.decoder.norm == "rms":
        return tape.norm(x, tape.leaf(size), rows)
    leaves = [tape.leaf(size) for _ in range(1 + shape.decoder.norm_bias)]
    saved = (x, tape.new(rows, PRECISE), tape.new(rows, PRECISE))
    return tape.apply((x, *leaves), x.elements, saved=saved, kernels=((2 * x.size,), (3 * x.size,)))


def linear(tape: Tape, x: Value, shape: Shape, name: str, outputs: int, inputs: int) -> Value:
    """Record a multiplication by a rank's part of a matrix, including its adapter if there is one."""
    tokens, rank = x.elements / inputs, shape.lora.rank
    if shape.lora.is_quantised:
        y = tape.dequantised_linear(x, outputs * inputs, tokens * outputs)
    else:
        # The weight gradient of a region's last matrix needs the gathered gradient, which only a block's first region
        # keeps.
        delays = not (tape.left and name in ("out", "down"))
        y = tape.linear(x, tape.leaf(outputs * inputs), tokens * outputs, delays=delays)
    if not rank or name not in shape.lora.targets:
        return y
    narrow = tape.linear(x, tape.leaf(rank * inputs, frozen=False), tokens * rank)
    y = tape.add(y, tape.copy(tape.linear(narrow, tape.leaf(outputs * rank, frozen=False), tokens * outputs)))
    return magnified(tape, y, shape, name, outputs * inputs, outputs) if shape.lora.magnitude else y


def magnified(tape: Tape, y: Value, shape: Shape, name: str, weights: int, outputs: int) -> Value:
    """Record the scaling of the outputs of an adapted matrix to its rows' magnitudes (DoRA), and the bias that follows.
    The lengths of the rows need the matrix with its adapter merged in."""
    tape.merge(weights, dequantises=shape.lora.is_quantised)
    y = tape.mul(y, tape.leaf(outputs, frozen=False))
    model = shape.decoder
    biased = model.mlp_bias if name in ("gate", "up") else model.attention_bias != "none" and name in ("q", "k", "v")
    return tape.copy(y) if biased else y


def region(tape: Tape, x: Value, shape: Shape, part: Part) -> Value:
    """Record the operations between two exchanges over tp. With several samples, exchanges along the sequence need
    copies.

    Weight gradients are computed while the gradient of the region's input is exchanged. In a block's second region, the
    first weight gradient is instead computed while the gradient of the first region's output is gathered
    (`engine/parallel/context.py`)."""
    tp, whole = shape.layout.tp, shape.tokens * shape.hidden
    if tp == 1:
        return part(tape, x, shape)
    copies = shape.samples > 1
    copied = whole * shape.width if copies else 0.0
    ordered = (2 * copied,) if copies else ()
    """Kernels that order tokens by sample or by rank."""

    def scatter(gradient: Value) -> tuple[Value, Storage]:
        tape.move(*ordered)
        sent = tape.new(whole) if copies else gradient
        return tape.new(whole / tp), sent.storage

    def gather(gradient: Value) -> tuple[Value, Storage]:
        sent = tape.new(whole / tp) if copies else gradient
        return tape.new(whole), sent.storage

    def add_up(gradient: Value) -> tuple[Value, Storage]:
        return tape.new(gradient.elements), tape.new(0.0).storage

    def gathered(gradient: Value) -> tuple[Value]:
        tape.move(*ordered)
        return (tape.new(whole) if copies else gradient,)

    if shape.layout.sequence_parallel:
        entered, turn = tape.cross(x, whole, copied * (1 + 1 / tp), scatter, lambda gradient: (gradient,))
        tape.move(*ordered)
    else:
        entered, turn = tape.cross(x, whole, 0.0, add_up, lambda gradient: (gradient,))
    # fp8 layers and layers with adapters compute both gradients together. A split schedule computes all weight
    # gradients later.
    if not (shape.fp8 or shape.lora.rank or tape.put_off is not None):
        tape.turns = [turn, *tape.left[-1:]] if shape.layout.sequence_parallel else [turn]
    y = part(tape, entered, shape)
    tape.turns = []
    if not shape.layout.sequence_parallel:
        tape.left.append(turn)
        return tape.copy_in_forward(y)
    tape.move(*ordered)
    y, turn = tape.cross(y, whole / tp, copied, gather, gathered)
    tape.left.append(turn)
    return y


def feed_forward(tape: Tape, x: Value, shape: Shape) -> Value:
    return feed_forward_of(tape, x, shape, shape.decoder.ffn_size)


def feed_forward_of(tape: Tape, x: Value, shape: Shape, width: int) -> Value:
    inner = width // shape.layout.tp

    def entering(name: str) -> Value:
        y = linear(tape, x, shape, name, inner, shape.hidden)
        return tape.summed(y) if shape.decoder.mlp_bias else y

    if not shape.decoder.gated_mlp:
        wide = activate(tape, entering("up"), shape)
    else:
        wide = tape.mul(activate(tape, entering("gate"), shape), entering("up"))
    return linear(tape, wide, shape, "down", shape.hidden, inner)


def activate(tape: Tape, x: Value, shape: Shape) -> Value:
    """Record the activation. Squared relu has two steps, and the backward pass of a power has two temporaries."""
    if shape.decoder.activation != "relu2":
        return tape.unary(x)
    relu = tape.apply((x,), x.elements, saves_output=True)
    return tape.apply((relu,), x.elements, saved=(relu,), scratch=(0.0, 2 * x.elements * x.width))


# Attention on a tape: grouped heads, windows, sinks, latent attention, and a sequence spread over ranks. If the choice
# of kernel depends on a mask or the head size, the count assumes a kernel that never stores the scores, like fused GPU
# kernels.


def attention(tape: Tape, x: Value, shape: Shape) -> Value:
    model, tp = shape.decoder, shape.layout.tp
    query, key = model.num_heads * model.head_dim // tp, model.num_kv_heads * model.head_dim // tp
    sizes = {"q": query, "k": key, "v": key}
    q, k, v = (linear(tape, x, shape, name, size, model.hidden_size) for name, size in sizes.items())
    if model.attention_bias != "none":
        q, k, v = (tape.summed(y) for y in (q, k, v))
    if model.qk_norm:
        widths = (query, key) if model.qk_norm_over == "all" else (model.head_dim,) * 2
        q, k = (norm_of(tape, y, shape, width, y.elements / width) for y, width in zip((q, k), widths, strict=True))
    if shape.model.rotates and shape.layer.rotates:
        q, k = (rotate_part(tape, y, model) for y in (q, k))
    if model.attention_sinks:
        q, k = carry_sinks(tape, q, k, model.head_dim)
    mixed = core(tape, q, k, v, shape)
    return linear(tape, mixed, shape, "out", model.hidden_size, query)


def rotate_part(tape: Tape, x: Value, model: DecoderModel) -> Value:
    """Rotate the first elements of each head."""
    rotated = x.elements * model.rotated_size / model.head_dim
    rest = x.elements - rotated
    part, kept = tape.split(x, rotated, rest) if rest else (x, None)
    turned = rotate_pairs(tape, part, model)
    return turned if kept is None else tape.cat(turned, kept)


def rotate_pairs(tape: Tape, x: Value, model: DecoderModel) -> Value:
    """Rotate all of `x`. Neighbours are first brought to the two halves."""
    return rotate(tape, tape.copy(x) if model.rotary_pairs == "neighbours" else x)


def rotate(tape: Tape, x: Value) -> Value:
    """Rotate `x`. This saves only cosines and sines, which all layers share."""
    size = 0.0 if tape.fuses else x.size
    # Half of `x` is negated and joined to the other half; then both products are added. In the backward pass, the
    # products come first.
    kernels = ((size, 2 * size, 2 * size, 2 * size, 3 * size), (2 * size, 2 * size, size, 2 * size, 3 * size))
    return tape.apply((x,), x.elements, scratch=(3 * size, 2.5 * size), kernels=kernels)


SINK_KERNELS = (0.0,) * 6
"""Small kernels that find the element of a key that gets the sink's logit."""
WINDOW_KERNELS = (0.0,) * 8
"""The same for a window's mask."""


def carry_sinks(tape: Tape, q: Value, k: Value, size: int) -> tuple[Value, Value]:
    """Append each head's sink logit to all of its queries, and zeros to the keys."""
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
    return tape.cat(plain, rotate_pairs(tape, rotated, model))


def latent_keys_values(tape: Tape, x: Value, shape: Shape) -> tuple[Value, Value]:
    """Record the keys and values of latent attention. All heads share the rotated part of the keys."""
    model, mla, tokens, heads = shape.decoder, shape.latent, shape.tokens, shape.decoder.num_heads // shape.layout.tp
    rank, shared, plain_size, value = mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim
    down = tape.linear(x, tape.leaf(model.hidden_size * (rank + shared)), tokens * (rank + shared))
    latent, rotated = tape.split(down, tokens * rank, tokens * shared)
    per_token = heads * (plain_size + value)
    both = tape.linear(tape.norm(latent, tape.leaf(rank), tokens), tape.leaf(rank * per_token), tokens * per_token)
    plain, v = tape.split(both, tokens * heads * plain_size, tokens * heads * value)
    turned = rotate_pairs(tape, rotated, model)
    return tape.cat(plain, tape.expand(turned, tokens * heads * shared)), v


# Exchanges along the sequence


@dataclass(frozen=True)
class Heads:
    """The heads that a kernel processes, each with `samples` times `length` tokens."""

    samples: int
    length: int
    rows: float
    """Number of query rows over all heads."""
    window: int | None
    sinks: bool
    capped: bool = False
    """True if scores are limited (`attention_softcap`), which requires storing them."""

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
    if shape.decoder.attention_softcap is not None:
        seq = replace(seq, capped=True)
    if layout.cp == 1:
        mixed = causal_core(tape, q, k, v, seq)
        ordered = ((2 * mixed.size,), ())  # by token
        return tape.copy(mixed, kernels=ordered) if seq.is_cut or v.elements < k.elements else mixed
    q, k, v = (swap(tape, y) for y in (q, k, v))
    return swap(tape, causal_core(tape, q, k, v, seq))


def causal_core(tape: Tape, q: Value, k: Value, v: Value, seq: Heads) -> Value:
    """Record causal attention. Kernels require all heads to have the same size."""
    is_narrow, elements = v.elements < k.elements, q.elements * v.elements / k.elements
    if is_narrow:
        v = tape.copy(v, k.elements)
    mixed = windowed(tape, q, k, v, seq) if seq.is_cut else whole(tape, q, k, v, seq=seq)
    return tape.part(mixed, elements) if is_narrow else mixed


def whole(tape: Tape, q: Value, k: Value, v: Value, *, seq: Heads, share: float = 1.0) -> Value:
    """Record causal attention over the first `share` of the sequence."""
    rows, elements = seq.rows * share, q.elements
    if seq.capped:
        return capped(tape, q, k, v, rows, seq.length * share)
    if not seq.sinks:
        return flash(tape, q, k, v, rows)
    longer = 1 + 1 / (seq.length * share)
    tape.move(*SINK_KERNELS)
    q, k, v = pad_front(tape, q, longer), tape.copy_in_forward(pad_front(tape, k, longer)), pad_front(tape, v, longer)
    return tape.part(flash(tape, q, k, v, rows * longer), elements)


def capped(tape: Tape, q: Value, k: Value, v: Value, rows: float, keys: float) -> Value:
    """Record attention that stores its scores, `keys` for each of the `rows` queries (`engine/models/attention.py`)."""
    scores = rows * keys
    k, v = (tape.copy(y, q.elements) for y in (k, v))
    multiplied = tape.apply((product(tape, q, k, scores),), scores)
    limited = tape.apply((tape.apply((tape.apply((multiplied,), scores),), scores, saves_output=True),), scores)
    masked = tape.apply((limited,), scores, saved=(tape.new(scores / rows * keys, 1.0),))
    weights = tape.apply((tape.cast(masked, PRECISE),), scores, saves_output=True, width=PRECISE)
    return product(tape, tape.cast(weights, tape.width), v, q.elements)


def windowed(tape: Tape, q: Value, k: Value, v: Value, seq: Heads) -> Value:
    """Record windowed attention. The first block attends to itself, and every later block also to the previous block's
    keys."""
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
        tape.move(*SINK_KERNELS)
        longer = 1 + 0.5 / window
        k, v = tape.copy_in_forward(pad_front(tape, k, longer)), pad_front(tape, v, longer)
    tape.move(*WINDOW_KERNELS)
    rows = seq.rows * share * (blocks - 1)
    if seq.capped:
        rest = capped(tape, q, k, v, rows, 2 * window)
    else:
        rest = flash(tape, q, k, v, rows, mask=2 * window * window)
    if seq.samples > 1:
        tape.move(2 * rest.size)  # ordered by sample
    if first.elements + rest.elements > elements:
        rest = tape.part(rest, elements - first.elements)
    return tape.cat(first, rest)


def beside(tape: Tape, x: Value, share: float) -> Value:
    """Concatenate each block's tokens with those of the next block."""
    return tape.cat(tape.part(x, x.elements * share), tape.part(x, x.elements * share))


def pad_front(tape: Tape, x: Value, longer: float) -> Value:
    return tape.copy(x, x.elements * longer)


def flash(tape: Tape, q: Value, k: Value, v: Value, rows: float, mask: float = 0.0) -> Value:
    """Record a fused attention kernel, which saves its inputs, its output and one log-sum-exp per row."""
    saved = (q, k, v, tape.new(rows, 4.0), tape.new(mask))
    return tape.apply((q, k, v), q.elements, saved=saved, saves_output=True, costly=True)


def swap(tape: Tape, x: Value) -> Value:
    """Record an all-to-all between parts of the sequence and parts of the heads: one copy to send, one received, one
    reordered."""
    size = 2 * x.size
    return tape.copy(x, scratch=(size, size), kernels=((size, size), (size, size)))


def ring(tape: Tape, q: Value, k: Value, v: Value, rows: float, turns: int) -> Value:
    """Record ring attention. Keys and values are passed from rank to rank. Sums are in fp32, and the keys of a group
    are repeated for its queries. Selective recomputation keeps the result of each step. The final result is ordered by
    head, and then copied to order it by token.

    The first rank needs the most memory: in its second turn, half of its queries attend to all keys of another rank,
    while the gradients of its first turn, in which all its queries attend to its own keys, are not released yet."""
    width, query, pair = q.width, q.elements, k.elements + v.elements
    repeated = 2 * width * query if query > k.elements else 0.0
    travelling = 2 * width * pair
    forward = 4 * query + travelling + (2 * width + 8) * query + 2 * width * query
    # Sums of the queries' gradients, and a turn's gradient in fp32; gradients of the result; copies of half the
    # queries, results and their gradients; the gradients of this turn and of the queries in the first turn.
    of_queries = (4 + 4 + width + 1.5 * width + 2.5 * width + width) * query + repeated
    # Sums of the gradients of keys and values: in this turn, in the first one, and those being sent.
    of_keys = travelling + 3 * 4 * pair
    results = width * (query + pair)
    backward = of_queries + of_keys - results
    tape.keep((query * width + 4 * rows) * turns)
    saved = (q, k, v, tape.new(rows, 4.0))
    kernels = ring_kernels(q, k, rows, turns)
    mixed = tape.apply((q, k, v), query, saved=saved, saves_output=True, scratch=(forward, backward), kernels=kernels)
    return tape.copy(mixed, kernels=((2 * mixed.size,), (2 * mixed.size,)))


def ring_kernels(q: Value, k: Value, rows: float, turns: int) -> tuple[Kernels, Kernels]:
    """Return the kernels of ring attention besides attention itself. In the first turn, the last rank attends to all of
    its own keys, and in each later turn to half of another rank's."""
    width = q.width
    summed = q.elements * PRECISE
    totals = rows * PRECISE
    forward = [summed, totals, 4 * k.size, summed + q.size]
    backward = [summed, 4 * k.size, 2 * k.elements * PRECISE, summed + q.size, *2 * [k.elements * PRECISE + k.size]]
    for turn in range(turns):
        share = 0.5 if turn else 1.0
        keys = k.elements * share
        queries = q.elements * share
        repeated = [*2 * [(keys + queries) * width]] if q.elements > k.elements else []
        # Both parts are weighted and added.
        weighting = [3 * totals, *2 * [3 * totals, 2 * totals], 2 * totals]
        forward += [*repeated, *weighting, summed + q.size, 2 * summed, 2 * summed, 3 * summed]
        # Contiguous copies; then the sums over the query heads of each key's head, added to the gradients.
        backward += [*repeated, 2 * q.size, 2 * summed + q.size, *4 * [0.0]]
        for _ in "kv":
            backward += [queries * (width + PRECISE), (queries + keys) * PRECISE, 3 * keys * PRECISE]
    return forward, backward


def ring_turn_kernels(queries: float, keys: float, rows: float) -> tuple[Counter[float], Counter[float]]:
    """Return the kernels of one turn of `ring_kernels`, forward and backward, in a format of 2 bytes; `queries` and
    `keys` are numbers of elements."""
    tape = Tape(2.0)
    q = tape.leaf(queries)
    k = tape.leaf(keys)
    (forward, backward), (longer, longer_backward) = (ring_kernels(q, k, rows, turns) for turns in (1, 2))
    return Counter(longer) - Counter(forward), Counter(longer_backward) - Counter(backward)


# A mixture of experts on a tape: router, tokens sorted by expert, the experts' matrix multiplications, and tokens back
# in their original order.
# Tokens are spread evenly over experts and ranks. The experts' matrix multiplication uses the grouped GPU kernel, which
# needs memory only for its result.


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
    return feed_forward_of(tape, x, shape, spec.shared_width)


# Router


ROUTER_KERNELS = (0.0,) * 5
"""Small kernels that count the tokens of each expert; one prevents a division by zero."""
GROUP_KERNELS = (0.0,) * 5
"""The same for a choice of groups of experts."""
SORT_KERNELS = (0.0,) * 8
"""Small kernels that sort indices of tokens by expert, and count them."""
BIAS_KERNELS = (0.0,) * 6
"""Small kernels that find the expert of each row."""
SPREAD_KERNELS = (0.0,) * 8
"""The same if the experts are on several ranks."""


def router(tape: Tape, x: Value, shape: Shape) -> tuple[Value, Value]:
    """Return (indices, weights). Scores are in fp32."""
    spec, tokens = shape.experts, shape.outside_tokens
    scored, chosen = tokens * spec.num_experts, tokens * spec.top_k
    logits = tape.linear(x, tape.leaf(shape.hidden * spec.num_experts), scored)
    scores = tape.apply((tape.cast(logits, PRECISE),), scored, saves_output=True, width=PRECISE)
    indices = choose(tape, shape)
    tape.move(*ROUTER_KERNELS)
    picked = ((2 * PRECISE + INDEX) * chosen,), (scores.size, 2 * scores.size + (PRECISE + INDEX) * chosen)
    weights = tape.apply((scores,), chosen, saved=(indices,), width=PRECISE, kernels=picked)
    if spec.normalise_weights:
        total = tape.apply((weights,), tokens, width=PRECISE, kernels=((0.0,), (0.0,) * 5))
        weights = tape.apply((weights, total), chosen, saved=(weights, total), width=PRECISE)
    weights = tape.apply((weights,), chosen, width=PRECISE)
    if spec.balance_loss:
        weights = with_loss(tape, weights, scores)
    if spec.capacity_factor is not None:
        indices, weights = within_capacity(tape, weights)
    return indices, weights


def choose(tape: Tape, shape: Shape) -> Value:
    """Choose the experts by their biased scores, among those of the chosen groups."""
    spec = shape.experts
    copies = spec.has_choice_bias + (spec.top_groups < spec.num_groups)
    room = tape.new(copies * shape.outside_tokens * spec.num_experts, PRECISE)
    scores_bytes = shape.outside_tokens * spec.num_experts * PRECISE
    tape.move(scores_bytes, *spec.has_choice_bias * [2 * scores_bytes])
    if spec.top_groups < spec.num_groups:
        tape.move(scores_bytes, 2 * scores_bytes, *GROUP_KERNELS)
    indices = tape.new(shape.outside_tokens * spec.top_k, INDEX)
    del room
    return indices


def with_loss(tape: Tape, weights: Value, scores: Value) -> Value:
    """Add the scalar loss, computed from normalised scores and the number of visits."""
    visits = tape.new(scores.elements, PRECISE)
    total = tape.apply((scores,), weights.elements, width=PRECISE)
    normal = tape.apply((scores, total), scores.elements, saved=(scores, total), width=PRECISE)
    loss = tape.apply((normal,), 1, width=PRECISE)
    del visits
    return tape.with_side(weights, loss)


def within_capacity(tape: Tape, weights: Value) -> tuple[Value, Value]:
    """Sort the choices by weight and by expert, and count them."""
    chosen = weights.elements
    indices, kept = tape.new(chosen, INDEX), tape.new(chosen, 1.0)
    return indices, tape.apply((weights,), chosen, saved=(kept,), width=PRECISE, scratch=(6 * INDEX * chosen, 0.0))


# Tokens to experts and back


@dataclass
class SortedCopies:
    x: Value
    """Copies of tokens, sorted by expert."""
    source: Value
    place: Value
    tokens: float


def dispatch(tape: Tape, x: Value, indices: Value, weights: Value, shape: Shape) -> Value:
    """Sort the copies by expert; all experts are on this rank."""
    copies = sort_by_expert(tape, x, indices, shape)
    return combine(tape, copies, products(tape, copies.x, shape), weights)


def spread_dispatch(tape: Tape, x: Value, indices: Value, weights: Value, shape: Shape) -> Value:
    """Send the copies to the ranks that hold their experts, sort them by expert again, and send the results back."""
    copies = sort_by_expert(tape, x, indices, shape)
    tape.move(*SPREAD_KERNELS)
    came = tape.copy(tape.part(copies.x, copies.x.elements), kernels=((), ()))
    order = tape.new(indices.elements, INDEX)
    multiplied = tape.leave(products(tape, tape.enter(permute(tape, came, order)), shape))
    back = tape.copy(permute(tape, multiplied, order), kernels=((), ()))
    return combine(tape, copies, tape.cat(back), weights)


def permute(tape: Tape, x: Value, order: Value) -> Value:
    ordered = 2 * x.size + order.size, 3 * x.size + order.size
    return tape.apply((x,), x.elements, saved=(order,), kernels=(ordered[:1], (x.size, ordered[1])))


def sort_by_expert(tape: Tape, x: Value, indices: Value, shape: Shape) -> SortedCopies:
    source, place = tape.new(indices.elements, INDEX), tape.new(indices.elements, INDEX)
    tape.move(*SORT_KERNELS)
    copies = select_rows(tape, x, indices.elements * shape.hidden, place)
    return SortedCopies(copies, source, place, shape.outside_tokens)


def select_rows(tape: Tape, x: Value, elements: float, copies: Value) -> Value:
    """Select rows of `x`; in the backward pass, their gradients are reordered and then summed."""
    rows = INDEX * copies.elements
    size = elements * x.width
    kernels = (2 * size + rows,), (2 * size + rows, size + x.size)
    return tape.apply((x,), elements, saved=(copies,), scratch=(rows, size), kernels=kernels)


def combine(tape: Tape, copies: SortedCopies, y: Value, weights: Value) -> Value:
    """Weight and sum each token's copies in one batched matrix multiplication, where each token is a matrix with one
    row."""
    back = select_rows(tape, y, y.elements, copies.source)
    narrow = tape.cast(weights, tape.width)
    summed = y.elements * copies.tokens / weights.elements
    return tape.part(tape.apply((narrow, back), summed, saved=(narrow, back), costly=True), summed)


# The experts themselves


def products(tape: Tape, x: Value, shape: Shape) -> Value:
    """Multiply copies of tokens by their experts' matrices."""
    spec, model = shape.experts, shape.decoder
    rows, held = x.elements / shape.hidden, spec.num_experts / shape.layout.ep
    halves = 2 if model.gated_mlp else 1
    expert = tape.new(rows if spec.bias else 0.0, INDEX)
    tape.move(*spec.bias * BIAS_KERNELS)
    x = without_dropped(tape, x, shape)
    inner = grouped(tape, x, shape, "experts.up", halves * spec.expert_ffn_size, rows, held)
    inner = add_bias(tape, inner, expert, shape)
    inner = activated(tape, inner, shape)
    y = grouped(tape, inner, shape, "experts.down", shape.hidden, rows, held)
    y = add_bias(tape, y, expert, shape)
    return without_dropped(tape, y, shape)


def grouped(tape: Tape, x: Value, shape: Shape, name: str, width: int, rows: float, experts: float) -> Value:
    """Record a multiplication of each row by its expert's matrix, including the adapters if there are any."""
    inputs, rank = x.elements / rows, shape.lora.rank

    def multiply(x: Value, weight: Value, width: int) -> Value:
        return tape.apply((x, weight), rows * width, saved=(x if weight.node else weight,), costly=True)

    if shape.lora.is_quantised:
        y = tape.dequantised_linear(x, experts * width * inputs, rows * width)
    else:
        y = multiply(x, tape.leaf(experts * width * inputs), width)
    if not rank or name not in shape.lora.targets:
        return y
    narrow = multiply(x, tape.leaf(experts * inputs * rank, frozen=False), rank)
    return tape.add(y, tape.copy(multiply(narrow, tape.leaf(experts * rank * width, frozen=False), width)))


def add_bias(tape: Tape, y: Value, expert: Value, shape: Shape) -> Value:
    """Add the bias, which is first expanded to one row per token."""
    if not shape.experts.bias:
        return y
    kernels = (2 * y.size + expert.size,), (0.0, y.size + expert.size)
    bias = tape.apply((tape.leaf(1),), y.elements, saved=(expert,), kernels=kernels)
    return tape.add(y, bias)


def activated(tape: Tape, x: Value, shape: Shape) -> Value:
    if not shape.decoder.gated_mlp:
        return activate(tape, x, shape)
    gate, up = tape.split(x, x.elements / 2, x.elements / 2)
    if shape.decoder.gate_limit is None:
        return tape.mul(activate(tape, gate, shape), up)
    return clamped(tape, gate, up)


def clamped(tape: Tape, gate: Value, up: Value) -> Value:
    """Record gate * sigmoid(1.702 gate) * (up + 1), with both clamped."""
    size = gate.size
    # In the backward pass, each bound is compared (a byte per value), and the gradient is kept or zeroed.
    compared = size + gate.elements
    kept = 2 * size + gate.elements
    gate = tape.unary(gate, ((2 * size,), (compared, kept)))
    up = tape.unary(up, ((2 * size,), (compared, compared, 3 * gate.elements, kept)))
    shifted = tape.copy(up, kernels=((2 * size,), ()))
    return tape.mul(tape.mul(gate, sigmoid(tape, tape.copy(gate))), shifted)


def sigmoid(tape: Tape, x: Value) -> Value:
    return tape.apply((x,), x.elements, saves_output=True)


def without_dropped(tape: Tape, x: Value, shape: Shape) -> Value:
    """Write zeros to rows that no expert uses."""
    if shape.experts.capacity_factor is None:
        return x
    taken = tape.new(x.elements / shape.hidden, 1.0)
    return tape.apply((x,), x.elements, saved=(taken,))


# Mamba-2's mixer on a tape: projections, convolutions over time, the scan in blocks, the gated norm.
#
# Shapes use the engine's names: B samples, C blocks of Q tokens, G groups, R heads per group, P head size, N state
# size. A batched matmul needs contiguous batch dimensions; otherwise its inputs are copied.


@dataclass(frozen=True)
class ScanSizes:
    """Number of elements in the scan's tensors on one rank."""

    samples: int
    seq_len: int
    heads: float
    groups: float
    inner: float
    """Inner channels per token, over all heads."""
    states: float
    """State channels per token, over all groups."""

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
    def needs_copies(self) -> bool:
        """Return whether a batch contains blocks from several samples or groups, and is therefore not contiguous."""
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
    if shape.hybrid.limits_step:
        dt = tape.unary(dt)
    y = selective_scan(tape, inner, dt, b, c, scan)
    y = tape.add(y, scaled(tape, inner, tape.leaf(scan.heads)))
    normed = gated_norm(tape, y, tape.linear(x, tape.leaf(shape.hidden * scan.inner), y.elements), scan)
    return tape.linear(normed, tape.leaf(scan.inner * shape.hidden), scan.tokens * shape.hidden)


def convolved(tape: Tape, x: Value, rows: float, shape: Shape) -> Value:
    """Project, convolve each channel over time, and apply the activation. During the convolution, channels are the
    first dimension."""
    projected = tape.linear(x, tape.leaf(shape.hidden * rows), shape.tokens * rows)
    return tape.unary(conv(tape, tape.copy_in_backward(projected), rows, shape.seq_len))


def conv(tape: Tape, x: Value, rows: float, seq_len: int) -> Value:
    padded = tape.copy(x, x.elements * (1 + (CONV_TAPS - 1) / seq_len))
    weights = tape.leaf(rows * CONV_TAPS), tape.leaf(rows)
    # With so few taps per channel, the arithmetic takes less time than the memory traffic.
    once = padded.size + x.size
    kernels = ((once,), (once, once, x.size))  # the gradients of the input, the weights and the bias
    return tape.apply((padded, *weights), x.elements, saved=(padded,), costly=True, kernels=kernels)


def gated_norm(tape: Tape, y: Value, z: Value, scan: ScanSizes) -> Value:
    gated = tape.mul(y, tape.unary(z))
    groups = scan.tokens * scan.groups
    normed = tape.apply((gated,), gated.elements, saved=(gated, tape.new(groups, PRECISE)))
    return scaled(tape, normed, tape.leaf(scan.inner))


def scaled(tape: Tape, x: Value, factor: Value) -> Value:
    """Multiply by a smaller factor, which is broadcast."""
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
    """Record the attention of c to b, weighted by the decay between the two tokens, with shape B C G R Q Q."""
    pairs = decay.elements * scan.block
    faded_by = exp(tape, tape.copy(difference(tape, tape.expand(decay, pairs), tape.expand(decay, pairs))))
    scores = product(tape, ordered(tape, c, scan), ordered(tape, b, scan), pairs / scan.heads * scan.groups)
    faded = tape.cast(tape.mul(tape.expand(scores, pairs, width=PRECISE), faded_by), tape.width)
    return tape.copy_in_backward(product(tape, faded, tape.copy_in_forward(x), x.elements))


def from_earlier_blocks(tape: Tape, x: Value, decay: Value, b: Value, c: Value, scan: ScanSizes) -> Value:
    """Return what the states at each block's start (B C G R P N) contribute to its tokens."""
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
    """Record the accumulated decays from one block to another, with shape B G R C C."""
    pairs = scan.samples * scan.heads * scan.blocks**2
    summed = tape.copy(tape.copy(tape.expand(tape.part(decay, pairs / scan.blocks), pairs)))
    return exp(tape, tape.copy(summed))


def ordered(tape: Tape, x: Value, scan: ScanSizes) -> Value:
    return tape.copy_in_forward(x) if scan.needs_copies else x


def product(tape: Tape, left: Value, right: Value, elements: float) -> Value:
    """Multiply a batch of matrices."""
    return tape.apply((left, right), elements, saved=(left, right), width=left.width, costly=True)


def exp(tape: Tape, x: Value) -> Value:
    return tape.apply((x,), x.elements, saves_output=True, width=x.width)


def difference(tape: Tape, left: Value, right: Value) -> Value:
    """Subtract without saving anything; in the backward pass, the gradient of the right side is negated in new
    memory."""
    return tape.add(left, tape.negated(right))


@dataclass(frozen=True)
class BlockProfile:
    """Memory of a block in bytes. Inputs are counted where they were created, and outputs are counted here."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    """The segments of the backward pass. They include the gradients of the output (which reuse its memory) and of the
    parameters."""
    put_off: float
    """Bytes kept from the input-gradient pass until the weight-gradient pass, if the schedule splits the backward
    pass."""

    @property
    def kept(self) -> float:
        """Bytes kept from forward to backward, including the output."""
        return self.forward[-1].live


def profile(tape: Tape, block: Callable[[], Value], recompute: Recompute) -> BlockProfile:
    """Profile a `block`, a function that records itself on the new `tape`."""
    tape.is_saving = recompute == "none"
    tape.kept = [] if recompute == "selective" else None
    out = block()
    if tape.fuses and tape.kept:  # the compiler sees that the backward pass does not need the last costly result
        tape.kept.pop()
    tape.mark()
    forward, tape.stretches, saves = tuple(tape.stretches), [], tape.saves
    arriving, node = [tape.new(out.elements)], out.node
    del out
    tape.meter.peak = tape.meter.live
    if recompute != "none":
        tape.is_saving, tape.saves, tape.saves_left = True, 0, saves
        tape.recomputes, tape.recalls = True, recompute == "selective"
        tape.recalled, tape.kept = deque(tape.kept or ()), None
        node = block().node
    assert node is not None
    tape.backward(node, arriving.pop())  # nothing else references it
    tape.mark()
    put_off = {id(storage): storage.size for pair in tape.put_off or () for storage in pair}
    return BlockProfile(forward, tuple(tape.stretches), sum(put_off.values()))


@lru_cache(maxsize=1024)
def profile_block(shape: Shape, recompute: Recompute, split: bool, predicts: bool = False) -> BlockProfile:
    """Profile one layer, forward and backward. `split`: whether weight gradients are computed later. `predicts`: it is
    a prediction layer."""
    names = block_names(shape.model, shape.layer, predicts=predicts)
    all_frozen = bool(shape.frozen) and shape.frozen.issuperset(names)
    tape = Tape(shape.width, fp8=shape.fp8, frozen=shape.lora.rank > 0 or all_frozen, fuses=shape.compiled)
    tape.put_off = [] if split else None
    source = tape.leaf(shape.outside_tokens * shape.hidden, frozen=False)
    if predicts:
        embedded = tape.leaf(source.elements, frozen=False)
        return profile(tape, lambda: prediction_block(tape, source, embedded, shape), recompute)
    return profile(tape, lambda: block(tape, source, shape), recompute)


def prediction_block(tape: Tape, x: Value, embedded: Value, shape: Shape) -> Value:
    """Record a layer that predicts a further token, with its projection and norms."""
    both = tape.cat(norm(tape, embedded, shape), norm(tape, x, shape))
    joined = linear(tape, both, shape, "join", shape.hidden, 2 * shape.hidden)
    return norm(tape, block(tape, joined, shape), shape)


def block(tape: Tape, x: Value, shape: Shape) -> Value:
    """Record a block; the output of each mixer lives until the end of the block."""
    given = []
    tape.left = []
    is_parallel = shape.decoder.parallel_residual != "none"
    normed, added = x, []
    for mixer, norms in zip(shape.layer.mixers, norms_of(shape.model, shape.layer), strict=True):
        if norms.before:
            normed = norm(tape, x, shape)
        given.append(MIXERS[mixer](tape, normed, shape))
        added.append(finish(tape, given[-1], mixer, norms, shape))
        if not is_parallel:
            x = normed = tape.add(x, added.pop())
    for y in added:
        x = tape.add(x, y)
    return tape.materialise(x)


def finish(tape: Tape, mixed: Value, mixer: Mixer, norms: LayerNorms, shape: Shape) -> Value:
    """Record what happens to a mixer's output before it is added: the bias of its last matrix, which is added outside
    the mixer's region, the norm, and the scale."""
    model = shape.decoder
    if (mixer == "attention" and model.attention_bias == "all") or (mixer == "feed_forward" and model.mlp_bias):
        mixed = tape.summed(tape.copy_in_forward(mixed))
    if norms.after:
        mixed = norm(tape, mixed, shape)
    return mixed if model.residual_scale == 1 else tape.apply((mixed,), mixed.elements)


@lru_cache(maxsize=1024)
def mixer_kernels(shape: Shape, mixer: Mixer) -> tuple[Counter[float], Counter[float]]:
    """Return the kernels of one mixer of a layer with its norm and residual, forward and backward, except for products
    and attention. The result maps the number of bytes that a kernel reads and writes to the number of such kernels."""
    tape = Tape(shape.width)
    x = tape.leaf(shape.outside_tokens * shape.hidden, frozen=False)
    norms = norms_of(shape.model, shape.layer)[shape.layer.mixers.index(mixer)]
    normed = norm(tape, x, shape) if norms.before else x
    y = tape.add(x, finish(tape, MIXERS[mixer](tape, normed, shape), mixer, norms, shape))
    return _kernels_of(tape, y)


def _kernels_of(tape: Tape, y: Value) -> tuple[Counter[float], Counter[float]]:
    """Return the kernels that computed `y`, and those of its backward pass."""
    assert y.node is not None
    tape.backward(y.node, tape.new(y.elements))
    forward, backward = tape.kernels
    return Counter(forward), Counter(backward)


@lru_cache(maxsize=1024)
def experts_kernels(shape: Shape) -> tuple[Counter[float], Counter[float]]:
    """Return the kernels of `mixer_kernels` that need the parameters of the experts."""
    tape = Tape(shape.width)
    copies = tape.leaf(shape.outside_tokens * shape.experts.top_k * shape.hidden, frozen=False)
    return _kernels_of(tape, products(tape, copies, shape))


MIXERS: dict[Mixer, Part] = {
    "attention": partial(region, part=attention),
    "latent": partial(region, part=latent_attention),
    "feed_forward": partial(region, part=feed_forward),
    "experts": mixture,
    "mamba": partial(region, part=mamba),
}
