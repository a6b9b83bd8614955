"""State-space layers, alone or between attention, feed-forward and expert layers (Nemotron-H, arXiv:2504.03624)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from trainspec_cli.engine.models.attention import Attention
from trainspec_cli.engine.models.decoder import Decoder, dense_feed_forward
from trainspec_cli.engine.models.experts import MixtureOfExperts
from trainspec_cli.engine.models.layers import RMSNorm
from trainspec_cli.engine.models.mamba2 import Mamba2
from trainspec_cli.recipe.keys.model import HybridModel

MIXERS: dict[str, tuple[str, Callable[[HybridModel], nn.Module]]] = {
    "M": ("mamba", Mamba2),
    "*": ("attention", lambda model: Attention(model.as_decoder)),
    "-": ("ffn", lambda model: dense_feed_forward(model.as_decoder)),
    "E": ("ffn", lambda model: MixtureOfExperts(model.as_decoder)),
}
"""Maps each letter of the pattern to (the mixer's name in its block, its constructor)."""


class HybridBlock(nn.Module):
    """A block: x + mixer(norm(x)). The mixer is Mamba-2, attention, a feed-forward layer or experts."""

    def __init__(self, model: HybridModel, letter: str):
        super().__init__()
        self.kind, make = MIXERS[letter]
        self.norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.add_module(self.kind, make(model))

    def forward(self, x_BSD: Tensor, *inputs: Tensor) -> Tensor:
        """`inputs`: as in `Decoder.block_inputs`."""
        used = inputs if self.kind == "attention" else ()
        return x_BSD + self.get_submodule(self.kind)(self.norm(x_BSD), *used)


class Hybrid(Decoder):
    """A decoder whose layers have a single mixer."""

    writes_per_layer: ClassVar[int] = 1

    def __init__(self, model: HybridModel, seq_len: int, layers: range | None = None):
        super().__init__(model.as_decoder, seq_len, layers, lambda layer: HybridBlock(model, model.layers[layer]))


build = Hybrid
