"""What a block's sizes follow from."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel, HybridModel


@dataclass(frozen=True)
class Shape:
    """Of one rank and one micro-batch."""

    model: DecoderModel | HybridModel
    layout: Layout
    samples: int
    seq_len: int
    """Of this rank's part of the sequence."""
    width: float
    """Bytes of an element in the compute format."""
    fp8: bool = False
    """Linear layers multiply in it."""

    @property
    def tokens(self) -> float:
        return float(self.samples * self.seq_len)

    @property
    def outside_tokens(self) -> float:
        """Between the regions of tensor parallelism."""
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    @property
    def decoder(self) -> DecoderModel:
        """The attention, feed-forward and expert layers in a decoder's terms."""
        return self.model if isinstance(self.model, DecoderModel) else self.model.as_decoder

    @property
    def rotated_size(self) -> int:
        """Of a head's; 0 where the model has no table of angles."""
        if isinstance(self.model, HybridModel):
            return 0
        return self.model.mla.qk_rope_head_dim if self.model.mla else self.model.head_dim

    @property
    def rotates(self) -> bool:
        return isinstance(self.model, DecoderModel) and not self.model.learned_positions


@dataclass(frozen=True)
class Layer:
    """What one layer of the model is made of."""

    mixer: str
    """attention, mamba, or none."""
    window: int | None
    feed: str
    """dense, experts, or none."""


_LETTERS = {"M": ("mamba", "none"), "*": ("attention", "none"), "-": ("none", "dense"), "E": ("none", "experts")}


def layer_of(model: DecoderModel | HybridModel, index: int) -> Layer:
    if isinstance(model, HybridModel):
        mixer, feed = _LETTERS[model.layers[index]]
        return Layer(mixer, None, feed)
    return Layer("attention", model.window_of(index), "experts" if model.is_expert_layer(index) else "dense")
