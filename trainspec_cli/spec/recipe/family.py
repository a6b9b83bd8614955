"""The record of a family of models: where its work, memory and layers are written, and what it cannot be used with.

Each dataclass in `model.py` has one. The modules are named and not imported: the planner imports its own, and the
engine, which alone imports torch, its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class FamilyRecord:
    work: str
    """Module of the planner: parameters, FLOPs and the work of the layers (`planner.workload.FamilyWork`)."""
    builder: str
    """Module of the engine: `build(model, seq_len, layers)` makes the torch module."""
    memory: str = ""
    """Module of the planner: `replay(run, pipeline_rank)` counts a step's memory tensor by tensor. Empty: the planner
    estimates it as it does for other frameworks."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What the engine cannot do with such a model, and why: an axis of the layout, or one of `FEATURES`."""


FEATURES = ("lora", "fp8", "compile", "elastic")
