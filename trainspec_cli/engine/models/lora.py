"""Low-rank adapters (LoRA, arXiv:2106.09685), trained beside frozen matrices, which may be quantised (QLoRA,
arXiv:2305.14314).

Shapes: D a matrix's inputs, F its outputs, R the adapter's rank.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.quantised import QuantisedLinear, quantise_blocks
from trainspec_cli.recipe.keys.training import LoraSpec


class LoraLinear(nn.Linear):
    """W x + (alpha / R) B A x; initially the same as W x, since B starts at zero."""

    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.lora_a, self.lora_b = _adapter(linear, spec)
        self.lora_scale = spec.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale


class QuantisedLoraLinear(QuantisedLinear):
    """Adds the adapter to a frozen linear layer whose weight is kept in 4 bits."""

    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear)
        self.lora_a, self.lora_b = _adapter(linear, spec)
        self.lora_scale = spec.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale


def _adapter(linear: nn.Linear, spec: LoraSpec) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A (R, D) and B (F, R)."""
    a_RD = torch.empty(spec.rank, linear.in_features, device="meta")
    return nn.Parameter(a_RD), nn.Parameter(torch.empty(linear.out_features, spec.rank, device="meta"))


def apply_lora(part: nn.Module, spec: LoraSpec) -> None:
    """Add an adapter to each of the blocks' matrices that `spec` names (on meta, in place), and freeze the rest."""
    if not spec.rank:
        return
    part.requires_grad_(False)
    adapted = QuantisedLoraLinear if spec.is_quantised else LoraLinear
    for name, module in list(part.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if isinstance(module, nn.Linear) and owner.startswith("blocks.") and leaf in spec.targets:
            setattr(part.get_submodule(owner), leaf, adapted(module, spec))
    if spec.is_quantised:
        quantise_blocks(part)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.endswith(("lora_a", "lora_b")))


def init_down(full_RD: Tensor, generator: torch.Generator) -> None:
    """Set to a uniform distribution of variance 1 / 3D, as published adapters start."""
    bound = 1 / math.sqrt(full_RD.shape[1])
    full_RD.uniform_(-bound, bound, generator=generator)
