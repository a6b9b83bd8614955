"""What a layer's sizes follow from: its kind, the layout, and the tokens of one rank and one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import DecoderModel, ExpertSpec, HybridModel, LatentAttention

TextModel = DecoderModel | HybridModel
Mixer = Literal["attention", "latent", "feed_forward", "experts", "mamba"]
LETTERS: dict[str, Mixer] = {"M": "mamba", "*": "attention", "-": "feed_forward", "E": "experts"}


@dataclass(frozen=True)
class Layer:
    """A kind of layer: what stands behind its norms, one after another."""

    mixers: tuple[Mixer, ...]
    window: int | None = None
    """Tokens that its attention sees; None: all before."""


def layers_of(model: TextModel) -> list[Layer]:
    if isinstance(model, HybridModel):
        return [Layer((LETTERS[letter],)) for letter in model.layers]
    return [_decoder_layer(model, layer) for layer in range(model.num_layers)]


def _decoder_layer(model: DecoderModel, layer: int) -> Layer:
    first: Mixer = "latent" if model.mla else "attention"
    return Layer((first, "experts" if model.is_expert_layer(layer) else "feed_forward"), model.window_of(layer))


@dataclass(frozen=True)
class Shape:
    """Elements are of one rank: tokens of its part of the sequence (context parallelism), heads and widths of its part
    of the matrices (tensor parallelism)."""

    model: TextModel
    layer: Layer
    layout: Layout
    samples: int
    seq_len: int
    """Of this rank's part of the sequence."""
    width: float
    """Bytes of an element in the compute format."""
    fp8: bool = False
    """Linear layers multiply in it."""
    lora: LoraSpec = field(default_factory=LoraSpec)

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def outside_tokens(self) -> float:
        """Between the regions of tensor parallelism."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def hidden(self) -> int:
        return self.model.hidden_size

    @property
    def decoder(self) -> DecoderModel:
        return self.model.as_decoder if isinstance(self.model, HybridModel) else self.model

    @property
    def rotates(self) -> bool:
        return isinstance(self.model, DecoderModel) and not self.model.learned_positions

    @property
    def hybrid(self) -> HybridModel:
        assert isinstance(self.model, HybridModel)
        return self.model

    @property
    def experts(self) -> ExpertSpec:
        assert self.model.experts is not None
        return self.model.experts

    @property
    def latent(self) -> LatentAttention:
        assert self.decoder.mla is not None
        return self.decoder.mla
