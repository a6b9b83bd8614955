"""Count a model's parameters and model FLOPs, and the work of its layers, embedding and head on one rank.

The arithmetic of each family is in the module that its record names (`FamilyRecord.work`), as functions of
`FamilyWork`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import (
    DecoderModel,
    ModelSpec,
    TracedPart,
    TransformersModel,
    loss_chunk_tokens,
    loss_group_tokens,
)
from trainspec_cli.recipe.keys.training import NF4_BLOCK, NF4_SCALE_BLOCK, TARGETS, LoraSpec


@dataclass(frozen=True)
class Gemm:
    """`count` matrix multiplications of m x k by k x n."""

    m: float
    n: float
    k: float
    count: float = 1.0
    wide: bool = True
    """True if it uses the linear layers' format (fp8, ...). The router, the head and frozen parts stay in bf16."""
    precise: bool = False
    """True if it runs in fp32, whatever the compute format is."""
    image: float = 0.0
    """Number of elements in the input of a convolution, whose m x k patches overlap; 0 for a matrix multiplication, or
    if the input's memory traffic is counted elsewhere."""
    linear: bool = True
    """True for a linear layer, whose weight gradient a split schedule computes later."""

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count


class Core(NamedTuple):
    """What mixes the tokens of a layer: fused attention, or the matrix multiplications of a scan."""

    flops: float
    """FLOPs of the forward pass."""
    head_dim: float
    kernels: int
    gemms: tuple[Gemm, ...] = ()


KernelCounts = Mapping[float, int]
"""Bytes that a kernel reads and writes -> number of such kernels."""


@dataclass(frozen=True)
class Work:
    """Work on one rank. Activation bytes are in the compute format (2 bytes per element)."""

    gemms: tuple[Gemm, ...] = ()
    attention_flops: float = 0.0
    """FLOPs of the forward pass, counting only the causal half (or the window)."""
    attention_head_dim: float = 128.0
    score_bytes: float = 0.0
    """Size of the score matrix if it were materialised with 2 bytes per value."""
    pass_bytes: float = 0.0
    """Memory traffic of the element-wise kernels in the forward pass."""
    loss_bytes: float = 0.0
    """Memory traffic of the loss over the vocabulary in the forward pass."""
    eager_bytes: float = 0.0
    """Additional traffic if operations that one fused kernel could combine (norms, rotations and gates) run in separate
    kernels."""
    counted_gemms: tuple[Gemm, ...] | None = None
    """The products that trainspec computes without compilation, if they are not `gemms`."""
    counted_core: Core | None = None
    """Its attention or scan."""
    counted_kernels: tuple[KernelCounts, KernelCounts] | None = None
    """Its other operations (forward, backward), counted from its code; None: not counted."""
    tensor_bytes: float = 1e9
    """Size of one activation passed between kernels, which determines whether it stays in the cache."""
    kernels: float = 0
    """Number of kernels that an eager framework launches in the forward pass."""
    serial_kernels: int = 0
    """Number of small kernels that run one after another at any batch size, so that only their latency counts."""
    tp_bytes: float = 0.0
    """Bytes of one tensor-parallel exchange (a full activation). The forward pass has `tp_exchanges` of these, and so
    has the backward pass."""
    tp_exchanges: float = 0
    tp_delayed: tuple[Gemm, ...] = ()
    """Matrix multiplications whose weight gradients trainspec's engine computes while it exchanges the gradient of a
    tensor-parallel region's input."""
    tp_delayed_after: tuple[Gemm, ...] = ()
    """Matrix multiplications whose weight gradients hide the exchange of the output's gradient; they belong to the next
    region."""
    tp_last: bool = False
    """True if a recomputed forward pass ends before the output is exchanged, because the backward pass does not need
    the result."""
    cp_query_bytes: float = 0.0
    """Size of this rank's queries; its attention output has the same size."""
    cp_bytes: float = 0.0
    """Size of the full sequence's keys and values, which context parallelism exchanges."""
    ep_bytes: float = 0.0
    """Bytes that a rank sends to the experts, in one direction."""
    expert_copies: int = 1
    """Number of experts that each token is sent to."""
    experts: float = 0.0
    """Number of experts on this rank."""
    params: float = 0.0
    """Number of parameters on this rank, without those of routed experts."""
    expert_params: float = 0.0
    saved_bytes: float = 0.0
    """Bytes of activations kept for the backward pass."""
    saved_gemm_bytes: float = 0.0
    """The part of `saved_bytes` that only matmuls read. It is kept in 8 bits if the matmuls run in 8 bits."""
    saved_eager_bytes: float = 0.0
    """Additional bytes that a framework without fused norms and activations keeps: fp32 copies and the gate's
    output."""
    input_bytes: float = 0.0
    """Bytes of the layer's input, which is the only tensor that full recomputation keeps."""
    leaf: bool = False
    """True if its input is data, which needs no gradient."""
    frozen: bool = False
    """True if it has no backward pass, because neither this part nor anything before it is trained."""

    convolves: bool = False
    """True if its matrix multiplications are convolutions, whose kernels reach different rates."""
    normed: tuple[int, ...] = ()
    """Channels of each batch norm, whose statistics trainspec's engine sums over the data-parallel ranks."""
    before_statistics: KernelCounts | None = None
    """Kernels of the backward pass before the first of these sums, if there is one."""

    @property
    def flops(self) -> float:
        """FLOPs of the forward pass."""
        return sum(gemm.flops for gemm in self.gemms) + self.attention_flops

    @property
    def all_params(self) -> float:
        return self.params + self.expert_params

    @property
    def products(self) -> tuple[Gemm, ...]:
        return self.counted_gemms or self.gemms


def delayed_in_block(first: Work, last: Work | None, layout: Layout) -> tuple[Work, ...]:
    """Return the parts of a block, including the matrix multiplications that hide tensor-parallel exchanges
    (`engine/parallel/context.py`). `last`: the block's second region, whose last weight gradient is not delayed."""
    if last is None:
        return (replace(first, tp_delayed=first.products, tp_last=True),)
    delayed = last.products[:-1] if last.tp_delayed == () else last.tp_delayed
    after = delayed[:1] if layout.sequence_parallel else ()
    return (
        replace(first, tp_delayed=first.products, tp_delayed_after=after),
        replace(last, tp_delayed=delayed[len(after) :], tp_last=True),
    )


Layers = tuple[tuple[Work, ...], ...]
"""The parts of each layer of a model, in order; layers of one kind share them."""
Kinds = tuple[tuple[int, tuple[Work, ...]], ...]
"""(number of layers, parts of one layer) for each kind of layer in a model, in order of first appearance."""
WHOLE = LoraSpec()
CHUNK_BYTES = (6, 8, 8, 6, 4)
"""Memory traffic per logit of each kernel of trainspec's loss (`engine/models/cross_entropy.py`): a cast to fp32,
softmax and its exponential, a copy in the compute format, and a mask; its backward pass only scales the gradients."""
CHUNK_KERNELS = 13
"""Number of its kernels per chunk that process one number per token."""
CUT_CHUNK_BYTES = (6, 4, 8, 8, 4, 8, 6, 4)
"""The same with a sharded vocabulary (`engine/parallel/context.py`), where maximum and sum are separate passes."""
CUT_CHUNK_KERNELS = 22
CUT_WORDS_KERNELS = 5
"""Kernels that select the words of a rank's part of the vocabulary."""
LOSS_BYTES = 12.0
"""Memory traffic per logit of softmax and loss in the forward pass: a 2-byte value is written and read, and a 4-byte
value is kept and read."""


class FamilyWork(Protocol):
    """The functions that a family's module provides; `model` is an instance of the family's class."""

    def count_params(self, model: Any, *, active: bool = False) -> int:
        """Count every parameter once. `active`: count only those that one token uses."""

    def flops_per_token(self, model: Any, seq_len: int) -> float:
        """Return the model FLOPs per token (per sample for images), forward and backward."""

    def mixing_flops_per_token(self, model: Any, seq_len: int) -> float:
        """Return the part that involves no weights: attention's scores and values, or a state-space scan."""

    def layer_works(self, model: Any, tokens: float, seq_len: int, layout: Layout) -> Layers:
        """Return the parts of each layer, in order; layers of one kind share one tuple."""


def _work_of(model: ModelSpec) -> FamilyWork:
    return cast("FamilyWork", import_module(model.record.work))


def count_params(model: ModelSpec) -> int:
    """Count every parameter once."""
    return _work_of(model).count_params(model)


def count_active_params(model: ModelSpec) -> int:
    """Count the parameters that one token uses."""
    return _work_of(model).count_params(model, active=True)


def flops_per_token(model: ModelSpec, seq_len: int, lora: LoraSpec = WHOLE) -> float:
    """Return the model FLOPs of forward and backward per token (for images, per sample). Weights frozen by adapters
    have no gradients, so they take 4 FLOPs each instead of 6."""
    whole = _work_of(model).flops_per_token(model, seq_len)
    if not adapter_params(model, lora):
        return whole
    mixing = mixing_flops_per_token(model, seq_len)
    return 4 / 6 * (whole - mixing) + 6 * adapter_params(model, lora, active=True) + mixing


def mixing_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    return _work_of(model).mixing_flops_per_token(model, seq_len)


def layer_works(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> Layers:
    """Return the parts of each layer, in order."""
    return _work_of(model).layer_works(model, tokens, seq_len, layout)


def layer_kinds(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> Kinds:
    """Count the layers of each kind."""
    layers = layer_works(model, tokens, seq_len, layout)
    number = Counter(map(id, layers))
    kinds = {id(works): works for works in layers}
    return tuple((number[kind], works) for kind, works in kinds.items())


@lru_cache(maxsize=4096)
def embedding_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Return the work of the embedding look-up and of the first write to the residual stream."""
    if model.unit == "samples":
        return None
    params = model.vocab_size * model.hidden_size / layout.tp + model.learned_positions * model.hidden_size
    split = layout.tp if layout.sequence_parallel else 1
    looked_up = 2.0 * tokens * model.hidden_size
    table_bytes = 2.0 * model.vocab_size * model.hidden_size / layout.tp
    # With a sharded vocabulary, the words of other ranks become zeros. The gradient has the size of the table.
    cut = [2 * looked_up] if layout.tp > 1 else []
    forward = Counter([2 * looked_up, *cut, *len(cut) * CUT_WORDS_KERNELS * [0.0]])
    return Work(
        pass_bytes=4.0 * tokens * model.hidden_size / split,
        counted_kernels=(forward, Counter([looked_up + table_bytes, *cut])),
        kernels=4,
        tp_bytes=2.0 * tokens * model.hidden_size,
        params=params,
    )


@lru_cache(maxsize=4096)
def head_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Return the work of the final norm, output projection and loss (and, on the last stage, of layers that predict
    further tokens)."""
    if model.unit == "samples":
        return None
    split = layout.tp if layout.sequence_parallel else 1
    hidden = model.hidden_size
    vocab = model.vocab_size / layout.tp
    tied = model.tied_embeddings and layout.pp == 1
    chunk = loss_chunk_tokens(int(vocab))
    chunks = math.ceil(tokens / chunk)
    groups = math.ceil(tokens / loss_group_tokens(hidden, 2.0, chunk))
    logit_bytes, small = (CUT_CHUNK_BYTES, CUT_CHUNK_KERNELS) if layout.tp > 1 else (CHUNK_BYTES, CHUNK_KERNELS)
    forward = Counter({0.0: chunks * small, 4.0 * tokens * hidden / split: 1})
    for each in logit_bytes:
        forward[each * tokens / chunks * vocab] += chunks
    return Work(
        gemms=(Gemm(tokens, vocab, hidden, wide=False),),
        pass_bytes=tokens * 8.0 * hidden / split,
        loss_bytes=tokens * LOSS_BYTES * vocab,
        counted_gemms=(Gemm(tokens / groups, vocab, hidden, wide=False),) * groups,
        # The norm and, in the backward pass, the scaled gradient of the hidden states.
        counted_kernels=(forward, Counter([6.0 * tokens * hidden / split, 4.0 * tokens * hidden])),
        kernels=12,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1,
        params=0.0 if tied else vocab * hidden,
        saved_bytes=4.0 * tokens * hidden / split,
        input_bytes=2.0 * tokens * hidden / split,
    )


def adapted_matrices(
    model: DecoderModel, is_expert_layer: bool, lora: LoraSpec, tp: int = 1
) -> Iterator[tuple[int, int]]:
    """Yield the size (outputs, inputs) of a rank's part of each adapted matrix in a layer, except for those of routed
    experts (`expert_stacks`)."""
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
    """Return the matrices of the feed-forward; for layers with routed experts, those of the shared experts."""
    width = model.ffn_size
    if is_expert_layer:
        assert model.experts is not None
        width = model.experts.shared_width
    if not width:
        return {}
    up = (width // tp, model.hidden_size)
    down = (model.hidden_size, width // tp)
    return {"up": up, "down": down} | ({"gate": up} if model.gated_mlp else {})


def quantised_bytes(rows: int, columns: int, tp: int = 1) -> float:
    """Return the size in bytes of a rank's part of a matrix in 4-bit NormalFloat with double quantisation
    (arXiv:2305.14314, section 3): 4 bits per weight and 8 per block scale. The full matrix has an additional 32 bits
    per 256 scales, and 32 for their mean."""
    blocks = rows * math.ceil(columns / NF4_BLOCK)
    return rows * columns / 2 + blocks + 4.0 * (math.ceil(tp * blocks / NF4_SCALE_BLOCK) + 1)


Stack = tuple[int, int, int]
"""(experts, inputs, outputs) of the matrices of routed experts."""


def expert_stacks(model: DecoderModel, is_expert_layer: bool, ep: int = 1) -> dict[str, Stack]:
    """Return a rank's part of the matrices of a layer's routed experts, by the adapter's target."""
    if not is_expert_layer:
        return {}
    assert model.experts is not None
    held, width = model.experts.num_experts // ep, model.experts.expert_ffn_size
    up = width * (2 if model.gated_mlp else 1)
    return {"experts.up": (held, model.hidden_size, up), "experts.down": (held, width, model.hidden_size)}


def quantised_matrices(model: DecoderModel, is_expert_layer: bool, tp: int = 1) -> list[tuple[int, int]]:
    """Return the size (rows, columns) of a rank's part of each matrix of a layer that can be stored in 4 bits, except
    for those of routed experts."""
    return [*_attention(model, tp).values(), *_feed_forward(model, is_expert_layer, tp).values()]


def quantised_params(model: ModelSpec, lora: LoraSpec) -> int:
    """Return the number of weights kept in 4 bits: all weights in the blocks' matrices, except for routers."""
    decoder = adapted_decoder(model, lora)
    if decoder is None or not lora.is_quantised:
        return 0
    kinds = Counter(decoder.is_expert_layer(layer) for layer in range(decoder.num_layers))
    return sum(
        layers * math.prod(sizes)
        for kind, layers in kinds.items()
        for sizes in (*quantised_matrices(decoder, kind), *expert_stacks(decoder, kind).values())
    )


def adapted_decoder(model: ModelSpec, lora: LoraSpec) -> DecoderModel | None:
    """Return the model if it can have adapters, which only this family supports."""
    return model if lora.rank and isinstance(model, DecoderModel) else None


def traced_adapters(part: TracedPart, lora: LoraSpec) -> Iterator[tuple[int, int]]:
    """Yield the size (rows, elements per row) of each parameter of the adapters in a traced block."""
    for name, outputs, inputs in part.linear_sizes if lora.rank else ():
        if lora.targets == TARGETS or name in lora.targets:
            yield from ((lora.rank, inputs), (outputs, lora.rank), *((outputs, 1),) * lora.magnitude)


def adapter_params(model: ModelSpec, lora: LoraSpec, *, active: bool = False) -> int:
    """Count the parameters of the adapters. `active`: count only those that one token uses."""
    if isinstance(model, TransformersModel):
        return sum(part.count * math.prod(size) for part in model.blocks for size in traced_adapters(part, lora))
    decoder = adapted_decoder(model, lora)
    if decoder is None:
        return 0
    kinds = Counter(decoder.is_expert_layer(layer) for layer in range(decoder.num_layers))
    total = 0
    for kind, layers in kinds.items():
        adapted = list(adapted_matrices(decoder, kind, lora))
        total += layers * sum(lora.rank * sum(sizes) for sizes in adapted)
        total += layers * sum(outputs for outputs, _ in adapted) * lora.magnitude
        for target, (held, inputs, outputs) in expert_stacks(decoder, kind).items():
            assert decoder.experts is not None
            used = decoder.experts.top_k if active else held
            total += layers * lora.rank * used * (inputs + outputs) * (target in lora.targets)
    return total
