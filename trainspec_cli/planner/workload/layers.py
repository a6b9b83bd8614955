"""The layers of a setup's model, and what stands before and after them, as work of one rank."""

from __future__ import annotations

from functools import lru_cache

from trainspec_cli.planner.workload import cnn, ssm, transformer
from trainspec_cli.planner.workload.work import Gemm, Kinds, Work
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.model import ConvModel, HybridModel, ModelSpec

LOSS_BYTES = 12.0
"""Memory traffic of a logit's softmax and loss, forward: written in 2 bytes, read, kept in 4, read."""


def layer_kinds(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> Kinds:
    """(how many, their parts) for each kind of layer, over the whole model."""
    if isinstance(model, ConvModel):
        return cnn.layer_works(model, tokens)
    if isinstance(model, HybridModel):
        return ssm.layer_works(model, tokens, seq_len, layout)
    return transformer.layer_works(model, tokens, seq_len, layout)


def num_layers(model: ModelSpec) -> int:
    """Units that pipeline stages are cut into."""
    return 1 if isinstance(model, ConvModel) else model.num_layers


@lru_cache(maxsize=4096)
def embedding_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Look-up and the residual stream's first write."""
    if isinstance(model, ConvModel):
        return None
    params = model.vocab_size * model.hidden_size / layout.tp
    if not isinstance(model, HybridModel):
        params += model.learned_positions * model.hidden_size
    split = layout.tp if layout.sequence_parallel else 1
    return Work(pass_bytes=4.0 * tokens * model.hidden_size / split, kernels=4, params=params)


@lru_cache(maxsize=4096)
def head_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Final norm, output projection, loss (and the layers that predict further tokens, which the last stage holds)."""
    if isinstance(model, ConvModel):
        return None
    split = layout.tp if layout.sequence_parallel else 1
    hidden, vocab = model.hidden_size, model.vocab_size / layout.tp
    tied = model.tied_embeddings and layout.pp == 1
    return Work(
        gemms=(Gemm(tokens, vocab, hidden, wide=False),),
        pass_bytes=tokens * 8.0 * hidden / split,
        loss_bytes=tokens * LOSS_BYTES * vocab,
        kernels=12,
        tp_bytes=2.0 * tokens * hidden,
        tp_exchanges=1,
        params=0.0 if tied else vocab * hidden,
        saved_bytes=4.0 * tokens * hidden / split,
        input_bytes=2.0 * tokens * hidden / split,
    )
