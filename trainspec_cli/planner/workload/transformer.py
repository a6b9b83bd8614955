"""Parameters, model FLOPs and work of a decoder: attention (grouped or latent), feed-forward or experts, head."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from trainspec_cli.planner.workload import Core, Gemm, Layers, Work, delayed_in_block
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import SINK_DIMS, DecoderModel, ExpertSpec, Layer


def attention_params(model: DecoderModel) -> int:
    """Count the weights in one layer's attention matrices."""
    mla = model.mla
    if mla is None:
        return model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    query = model.hidden_size * model.num_heads * head
    if mla.q_lora_rank:
        query = mla.q_lora_rank * (model.hidden_size + model.num_heads * head)
    key_value = model.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    key_value += mla.kv_lora_rank * model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + key_value + model.num_heads * mla.v_head_dim * model.hidden_size


def mlp_params(model: DecoderModel) -> int:
    return (3 if model.gated_mlp else 2) * model.hidden_size * model.ffn_size


def layer_matmul_params(model: DecoderModel, layer: int, active: bool) -> int:
    """Count the weights in one layer's matrices; if `active`, only those that one token uses."""
    attention = attention_params(model)
    if not model.is_expert_layer(layer):
        return attention + mlp_params(model)
    assert model.experts is not None
    return attention + expert_layer_params(model.experts, model.hidden_size, model.gated_mlp, active=active)


@lru_cache(maxsize=256)
def matmul_params(model: DecoderModel, *, active: bool) -> int:
    """Count the matrix parameters of all layers, including extra prediction layers, without the head."""
    layers = sum(layer_matmul_params(model, layer, active) for layer in range(model.num_layers))
    extra = layer_matmul_params(model, model.num_layers - 1, active) + 2 * model.hidden_size**2
    return layers + model.prediction_layers * extra


def count_params(model: DecoderModel, *, active: bool = False) -> int:
    """Count every parameter once, including tied embeddings."""
    rows = (1 if model.tied_embeddings else 2) * model.vocab_size + model.learned_positions
    # Norms, biases and sinks; a prediction layer has three more norms.
    norm = 1 + model.norm_bias
    dense = sum(not model.is_expert_layer(layer) for layer in range(model.num_layers))
    vectors = model.num_layers * attention_vectors(model) + dense * mlp_biases(model)
    vectors += (model.num_layers * sum(map(sum, model.layer_norms)) + 1) * norm * model.hidden_size
    vectors += model.prediction_layers * (attention_vectors(model) + 5 * norm * model.hidden_size)
    return rows * model.hidden_size + matmul_params(model, active=active) + vectors


def attention_vectors(model: DecoderModel) -> int:
    """Count the biases, norms and sinks inside one layer's attention, and its output's bias."""
    mla = model.mla
    if mla is not None:
        return mla.q_lora_rank + mla.kv_lora_rank
    heads = model.num_heads + model.num_kv_heads
    biases = (heads + model.num_kv_heads) * model.head_dim
    count = {"none": 0, "qkv": biases, "all": biases + model.hidden_size}[model.attention_bias]
    if model.qk_norm:
        count += (1 + model.norm_bias) * model.head_dim * (heads if model.qk_norm_over == "all" else 2)
    return count + (model.num_heads if model.attention_sinks else 0)


def mlp_biases(model: DecoderModel) -> int:
    return ((1 + model.gated_mlp) * model.ffn_size + model.hidden_size) * model.mlp_bias


def attention_width(model: DecoderModel) -> float:
    """Return half the sum of query width and value width over all heads. The attention core takes 4 times this number
    of FLOPs for each query and key."""
    if model.mla is None:
        return model.num_heads * model.head_dim
    return model.num_heads * (model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim) / 2


def context(window: int | None, seq_len: int) -> float:
    """Return the number of tokens that a query attends to, averaged over positions: seq_len / 2 without a window."""
    if window is None or window >= seq_len:
        return seq_len / 2
    return window * (1 - window / (2 * seq_len))


def flops_per_token(model: DecoderModel, seq_len: int) -> float:
    """Return the model FLOPs of forward and backward per token.

    They comprise 6 per matrix-multiplication parameter (2 forward, 4 backward; none for the embedding look-up),
    plus attention's two matmuls over the causal half of the sequence: 6 * layers * heads * head_dim * seq_len. PaLM
    (arXiv:2204.02311, appendix B) counts the full square instead; recomputed work never counts.
    """
    heads = (1 + model.prediction_layers) * model.vocab_size * model.hidden_size
    return 6.0 * (matmul_params(model, active=True) + heads) + mixing_flops_per_token(model, seq_len)


def mixing_flops_per_token(model: DecoderModel, seq_len: int) -> float:
    """Return the FLOPs of attention's two matmuls, forward and backward, per token."""
    layers = model.num_layers + model.prediction_layers
    contexts = (context(model.window_of(layer), seq_len) for layer in range(model.num_layers))
    return 12.0 * layers * attention_width(model) * (sum(contexts) / model.num_layers)


def attention_gemms(model: DecoderModel, tokens: float, tp: int, *, separate: bool = False) -> tuple[Gemm, ...]:
    """Return the products of attention. `separate`: one for each matrix, as in trainspec's engine."""
    mla = model.mla
    hidden = model.hidden_size
    if mla is None:
        query = model.num_heads * model.head_dim
        key = max(model.num_kv_heads, 1) * model.head_dim
        if separate:
            kv = Gemm(tokens, key / tp, hidden)
            return Gemm(tokens, query / tp, hidden), kv, kv, Gemm(tokens, hidden, query / tp)
        return (Gemm(tokens, (query + 2 * key) / tp, hidden), Gemm(tokens, hidden, query / tp))
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    downs = [mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim]
    gemms = [Gemm(tokens, down, hidden) for down in (downs if separate else [sum(downs)]) if down]
    source = mla.q_lora_rank or hidden
    gemms.append(Gemm(tokens, model.num_heads * head / tp, source))
    gemms.append(Gemm(tokens, model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp, mla.kv_lora_rank))
    gemms.append(Gemm(tokens, hidden, model.num_heads * mla.v_head_dim / tp))
    return tuple(gemms)


def attention_core(model: DecoderModel, tokens: float, seq_len: int, layout: Layout, window: int | None) -> Core:
    """Return the attention of trainspec's engine, whose heads have one size (`engine/models/attention.py`).

    With a window, the first block of tokens attends only to itself. Each later block attends to its own keys and those
    of the previous block, all of which its kernel multiplies."""
    mla = model.mla
    width = (
        model.head_dim + model.attention_sinks * SINK_DIMS
        if mla is None
        else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    )
    pairs = seq_len / 2
    kernels = layout.cp if layout.context_method == "ring" else 1
    if window is not None and window < seq_len:
        kernels = 2
        blocks = math.ceil(seq_len / window)
        pairs = window * (window / 2 + (blocks - 1) * (2 * window + model.attention_sinks)) / seq_len
    return Core(4.0 * tokens * model.num_heads / layout.tp * width * pairs, width, kernels)


EAGER_NORM_BYTES = 24.0
"""Memory traffic per element of an RMSNorm that runs as separate operations: cast to fp32, square, average, scale, cast
back."""
EAGER_ROTATION_BYTES = 16.0
"""Memory traffic per element of a query or key that is rotated in fp32."""
EAGER_GATE_BYTES = 4.0
"""Memory traffic per element of a gate whose activation is written to memory before the multiplication."""


def attention_work(model: DecoderModel, tokens: float, seq_len: int, layout: Layout, window: int | None = None) -> Work:
    """Return the work of one attention layer: norm, projections, attention core and residual. The core attends to a
    window or to all earlier tokens."""
    tp = layout.tp
    hidden = model.hidden_size
    split = tp if layout.sequence_parallel else 1
    query: float = model.num_heads * model.head_dim
    key: float = model.num_kv_heads * model.head_dim
    if model.mla is not None:
        query = key = attention_width(model)
    # The core reads q, k, v and keeps its output, which is also the input of the output projection. The residual stream
    # itself is the norm's saved input; the norm's output is the saved input of the projections.
    inner = (2 * query + 2 * key) / tp
    rotated = (query + key) / tp * model.rotary_fraction if model.rotates else 0.0
    latent = 0.0
    if model.mla is not None:
        latent = 2.0 * (model.mla.q_lora_rank + model.mla.kv_lora_rank + model.mla.qk_rope_head_dim)
    return Work(
        gemms=attention_gemms(model, tokens, tp),
        attention_flops=4.0 * tokens * attention_width(model) / tp * context(window, seq_len),
        attention_head_dim=attention_width(model) / model.num_heads,
        score_bytes=2.0 * tokens * seq_len * model.num_heads / tp,
        pass_bytes=2.0 * tokens * (7 * hidden / split + 2 * rotated + 2 * latent),
        eager_bytes=tokens * (EAGER_NORM_BYTES * hidden / split * model.gated_mlp + EAGER_ROTATION_BYTES * rotated),
        counted_gemms=attention_gemms(model, tokens, tp, separate=True),
        counted_core=attention_core(model, tokens, seq_len, layout, window),
        tensor_bytes=2.0 * tokens * hidden / split,
        kernels=16 if model.mla is None else 34,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1,
        cp_query_bytes=2.0 * tokens * query / tp,
        cp_bytes=4.0 * tokens * layout.cp * key / tp,
        params=attention_params(model) / tp + hidden,
        saved_bytes=2.0 * tokens * (2 * hidden / split + inner + latent),
        saved_gemm_bytes=2.0 * tokens * (hidden / split + query / tp),
        saved_eager_bytes=4.0 * tokens * hidden / split if model.gated_mlp else 0.0,
        input_bytes=2.0 * tokens * hidden / split,
    )


def mlp_work(model: DecoderModel, tokens: float, layout: Layout) -> Work:
    """Return the work of one feed-forward layer: norm, feed-forward and residual."""
    tp = layout.tp
    hidden = model.hidden_size
    width = model.ffn_size / layout.tp
    split = tp if layout.sequence_parallel else 1
    gates = 2 if model.gated_mlp else 1
    return Work(
        gemms=(Gemm(tokens, gates * width, hidden), Gemm(tokens, hidden, width)),
        counted_gemms=(*gates * (Gemm(tokens, width, hidden),), Gemm(tokens, hidden, width)),
        pass_bytes=2.0 * tokens * (7 * hidden / split + (gates + 1) * width),
        eager_bytes=tokens * (EAGER_NORM_BYTES * hidden / split + EAGER_GATE_BYTES * width) if model.gated_mlp else 0.0,
        tensor_bytes=2.0 * tokens * hidden / split,
        kernels=10 if model.gated_mlp else 8,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1,
        params=mlp_params(model) / tp + hidden,
        saved_bytes=2.0 * tokens * (2 * hidden / split + (gates + 1) * width),
        saved_gemm_bytes=2.0 * tokens * (hidden / split + width),
        saved_eager_bytes=tokens * (4.0 * hidden / split + 2.0 * width) if model.gated_mlp else 0.0,
        input_bytes=2.0 * tokens * hidden / split,
    )


@lru_cache(maxsize=4096)
def layer_works(model: DecoderModel, tokens: float, seq_len: int, layout: Layout) -> Layers:
    """Return the parts of each layer."""
    kinds = {layer: _parts(model, layer, tokens, seq_len, layout) for layer in set(model.layer_list)}
    return tuple(kinds[layer] for layer in model.layer_list)


def _parts(model: DecoderModel, layer: Layer, tokens: float, seq_len: int, layout: Layout) -> tuple[Work, ...]:
    attention = attention_work(model, tokens, seq_len, layout, layer.window)
    if "experts" not in layer.mixers:
        return delayed_in_block(attention, mlp_work(model, tokens, layout), layout)
    assert model.experts is not None
    work = expert_work(model.experts, model.hidden_size, model.gated_mlp, tokens, layout)
    shared = shared_width(model.experts) / layout.tp
    if not shared:
        (attention,) = delayed_in_block(attention, None, layout)
        return replace(attention, tp_last=False), work
    entering = Gemm(tokens, shared, model.hidden_size)
    return delayed_in_block(attention, replace(work, tp_delayed=(entering,) * (1 + model.gated_mlp)), layout)


def shared_width(experts: ExpertSpec) -> int:
    """Return the total feed-forward width of all shared experts."""
    return experts.shared_experts * (experts.shared_expert_ffn_size or experts.expert_ffn_size)


def expert_layer_params(experts: ExpertSpec, hidden: int, gated: bool, *, active: bool) -> int:
    """Count the parameters of all experts, or of those that one token uses (`active`), plus those that every token
    uses: shared experts, their gate, and the router."""
    routed = (experts.top_k if active else experts.num_experts) * routed_expert_params(experts, hidden, gated)
    shared = (3 if gated else 2) * hidden * shared_width(experts) + (hidden if experts.shared_gate else 0)
    return routed + shared + experts.num_experts * (hidden + (1 if experts.bias else 0))


def routed_expert_params(experts: ExpertSpec, hidden: int, gated: bool) -> int:
    """Count the parameters of one expert: its matrices, and their biases if any."""
    halves = 2 if gated else 1
    width = experts.expert_ffn_size
    return (halves + 1) * hidden * width + (halves * width + hidden if experts.bias else 0)


def expert_work(experts: ExpertSpec, hidden: int, gated: bool, tokens: float, layout: Layout) -> Work:
    """Return the work of one expert layer: norm, router, experts and residual, with tokens spread evenly over the
    experts.

    Experts are split by `etp`; the tokens of a tensor-parallel group are first spread over the group (sequence
    parallelism)."""
    tp = layout.tp
    etp = layout.etp
    ep = layout.ep
    split = tp if layout.sequence_parallel else 1
    gates = 2 if gated else 1
    copies = tokens * experts.top_k * etp / tp
    local = experts.num_experts / ep
    width = experts.expert_ffn_size / etp
    shared = shared_width(experts) / tp
    rows = copies / local
    gemms = [Gemm(rows, gates * width, hidden, local, linear=False), Gemm(rows, hidden, width, local, linear=False)]
    router = Gemm(tokens / split, experts.num_experts, hidden, wide=False, linear=False)
    # A token's copies are weighted and summed by a matrix multiplication.
    counted_gemms = [*gemms, Gemm(1, hidden, experts.top_k, tokens / tp, wide=False, linear=False)]
    if shared:
        counted_gemms += [*gates * (Gemm(tokens, shared, hidden),), Gemm(tokens, hidden, shared)]
        gemms += [Gemm(tokens, gates * shared, hidden), Gemm(tokens, hidden, shared)]
    matrices = 3 if gated else 2
    routed = routed_expert_params(experts, hidden, gated) * experts.num_experts / (ep * etp)
    # Each copy is permuted before and after the experts, then weighted and summed when it returns.
    permute = 2.0 * copies * hidden * 6
    return Work(
        gemms=(*gemms, router),
        pass_bytes=2.0 * (tokens * 7 * hidden / split + copies * (gates + 1) * width + tokens * (gates + 1) * shared)
        + permute,
        counted_gemms=(*counted_gemms, router),
        tensor_bytes=2.0 * copies * hidden,
        kernels=100,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1 if (shared and tp > 1) or etp > 1 else 0,
        ep_bytes=2.0 * copies * hidden,
        expert_copies=experts.top_k,
        experts=local,
        params=matrices * hidden * shared + hidden * (experts.num_experts + 1),
        expert_params=routed,
        saved_bytes=2.0
        * (2 * tokens * hidden / split + copies * (hidden + (gates + 1) * width) + tokens * (gates + 1) * shared),
        saved_gemm_bytes=2.0 * (copies * (hidden + width) + tokens * (hidden / split + shared)),
        input_bytes=2.0 * tokens * hidden / split,
    )
