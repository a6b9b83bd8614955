"""ModelSpec -> the module that trains it, by the builder that the family's record names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from trainspec_cli.spec.recipe.model import ModelSpec


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """The whole model, or the stage of a pipeline that holds `layers`."""
    return import_module(model.record.builder).build(model, seq_len, layers)
