"""Count what a model costs: parameters, model FLOPs, and the work of its layers and ends on one rank.

Each family's own arithmetic is in the module that its record names (`FamilyRecord.work`), as functions of `FamilyWork`.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, cast

from trainspec_cli.planner.workload.adapters import adapted_decoder, quantised_params
from trainspec_cli.planner.workload.adapters import adapter_params as adapter_params
from trainspec_cli.planner.workload.work import Gemm, Kinds, Layers, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.keys.training import LoraSpec

WHOLE = LoraSpec()
LOSS_BYTES = 12.0
"""Memory traffic of a logit's softmax and loss, forward: written in 2 bytes, read, kept in 4, read."""


class FamilyWork(Protocol):
    """The functions of a family's module; `model` is of the family's own class."""

    def count_params(self, model: Any, *, active: bool = False) -> int:
        """Every parameter once; `active`: those that one token meets."""

    def flops_per_token(self, model: Any, seq_len: int) -> float:
        """Model FLOPs of forward and backward, a token (a sample, for images)."""

    def mixing_flops_per_token(self, model: Any, seq_len: int) -> float:
        """The part of them that no weight takes part in: attention's scores and values, a state-space scan."""

    def layer_works(self, model: Any, tokens: float, seq_len: int, layout: Layout) -> Layers:
        """The parts of each layer, in order; layers of one kind share one tuple."""


def _work_of(model: ModelSpec) -> FamilyWork:
    return cast("FamilyWork", import_module(model.record.work))


def count_params(model: ModelSpec) -> int:
    """Every parameter once."""
    return _work_of(model).count_params(model)


def count_active_params(model: ModelSpec) -> int:
    """Count the parameters that one token meets."""
    return _work_of(model).count_params(model, active=True)


def trained_share(model: ModelSpec, lora: LoraSpec) -> float:
    """Part of the parameters that have gradients."""
    return adapter_params(model, lora) / count_params(model) if adapted_decoder(model, lora) else 1.0


def sharded_share(model: ModelSpec, lora: LoraSpec) -> float:
    """Return the part of the parameters that sharding spreads and gathers; each rank has a copy of quantised ones."""
    return 1.0 - quantised_params(model, lora) / count_params(model)


def flops_per_token(model: ModelSpec, seq_len: int, lora: LoraSpec = WHOLE) -> float:
    """Model FLOPs of forward and backward, a token (a sample, for images). Weights that adapters freeze have no
    gradients: 4 each instead of 6."""
    whole = _work_of(model).flops_per_token(model, seq_len)
    if not adapted_decoder(model, lora):
        return whole
    mixing = mixing_flops_per_token(model, seq_len)
    return 4 / 6 * (whole - mixing) + 6 * adapter_params(model, lora) + mixing


def mixing_flops_per_token(model: ModelSpec, seq_len: int) -> float:
    return _work_of(model).mixing_flops_per_token(model, seq_len)


def layer_works(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> Layers:
    """The parts of each layer, in order."""
    return _work_of(model).layer_works(model, tokens, seq_len, layout)


def layer_kinds(model: ModelSpec, tokens: float, seq_len: int, layout: Layout) -> Kinds:
    """Count the layers of each kind."""
    layers = layer_works(model, tokens, seq_len, layout)
    number = Counter(map(id, layers))
    kinds = {id(works): works for works in layers}
    return tuple((number[kind], works) for kind, works in kinds.items())


@lru_cache(maxsize=4096)
def embedding_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Look-up and the residual stream's first write."""
    if model.unit == "samples":
        return None
    params = model.vocab_size * model.hidden_size / layout.tp + model.learned_positions * model.hidden_size
    split = layout.tp if layout.sequence_parallel else 1
    return Work(pass_bytes=4.0 * tokens * model.hidden_size / split, kernels=4, params=params)


@lru_cache(maxsize=4096)
def head_work(model: ModelSpec, tokens: float, layout: Layout) -> Work | None:
    """Final norm, output projection, loss (and the layers that predict further tokens, which the last stage holds)."""
    if model.unit == "samples":
        return None
    split = layout.tp if layout.sequence_parallel else 1
    hidden = model.hidden_size
    vocab = model.vocab_size / layout.tp
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
