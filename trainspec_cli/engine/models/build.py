"""Build the module of a ModelSpec by the builder that its family's record names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trainspec_cli.spec.recipe.model import ModelSpec


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """Build the whole model, or the pipeline stage with `layers`."""
    return import_module(model.record.builder).build(model, seq_len, layers)
