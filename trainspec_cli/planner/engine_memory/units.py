"""What FSDP2 shards as one: a block's parameters, or those outside of the blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainspec_cli.planner.engine_memory.shape import Layer
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel, HybridModel, LatentAttention

Matrix = tuple[int, int]
"""(rows, elements of a row), after tensor parallelism."""
CONV_TAPS = 4
"""Of the convolutions before a state-space scan."""


@dataclass(frozen=True)
class Unit:
    matrices: tuple[Matrix, ...]
    shards: int
    """Ranks over which rows are spread."""

    @property
    def own(self) -> float:
        """Elements of the first rank, whose part is the largest."""
        return float(sum(-(-rows // self.shards) * row for rows, row in self.matrices))

    @property
    def gathered(self) -> float:
        """Elements of all ranks' parts, the last ones padded."""
        return self.own * self.shards

    @property
    def full(self) -> float:
        return float(sum(rows * row for rows, row in self.matrices))


def block_units(model: DecoderModel | HybridModel, layout: Layout, layer: Layer) -> tuple[Unit, Unit | None]:
    """-> (the block's, its experts' where they are spread over ep)."""
    matrices, shards = tuple(block_matrices(model, layout.tp, layer)), layout.dp_shard * layout.cp
    if layer.feed != "experts":
        return Unit(matrices, shards), None
    if layout.ep == 1:
        return Unit((*matrices, *expert_matrices(_decoder(model))), shards), None
    left = shards * layout.tp // layout.ep
    return Unit(matrices, shards), Unit(tuple(expert_matrices(_decoder(model), layout.ep, left)), left)


def block_matrices(model: DecoderModel | HybridModel, tp: int, layer: Layer) -> Iterator[Matrix]:
    """Without routed experts."""
    decoder = _decoder(model)
    if layer.mixer != "none":
        yield decoder.hidden_size, 1
    if layer.mixer == "mamba":
        yield from mamba_matrices(model, tp)  # type: ignore[arg-type]
    elif layer.mixer == "attention":
        yield from attention_matrices(decoder, tp) if decoder.mla is None else latent_matrices(decoder, decoder.mla, tp)
    if layer.feed != "none":
        yield decoder.hidden_size, 1
    if layer.feed == "dense":
        yield from feed_forward_matrices(decoder, decoder.ffn_size // tp)
    elif layer.feed == "experts":
        yield from mixture_matrices(decoder, tp)


def attention_matrices(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    hidden, head = model.hidden_size, model.head_dim
    query, key = model.num_heads * head // tp, model.num_kv_heads * head // tp
    yield from ((query, hidden), (key, hidden), (key, hidden), (hidden, query))
    if model.qk_norm:
        yield from ((head, 1), (head, 1))
    if model.attention_bias != "none":
        yield from ((query, 1), (key, 1), (key, 1))
    if model.attention_bias == "all":
        yield hidden, 1
    if model.attention_sinks:
        yield model.num_heads // tp, 1


def latent_matrices(model: DecoderModel, mla: LatentAttention, tp: int) -> Iterator[Matrix]:
    hidden, heads = model.hidden_size, model.num_heads // tp
    if mla.q_lora_rank:
        yield from ((mla.q_lora_rank, hidden), (mla.q_lora_rank, 1))
    yield heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim), mla.q_lora_rank or hidden
    yield from ((mla.kv_lora_rank + mla.qk_rope_head_dim, hidden), (mla.kv_lora_rank, 1))
    yield heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank
    yield hidden, heads * mla.v_head_dim


def feed_forward_matrices(model: DecoderModel, width: int) -> Iterator[Matrix]:
    yield from ((width, model.hidden_size),) * (2 if model.gated_mlp else 1)
    yield model.hidden_size, width


def mixture_matrices(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    """Router and shared experts."""
    experts = model.experts
    assert experts is not None
    yield experts.num_experts, model.hidden_size
    if experts.bias:
        yield experts.num_experts, 1
    if experts.shared_experts:
        width = experts.shared_experts * (experts.shared_expert_ffn_size or experts.expert_ffn_size)
        yield from feed_forward_matrices(model, width // tp)
    if experts.shared_gate:
        yield 1, model.hidden_size


def expert_matrices(model: DecoderModel, ep: int = 1, shards: int = 1) -> Iterator[Matrix]:
    """A row is an expert, or, where experts do not divide over the shards, a row of every expert."""
    experts, hidden = model.experts, model.hidden_size
    assert experts is not None
    held, inner = experts.num_experts // ep, experts.expert_ffn_size
    up = inner * (2 if model.gated_mlp else 1)
    sizes = [(hidden, up), (inner, hidden)] + ([(up, 1), (hidden, 1)] if experts.bias else [])
    for rows, row in sizes:
        yield (held, rows * row) if held % shards == 0 else (rows, held * row)


def mamba_matrices(model: HybridModel, tp: int) -> Iterator[Matrix]:
    heads, hidden = model.mamba_heads // tp, model.hidden_size
    inner, states = heads * model.mamba_head_dim, model.mamba_groups * model.mamba_state_size // tp
    for width in (inner, states, states):
        yield from ((width, hidden), (width, CONV_TAPS), (width, 1))
    yield from ((inner, hidden), (heads, hidden), (heads, 1), (heads, 1), (heads, 1), (inner, 1), (hidden, inner))


def outside_unit(model: DecoderModel | HybridModel, layout: Layout, first: bool, last: bool) -> Unit:
    """Embedding, norm and head, as far as a stage has them."""
    table = (model.vocab_size // layout.tp, model.hidden_size)
    matrices = [table] if first or (last and model.tied_embeddings) else []
    matrices += [(positions, model.hidden_size)] if first and (positions := _decoder(model).learned_positions) else []
    matrices += [(model.hidden_size, 1)] if last else []
    matrices += [table] if last and not model.tied_embeddings else []
    return Unit(tuple(matrices), layout.dp_shard * layout.cp)


def _decoder(model: DecoderModel | HybridModel) -> DecoderModel:
    return model if isinstance(model, DecoderModel) else model.as_decoder
