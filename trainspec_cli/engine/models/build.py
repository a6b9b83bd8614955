"""Build the module of a ModelSpec."""

from __future__ import annotations

from typing import Any

from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.models.hybrid import Hybrid
from trainspec_cli.engine.models.resnet import ResNet
from trainspec_cli.engine.models.unet import UNet
from trainspec_cli.spec.recipe.model import ConvModel, DecoderModel, HybridModel, ModelSpec


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """Build the whole model, or the pipeline stage with `layers`."""
    if isinstance(model, ConvModel):
        return UNet(model) if model.segments else ResNet(model)
    if isinstance(model, HybridModel):
        return Hybrid(model, layers)
    assert isinstance(model, DecoderModel), "other families are refused before launch"
    return Decoder(model, seq_len, layers)
