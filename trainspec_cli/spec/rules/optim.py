"""Rules for what an optimizer does not train, or does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.errors import Problem
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.optim import BLOCK, ON_DEVICE
from trainspec_cli.spec.rules.layout import size_of

if TYPE_CHECKING:
    from trainspec_cli.spec.recipe.run import RunSpec

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
    elif spec.lora.rank:
        message = f"`{NAME}` is muon, which trains whole matrices, and `lora.rank` is {spec.lora.rank}"
        yield Problem("unsupported", message, NAME, f"type {NAME}=adamw, or lora.rank=0")


def offloaded_state(spec: RunSpec) -> Iterator[Problem]:
    if spec.optim.name in ON_DEVICE and spec.offload not in ("none", AUTO):
        message = f"`offload` is {spec.offload}, and the update of `{NAME}` {spec.optim.name} is made on the device"
        yield Problem("unsupported", message, "offload", f"type offload=none, or {NAME}=adamw")


def blocks_of_changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """tp cuts rows of some matrices, and each rank quantises its part in blocks of its own: those of another tp are the
    same where every part is some blocks."""
    model = spec.model
    if spec.optim.name != "adamw8bit" or model.unit == "samples":
        return
    rows = {
        "num_heads x head_dim": getattr(model, "num_heads", 0) * getattr(model, "head_dim", 0),
        "ffn_size": getattr(model, "ffn_size", 0),
        "mamba_heads x mamba_head_dim": getattr(model, "mamba_heads", 0) * getattr(model, "mamba_head_dim", 0),
    }
    for place, change in enumerate(spec.scheduler.changes):
        sizes = [size_of(spec.layout, "tp"), size_of(change.of(spec.layout), "tp")]
        uneven = [name for name, row in rows.items() if row % (max(sizes) * BLOCK)]
        if sizes[0] != sizes[1] and uneven:
            path = f"scheduler.changes.{place}.tp"
            message = f"`{NAME}` is adamw8bit, and layout.tp {sizes[0]} and {sizes[1]} cut rows of `model` {uneven[0]}"
            message += f" ({rows[uneven[0]]}) into other blocks of {BLOCK}"
            yield Problem("unsupported", message, path, f"type ~{path}, or {NAME}=adamw")


OPTIM_RULES = (muon_models, offloaded_state, blocks_of_changed_layouts)
