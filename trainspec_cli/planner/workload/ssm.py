"""Hybrid models: Mamba-2 layers (arXiv:2405.21060) between attention, feed-forward and expert layers."""

from __future__ import annotations

from functools import lru_cache

from trainspec_cli.planner.workload import Core, Gemm, Layers, Work, delayed_in_block, transformer
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import CONV_TAPS, LETTERS, SCAN_BLOCK, HybridModel

CHUNK = 256
"""Number of tokens per block of the state-space dual form."""
SCAN_SLOWNESS = 2.0
"""Slowdown of the chunked scan's kernels relative to fused attention: they reach about half of its rate."""


def inner_size(model: HybridModel) -> int:
    return model.mamba_heads * model.mamba_head_dim


def mamba_in_width(model: HybridModel) -> int:
    """Return the number of columns of the input projection: gate, x, B, C and dt."""
    inner = inner_size(model)
    return 2 * inner + 2 * model.mamba_groups * model.mamba_state_size + model.mamba_heads


def mamba_params(model: HybridModel) -> int:
    """Count the parameters of the two projections, the convolutions with biases, each head's step, decay and skip, and
    the gated norm."""
    inner = inner_size(model)
    conv = (CONV_TAPS + 1) * (inner + 2 * model.mamba_groups * model.mamba_state_size)
    return model.hidden_size * (mamba_in_width(model) + inner) + conv + 3 * model.mamba_heads + inner


def scan_flops_per_token(model: HybridModel) -> float:
    """Return the scan's forward FLOPs per token: the matmuls within a block (causal half), and those that write to and
    read from the state."""
    inner = inner_size(model)
    state = model.mamba_state_size
    within = CHUNK * (model.mamba_groups * state + inner)
    return within + 4.0 * state * inner


def layer_params(model: HybridModel, active: bool) -> int:
    decoder = model.as_decoder
    total = model.mamba_layers * mamba_params(model)
    total += model.attention_layers * transformer.attention_params(decoder)
    total += model.mlp_layers * transformer.mlp_params(decoder)
    if model.experts is not None:
        own = transformer.expert_layer_params(model.experts, model.hidden_size, model.gated_mlp, active=active)
        total += model.expert_layers * own
    return total


def count_params(model: HybridModel, *, active: bool = False) -> int:
    tables = 1 if model.tied_embeddings else 2
    ends = (tables * model.vocab_size + model.num_layers + 1) * model.hidden_size
    return layer_params(model, active) + ends


def flops_per_token(model: HybridModel, seq_len: int) -> float:
    """Return the FLOPs per token: 6 per matmul parameter, attention over the causal half, and the scan (its forward
    pass, plus twice that for the backward pass)."""
    weights = layer_params(model, active=True) + model.vocab_size * model.hidden_size
    return 6.0 * weights + mixing_flops_per_token(model, seq_len)


def mixing_flops_per_token(model: HybridModel, seq_len: int) -> float:
    """Return the FLOPs of attention's matrix multiplications and of the scan, forward and backward."""
    attention = 6.0 * model.attention_layers * model.num_heads * model.head_dim * seq_len
    return attention + 3.0 * model.mamba_layers * scan_flops_per_token(model)


@lru_cache(maxsize=1024)
def layer_works(model: HybridModel, tokens: float, seq_len: int, layout: Layout) -> Layers:
    """Return the parts of each layer, which has a single mixer."""
    decoder = model.as_decoder
    kinds: dict[str, Work] = {}
    for letter in dict.fromkeys(model.layers):
        mixer = LETTERS[letter]
        if mixer == "mamba":
            kinds[letter] = mamba_work(model, tokens, seq_len, layout)
        elif mixer == "attention":
            kinds[letter] = transformer.attention_work(decoder, tokens, seq_len, layout)
        elif mixer == "feed_forward":
            kinds[letter] = transformer.mlp_work(decoder, tokens, layout)
        else:
            assert model.experts is not None
            kinds[letter] = transformer.expert_work(model.experts, model.hidden_size, model.gated_mlp, tokens, layout)
    parts = {
        letter: delayed_in_block(work, None, layout) if work.tp_exchanges else (work,) for letter, work in kinds.items()
    }
    return tuple(parts[letter] for letter in model.layers)


def scan_gemms(model: HybridModel, tokens: float, seq_len: int, tp: int) -> tuple[Gemm, ...]:
    """Return the products of the engine's scan (`engine/models/mamba2.py`), which runs them one after another: scores
    and sums within blocks, states that blocks add, states passed on between blocks (in fp32), and states read."""
    block = min(SCAN_BLOCK, seq_len)
    blocks = -(-seq_len // block)
    samples = tokens / seq_len
    groups = samples * model.mamba_groups / tp
    heads = samples * model.mamba_heads / tp
    state = model.mamba_state_size
    inner = inner_size(model) / model.mamba_groups
    return (
        Gemm(block, block, state, blocks * groups, wide=False),
        Gemm(block, model.mamba_head_dim, block, blocks * heads, wide=False),
        Gemm(state, inner, block, blocks * groups, wide=False),
        Gemm(blocks, model.mamba_head_dim * state, blocks, heads, wide=False, precise=True),
        Gemm(block, inner, state, blocks * groups, wide=False),
    )


def mamba_work(model: HybridModel, tokens: float, seq_len: int, layout: Layout) -> Work:
    tp = layout.tp
    hidden = model.hidden_size
    split = tp if layout.sequence_parallel else 1
    inner = inner_size(model) / tp
    wide = mamba_in_width(model) / tp
    states = model.mamba_groups * model.mamba_state_size / tp
    separate = (inner, inner, states, states, model.mamba_heads / tp)
    return Work(
        gemms=(Gemm(tokens, wide, hidden), Gemm(tokens, hidden, inner)),
        counted_gemms=(*(Gemm(tokens, width, hidden) for width in separate), Gemm(tokens, hidden, inner)),
        counted_core=Core(0.0, float(model.mamba_head_dim), 0, scan_gemms(model, tokens, seq_len, tp)),
        attention_flops=SCAN_SLOWNESS * tokens * scan_flops_per_token(model) / tp,
        attention_head_dim=float(model.mamba_head_dim),
        pass_bytes=2.0 * tokens * (7 * hidden / split + 4 * wide + 16 * inner),
        tensor_bytes=2.0 * tokens * inner,
        kernels=24,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1,
        params=mamba_params(model) / tp + hidden,
        saved_bytes=2.0 * tokens * (2 * hidden / split + 2 * wide + 2 * inner),
        saved_gemm_bytes=2.0 * tokens * (hidden / split + inner),
        input_bytes=2.0 * tokens * hidden / split,
    )
