"""Low-rank adapters (LoRA, arXiv:2106.09685) of a decoder: which matrices have one, and how many weights that is."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec
from trainspec_cli.recipe.keys.training import NF4_BLOCK, NF4_SCALE_BLOCK, LoraSpec


def adapted_matrices(
    model: DecoderModel, is_expert_layer: bool, lora: LoraSpec, tp: int = 1
) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of a rank's part of each matrix of a layer that has an adapter; routed experts have none."""
    if not lora.rank:
        return
    widths = _attention(model, tp) | _feed_forward(model, is_expert_layer, tp)
    yield from (widths[target] for target in lora.targets if target in widths)


def _attention(model: DecoderModel, tp: int) -> dict[str, tuple[int, int]]:
    hidden = model.hidden_size
    heads = model.num_heads // tp
    if model.mla:
        size = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim
        queries = heads * size, model.mla.q_lora_rank or hidden
        return {"q": queries, "out": (hidden, heads * model.mla.v_head_dim)}
    query = heads * model.head_dim
    key = model.num_kv_heads * model.head_dim // tp
    return {"q": (query, hidden), "k": (key, hidden), "v": (key, hidden), "out": (hidden, query)}


def _feed_forward(model: DecoderModel, is_expert_layer: bool, tp: int) -> dict[str, tuple[int, int]]:
    """The shared experts' where there are routed ones."""
    width = model.ffn_size
    if is_expert_layer:
        assert model.experts is not None
        width = model.experts.shared_experts * (model.experts.shared_expert_ffn_size or model.experts.expert_ffn_size)
    if not width:
        return {}
    up = (width // tp, model.hidden_size)
    down = (model.hidden_size, width // tp)
    return {"up": up, "down": down} | ({"gate": up} if model.gated_mlp else {})


def quantised_bytes(rows: int, columns: int, tp: int = 1) -> float:
    """Bytes of a rank's part of a matrix in 4-bit NormalFloat with double quantisation (arXiv:2305.14314, section 3): 4
    bits a weight, 8 for the scale of a block; and of the whole matrix 32 for that of 256 scales, and their mean."""
    blocks = rows * math.ceil(columns / NF4_BLOCK)
    return rows * columns / 2 + blocks + 4.0 * (math.ceil(tp * blocks / NF4_SCALE_BLOCK) + 1)


def quantised_params(model: ModelSpec, lora: LoraSpec) -> int:
    """Return the number of weights that are kept in 4 bits: those of the matrices of all blocks."""
    decoder = adapted_decoder(model, lora)
    if decoder is None or not lora.is_quantised or decoder.experts is not None:
        return 0
    matrices = _attention(decoder, tp=1) | _feed_forward(decoder, is_expert_layer=False, tp=1)
    return decoder.num_layers * sum(rows * columns for rows, columns in matrices.values())


def adapted_decoder(model: ModelSpec, lora: LoraSpec) -> DecoderModel | None:
    """The model where it has adapters: no other family has any."""
    return model if lora.rank and isinstance(model, DecoderModel) else None


def adapter_params(model: ModelSpec, lora: LoraSpec) -> int:
    decoder = adapted_decoder(model, lora)
    if decoder is None:
        return 0
    layers = (decoder.is_expert_layer(layer) for layer in range(decoder.num_layers))
    return lora.rank * sum(sum(sum(sizes) for sizes in adapted_matrices(decoder, experts, lora)) for experts in layers)
