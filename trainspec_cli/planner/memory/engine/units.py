"""The units that FSDP2 shards: a block's parameters, experts spread over ranks, or the parameters outside the
blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from trainspec_cli.planner.workload import Stack, adapted_decoder, adapted_matrices, expert_stacks, quantised_matrices
from trainspec_cli.planner.workload import quantised_bytes as quantised_bytes_of
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    CONV_TAPS,
    DecoderModel,
    HybridModel,
    Layer,
    LayerNorms,
    ModelSpec,
    TextModel,
    embeds_at_both_ends,
    has_layer_list,
)
from trainspec_cli.recipe.keys.training import (
    BLOCK,
    QUANTISED_ROW,
    QUANTISED_SIZE,
    STACKED_VALUES,
    KeptState,
    LoraSpec,
    ParameterGroup,
)
from trainspec_cli.recipe.parameter_names import block_names, is_frozen, outside_names

Matrix = tuple[int, int]
"""(rows, elements per row), after tensor parallelism."""
NF4_TABLES_BYTES = 4.0 * (2 * 256 + 256)
"""Size of a quantised matrix's lookup tables: the two weights encoded by each byte, and the levels of the scales."""


@dataclass(frozen=True)
class Unit:
    matrices: tuple[Matrix, ...]
    shards: int
    """Number of ranks over which the rows are divided."""
    reorders: bool = False
    """True if rows are not the first dimension, so that exchanged data must be copied into another order."""
    early: float = 0.0
    """Number of elements whose gradients are computed in the input-gradient pass even if the schedule defers the
    gradients of linear layers."""
    adapters: tuple[Matrix, ...] | None = None
    """The matrices in `matrices` that are trained; None if all are trained."""
    quantised_bytes: float = 0.0
    """Size of the 4-bit matrices, which are not in `matrices` because they are not sharded."""

    @cached_property
    def trained(self) -> Unit:
        """Return the unit restricted to the parameters that have gradients and moments."""
        return self if self.adapters is None else Unit(self.adapters, self.shards, self.reorders)

    @cached_property
    def own(self) -> float:
        """Return the number of elements on the first rank, which has the largest part."""
        return float(sum(-(-rows // self.shards) * row for rows, row in self.matrices))

    @cached_property
    def gathered(self) -> float:
        """Return the total number of elements in all ranks' parts, including padding."""
        return self.own * self.shards

    @cached_property
    def full(self) -> float:
        return float(sum(rows * row for rows, row in self.matrices))

    @cached_property
    def largest(self) -> float:
        return float(max((rows * row for rows, row in self.matrices), default=0))


def matrices_of(model: TextModel, layer: Layer, layout: Layout, *, predicts: bool) -> Iterator[Matrix]:
    """Yield the parameters of a block, without routed experts that are spread over ranks. `predicts`: a prediction
    layer, with a projection and three more norms."""
    if predicts:
        hidden = model.hidden_size
        yield from ((hidden, 2 * hidden), *norm_vectors(model.as_decoder, hidden) * 3)
    yield from block_matrices(model, layer, layout)


def block_unit(model: TextModel, layer: Layer, layout: Layout, lora: LoraSpec, *, predicts: bool = False) -> Unit:
    """Return the parameters of a block. All 4-bit matrices of the layer belong to this unit, including those of experts
    that are spread over ranks."""
    whole, shards = whole_experts(model, layer, layout, lora), layout.shards
    matrices = [*matrices_of(model, layer, layout, predicts=predicts), *whole.matrices]
    decoder = adapted_decoder(model, lora)
    if decoder is None:
        return Unit(tuple(matrices), shards, early=whole.full)
    has_experts = "experts" in layer.mixers
    sizes = adapted_matrices(decoder, has_experts, lora, layout.tp)
    adapters = [
        part
        for rows, columns in sizes
        for part in ((lora.rank, columns), (rows, lora.rank), *((rows, 1),) * lora.magnitude)
    ]
    quantised_bytes = 0.0
    if lora.is_quantised:
        held = quantised_matrices(decoder, has_experts, layout.tp)
        for matrix in held:
            matrices.remove(matrix)
        stacks = expert_stacks(decoder, has_experts, layout.ep).values()
        parts = [(rows, columns, layout.tp) for rows, columns in held]
        parts += [(experts * rows, columns, layout.ep) for experts, rows, columns in stacks]
        quantised_bytes = sum(quantised_bytes_of(*part) + NF4_TABLES_BYTES for part in parts)
    trained = (*adapters, *(whole.adapters or ()))
    return Unit((*matrices, *adapters), shards, adapters=trained, quantised_bytes=quantised_bytes)


def frozen_block(
    unit: Unit, model: TextModel, layer: Layer, layout: Layout, frozen: frozenset[str], *, predicts: bool = False
) -> Unit:
    """Return the unit of a block, with only the parameters trained whose names within the block are not in `frozen`."""
    if not frozen:
        return unit
    own = matrices_of(model, layer, layout, predicts=predicts)
    matrices = (*own, *whole_experts(model, layer, layout, LoraSpec()).matrices)
    names = islice(
        block_names(model, layer, predicts=predicts), len(matrices)
    )  # experts that are spread over ranks come last
    trained = tuple(matrix for name, matrix in zip(names, matrices, strict=True) if name not in frozen)
    return replace(unit, adapters=trained)


def frozen_experts(unit: Unit, layer: Layer, model: TextModel, frozen: frozenset[str]) -> Unit:
    """Do the same for the unit of experts."""
    if not frozen or not unit.matrices:
        return unit
    names = [name for name in block_names(model, layer) if ".experts." in name]
    trained = tuple(matrix for name, matrix in zip(names, unit.matrices, strict=True) if name not in frozen)
    return replace(unit, adapters=trained)


def frozen_names(
    model: TextModel, number: int, layer: Layer, groups: Sequence[ParameterGroup], *, predicts: bool = False
) -> frozenset[str]:
    """Return the names within a block, without its prefix, that the recipe freezes."""
    if not groups:
        return frozenset()
    names = block_names(model, layer, predicts=predicts)
    return frozenset(name for name in names if is_frozen(f"blocks.{number}.{name}", groups))


def frozen_outside(unit: Unit, model: TextModel, first: bool, last: bool, groups: Sequence[ParameterGroup]) -> Unit:
    """Freeze the parameters outside the blocks that the recipe freezes."""
    if not groups:
        return unit
    names = outside_names(model, first=first, last=last)
    pairs = zip(names, unit.matrices, strict=True)
    return replace(unit, adapters=tuple(matrix for name, matrix in pairs if not is_frozen(name, groups)))


def frozen_params(model: ModelSpec, groups: Sequence[ParameterGroup]) -> int:
    """Return the number of parameters that the recipe freezes."""
    if not groups or not has_layer_list(model):
        return 0
    outside = outside_unit(model, Layout(), first=True, last=True)
    units = [(outside, frozen_outside(outside, model, True, True, groups))]
    further = (model.layer_list[-1],) * model.prediction_layers
    for number, layer in enumerate((*model.layer_list, *further)):
        predicts = number >= model.num_layers
        unit = block_unit(model, layer, Layout(), LoraSpec(), predicts=predicts)
        frozen = frozen_names(model, number, layer, groups, predicts=predicts)
        units.append((unit, frozen_block(unit, model, layer, Layout(), frozen, predicts=predicts)))
    return int(sum(whole.full - trained.trained.full for whole, trained in units))


def freeze(unit: Unit, lora: LoraSpec) -> Unit:
    """Freeze a unit if there are adapters, because then only the adapters are trained."""
    return replace(unit, adapters=()) if lora.rank else unit


def block_matrices(model: TextModel, layer: Layer, layout: Layout) -> Iterator[Matrix]:
    decoder = model.as_decoder
    for mixer, norms in zip(layer.mixers, norms_of(model, layer), strict=True):
        yield from norm_vectors(decoder, model.hidden_size) * sum(norms)
        if mixer == "mamba":
            assert isinstance(model, HybridModel)
            yield from _mamba(model, layout.tp)
        elif mixer == "experts":
            yield from _mixture(decoder, layout)
        else:
            yield from _MIXERS[mixer](decoder, layout.tp)


def norms_of(model: TextModel, layer: Layer) -> Sequence[LayerNorms]:
    """Return the norms of each part of a layer."""
    if isinstance(model, DecoderModel):
        return model.layer_norms
    return [LayerNorms(before=True, after=False)] * len(layer.mixers)


def norm_vectors(model: DecoderModel, size: int) -> tuple[Matrix, ...]:
    return ((size, 1),) * (1 + model.norm_bias)


def _attention(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    hidden, head = model.hidden_size, model.head_dim
    query, key = model.num_heads * head // tp, model.num_kv_heads * head // tp
    yield from ((query, hidden), (key, hidden), (key, hidden), (hidden, query))
    if model.attention_bias != "none":
        yield from ((query, 1), (key, 1), (key, 1))
    if model.attention_bias == "all":
        yield hidden, 1
    if model.qk_norm:
        for rows in (query, key) if model.qk_norm_over == "all" else (head, head):
            yield from norm_vectors(model, rows)
    if model.attention_sinks:
        yield model.num_heads // tp, 1


def _latent(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    mla, hidden, heads = model.mla, model.hidden_size, model.num_heads // tp
    assert mla is not None
    rank, plain, rotated = mla.kv_lora_rank, mla.qk_nope_head_dim, mla.qk_rope_head_dim
    if mla.q_lora_rank:
        yield from ((mla.q_lora_rank, hidden), (mla.q_lora_rank, 1))
    yield heads * (plain + rotated), mla.q_lora_rank or hidden
    yield from ((rank + rotated, hidden), (rank, 1), (heads * (plain + mla.v_head_dim), rank))
    yield hidden, heads * mla.v_head_dim


def _glu(model: DecoderModel, width: int) -> Iterator[Matrix]:
    yield from ((width, model.hidden_size),) * (2 if model.gated_mlp else 1)
    yield model.hidden_size, width


def _feed_forward(model: DecoderModel, tp: int) -> Iterator[Matrix]:
    yield from _glu(model, model.ffn_size // tp)
    if model.mlp_bias:
        yield from ((model.ffn_size // tp, 1),) * (1 + model.gated_mlp)
        yield model.hidden_size, 1


def _mixture(model: DecoderModel, layout: Layout) -> Iterator[Matrix]:
    """Yield the matrices of a mixture of experts in a block's unit, except for the routed experts."""
    spec, hidden = model.experts, model.hidden_size
    assert spec is not None
    yield spec.num_experts, hidden
    if spec.bias:
        yield spec.num_experts, 1
    if spec.shared_experts:
        yield from _glu(model, spec.shared_width // layout.tp)
    if spec.shared_gate:
        yield 1, hidden


def _expert_parameters(model: DecoderModel, ep: int, lora: LoraSpec) -> tuple[list[Stack], list[Stack]]:
    """Return a rank's (experts, rows, elements per row) of the experts' frozen or trained parameters that are not in 4
    bits, and of their adapters."""
    assert model.experts is not None
    stacks = expert_stacks(model, is_expert_layer=True, ep=ep)
    held = [] if lora.is_quantised else [*stacks.values()]
    if model.experts.bias:
        held += [(experts, outputs, 1) for experts, _, outputs in stacks.values()]
    adapters = [
        half
        for target, (experts, inputs, outputs) in stacks.items()
        if lora.rank and target in lora.targets
        for half in ((experts, inputs, lora.rank), (experts, lora.rank, outputs))
    ]
    return held, adapters


def experts_unit(model: TextModel, layout: Layout, lora: LoraSpec) -> Unit:
    """Return the experts of one rank of ep, sharded over the remaining ranks: by row if only the row counts divide
    evenly, otherwise by expert."""
    shards = layout.expert_ranks // layout.ep
    held, adapters = _expert_parameters(model.as_decoder, layout.ep, lora)
    shapes = [*held, *adapters]
    by_row = shards > 1 and all(experts % shards for experts, _, _ in shapes)
    by_row = by_row and not any(rows % shards for _, rows, _ in shapes)
    return _stacked(held, adapters, shards, lora, by_row=by_row)


def whole_experts(model: TextModel, layer: Layer, layout: Layout, lora: LoraSpec) -> Unit:
    """Return the experts that are part of a block's unit."""
    if "experts" not in layer.mixers or layout.ep > 1:
        return _stacked([], [], layout.shards, lora)
    return _stacked(*_expert_parameters(model.as_decoder, 1, lora), layout.shards, lora)


def _stacked(
    held: Sequence[Stack], adapters: Sequence[Stack], shards: int, lora: LoraSpec, *, by_row: bool = False
) -> Unit:
    """Return a unit of stacked matrices, which are divided by expert or by row."""

    def matrices(stacks: Sequence[Stack]) -> tuple[Matrix, ...]:
        if by_row:
            return tuple((rows, experts * row) for experts, rows, row in stacks)
        return tuple((experts, rows * row) for experts, rows, row in stacks)

    trained = matrices(adapters) if lora.rank else None
    return Unit(matrices([*held, *adapters]), shards, reorders=by_row, adapters=trained)


def _mamba(model: HybridModel, tp: int) -> Iterator[Matrix]:
    heads, hidden = model.mamba_heads // tp, model.hidden_size
    inner, states = heads * model.mamba_head_dim, model.mamba_groups * model.mamba_state_size // tp
    yield from ((rows, hidden) for rows in (inner, inner, states, states, heads))
    yield from (part for rows in (inner, states, states) for part in ((rows, CONV_TAPS), (rows, 1)))
    yield from ((heads, 1), (heads, 1), (heads, 1), (inner, 1), (hidden, inner))


_MIXERS: dict[str, Callable[[DecoderModel, int], Iterator[Matrix]]] = {
    "attention": _attention,
    "latent": _latent,
    "feed_forward": _feed_forward,
}


def outside_unit(model: TextModel, layout: Layout, first: bool, last: bool) -> Unit:
    """Return the unit of a stage's parameters outside the blocks: the embedding, position embeddings, norm and head, if
    the stage has them."""
    table = (model.vocab_size // layout.tp, model.hidden_size)
    matrices = [table] if first or (last and embeds_at_both_ends(model)) else []
    if first and model.learned_positions:
        matrices.append((model.learned_positions, model.hidden_size))
    matrices += norm_vectors(model.as_decoder, model.hidden_size) if last else ()
    matrices += [table] if last and not model.tied_embeddings else []
    return Unit(tuple(matrices), layout.shards)


# The state of the engine's optimizers, tensor by tensor, and the temporaries of an update.


MOMENT = 4.0
"""Bytes per unquantised moment and per block scale."""
CHUNK_VALUES = 2**24
"""Number of values that adamw8bit updates at a time (`engine/optim/adamw8bit.py`)."""
CHUNK_BYTES = 22.0
"""Bytes for each value being updated: gradient and moments in fp32 and, while a moment is quantised, its blocks and
their codes."""
MATRICES_AT_ONCE = 9
"""Number of copies of the largest matrix (or stack of small ones) that muon holds at once in its compute format: five
for Newton-Schulz, the rest for the sent and received parts."""


def state_bytes(optimizer: KeptState, unit: Unit, *, in_block: bool, outer_bytes: float = 0.0) -> float:
    """Return the size in bytes of the optimizer state for a unit's trained parameters, on the rank with the largest
    part. `outer_bytes`: bytes per parameter for an outer optimizer."""
    own = sum(
        _bytes_of_row(optimizer, (rows, row), in_block) * -(-rows // unit.shards) for rows, row in unit.trained.matrices
    )
    return own + outer_bytes * unit.trained.own


def _bytes_of_row(optimizer: KeptState, matrix: Matrix, in_block: bool) -> float:
    rows, row = matrix
    if isinstance(optimizer, float):
        return optimizer * row
    if optimizer == "sgd":
        return 0.0
    if optimizer == "muon" and in_block and is_hidden(matrix):
        return MOMENT * row
    if optimizer == "adamw8bit" and rows * row >= QUANTISED_SIZE and row >= QUANTISED_ROW:
        return 2 * (row + MOMENT * -(-row // BLOCK))
    return 2 * MOMENT * row


def is_hidden(matrix: Matrix) -> bool:
    """Return whether muon orthogonalises this matrix of a block; vectors and convolution kernels use adamw.

    Stacked biases are also treated as matrices, but there are only a few."""
    return matrix[1] not in (1, CONV_TAPS)


def update_bytes(optimizer: KeptState, blocks: Iterable[Unit], outside: Iterable[Unit], width: float) -> float:
    """Return the size in bytes of an update's temporaries, which peak at the largest parameter. `width`: bytes per
    value in muon's compute format."""
    of_blocks = [matrix for unit in blocks for matrix in unit.trained.matrices]
    own = [-(-rows // unit.shards) * row for unit in (*blocks, *outside) for rows, row in unit.trained.matrices]
    if optimizer == "adamw8bit":
        return CHUNK_BYTES * min(CHUNK_VALUES, max(own, default=0))
    if optimizer == "muon":
        hidden = [rows * row for rows, row in of_blocks if is_hidden((rows, row))]
        stacked = min(STACKED_VALUES, sum(hidden))
        return MATRICES_AT_ONCE * width * max(stacked, max(hidden, default=0))
    return 0.0
