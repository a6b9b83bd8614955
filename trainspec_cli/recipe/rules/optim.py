"""Rules for what an optimizer does not train, or does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.model import HybridModel, TextModel, has_layer_list
from trainspec_cli.recipe.keys.optim import BLOCK, ON_DEVICE, QUANTISED_ROW, QUANTISED_SIZE
from trainspec_cli.recipe.rules.layout import size_of

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

NAME = "optim.name"


def muon_models(spec: RunSpec) -> Iterator[Problem]:
    """Muon is for matrices of hidden layers that are trained as a whole."""
    if spec.optim.name != "muon":
        return
    if spec.model.unit == "samples":
        message = f"`{NAME}` is muon, which trains matrices, and `model.family` {spec.model.family} has convolutions"
        yield Problem("unsupported", message, NAME, f"type {NAME}=adamw or {NAME}=sgd")
    elif reason := spec.model.record.refuses.get("muon"):
        yield Problem("unsupported", f"`{NAME}` is muon, and {reason}", NAME, f"type {NAME}=adamw or {NAME}=sgd")
    elif not has_layer_list(spec.model):
        message = f"`{NAME}` is muon, and the planner does not know the matrices of `model.family` {spec.model.family}"
        yield Problem("unsupported", message, NAME, f"type {NAME}=adamw or {NAME}=sgd")
    elif spec.lora.rank:
        message = f"`{NAME}` is muon, which trains whole matrices, and `lora.rank` is {spec.lora.rank}"
        yield Problem("unsupported", message, NAME, f"type {NAME}=adamw, or lora.rank=0")


def offloaded_state(spec: RunSpec) -> Iterator[Problem]:
    if spec.optim.name in ON_DEVICE and spec.offload not in ("none", AUTO):
        message = f"`offload` is {spec.offload}, and the update of `{NAME}` {spec.optim.name} is made on the device"
        yield Problem("unsupported", message, "offload", f"type offload=none, or {NAME}=adamw")


def blocks_of_changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """A layout that the recipe changes to has to have the same blocks, in which the state is moved."""
    if spec.optim.name != "adamw8bit" or not has_layer_list(spec.model):
        return
    tp = size_of(spec.layout, "tp")
    for place, change in enumerate(spec.scheduler.changes):
        if other := describe_other_blocks(spec, tp, size_of(change.of(spec.layout), "tp")):
            path = f"scheduler.changes.{place}.tp"
            yield Problem("unsupported", other, path, f"type ~{path}, or {NAME}=adamw")


def describe_other_blocks(spec: RunSpec, tp: int, other_tp: int) -> str:
    """Return why 8-bit state that was made under `tp` cannot be read under another one; "" where it can.

    tp cuts rows of some matrices, and each rank quantises its part in blocks of its own: those of another tp are the
    same only where every part of either is some whole blocks.
    """
    if spec.optim.name != "adamw8bit" or not has_layer_list(spec.model) or tp == other_tp:
        return ""
    for key, row in _rows_cut_by_tp(spec.model, spec.lora.rank).items():
        if any(size > 1 and row % (size * BLOCK) for size in (tp, other_tp)):
            cut = f"layout.tp {tp} and {other_tp} cut rows of {key} ({row}) into other blocks of {BLOCK}"
            return f"`{NAME}` is adamw8bit, and {cut}"
    return ""


def _rows_cut_by_tp(model: TextModel, lora_rank: int) -> dict[str, int]:
    """Return the lengths of the rows that tp cuts and whose moments are kept in 8 bits, by the keys that say them."""
    mixers = {mixer for layer in model.layer_list for mixer in layer.mixers}
    decoder, experts = model.as_decoder, model.experts
    rows = {}
    if "attention" in mixers:
        rows["model.num_heads x head_dim"] = model.num_heads * model.head_dim
    if "latent" in mixers and decoder.mla:
        rows["model.num_heads x mla.v_head_dim"] = model.num_heads * decoder.mla.v_head_dim
    if "feed_forward" in mixers:
        rows["model.ffn_size"] = model.ffn_size
    if "experts" in mixers and experts and experts.shared_experts:
        width = experts.shared_expert_ffn_size or experts.expert_ffn_size
        rows["model.experts.shared_experts x their width"] = experts.shared_experts * width
    if isinstance(model, HybridModel) and "mamba" in mixers:
        rows["model.mamba_num_heads x mamba_head_dim"] = model.mamba_heads * model.mamba_head_dim
    others = lora_rank or model.hidden_size
    return {key: row for key, row in rows.items() if row >= QUANTISED_ROW and row * others >= QUANTISED_SIZE}


OPTIM_RULES = (muon_models, offloaded_state, blocks_of_changed_layouts)
