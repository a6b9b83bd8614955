"""Rules for what an optimizer does not train, or does not go with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from trainspec_cli.errors import Problem
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.optim import ON_DEVICE

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
    elif spec.lora.rank:
        message = f"`{NAME}` is muon, which trains whole matrices, and `lora.rank` is {spec.lora.rank}"
        yield Problem("unsupported", message, NAME, f"type {NAME}=adamw, or lora.rank=0")


def offloaded_state(spec: RunSpec) -> Iterator[Problem]:
    if spec.optim.name in ON_DEVICE and spec.offload not in ("none", AUTO):
        message = f"`offload` is {spec.offload}, and the update of `{NAME}` {spec.optim.name} is made on the device"
        yield Problem("unsupported", message, "offload", f"type offload=none, or {NAME}=adamw")


def blocks_of_changed_layouts(spec: RunSpec) -> Iterator[Problem]:
    """tp cuts rows of some matrices, and each rank quantises its part in blocks of its own."""
    if spec.optim.name != "adamw8bit":
        return
    for place, change in enumerate(spec.scheduler.changes):
        if (tp := change.of(spec.layout).tp) != spec.layout.tp:
            path = f"scheduler.changes.{place}.tp"
            message = f"layout.tp is {tp} from step {change.step} on, and blocks of adamw8bit do not follow another tp"
            yield Problem("unsupported", message, path, f"type ~{path}, or {NAME}=adamw")


OPTIM_RULES = (muon_models, offloaded_state, blocks_of_changed_layouts)
