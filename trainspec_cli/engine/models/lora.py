"""Low-rank adapters (LoRA, arXiv:2106.09685), trained beside frozen matrices, which may be quantised (QLoRA,
arXiv:2305.14314).

Shapes: A (R, D) and B (F, R), of a matrix (F, D).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.quantised import QuantisedLinear
from trainspec_cli.recipe.keys.training import LoraSpec


class _Adapted(nn.Module):
    """Adds (alpha / R) B A x to a linear layer; initially nothing, since B starts at zero."""

    def adapt(self, linear: nn.Linear, spec: LoraSpec) -> None:
        self.lora_a = nn.Parameter(torch.empty(spec.rank, linear.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, spec.rank, device="meta"))
        self.lora_scale = spec.scale

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = super().forward(x)  # type: ignore[misc]  # that of the layer which it is mixed into
        return product + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale


class LoraLinear(_Adapted, nn.Linear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.adapt(linear, spec)


class QuantisedLoraLinear(_Adapted, QuantisedLinear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear)
        self.adapt(linear, spec)


def apply_lora(part: nn.Module, spec: LoraSpec) -> None:
    """Add an adapter to each of the blocks' matrices that `spec` names, and quantise all of the blocks' matrices if it
    says so (on meta, in place); only adapters are trained."""
    if not spec.rank:
        return
    adapted = QuantisedLoraLinear if spec.is_quantised else LoraLinear
    for name, module in list(part.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if not isinstance(module, nn.Linear) or not owner.startswith("blocks."):
            continue
        if leaf in spec.targets:
            setattr(part.get_submodule(owner), leaf, adapted(module, spec))
        elif spec.is_quantised:
            setattr(part.get_submodule(owner), leaf, QuantisedLinear(module))
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.endswith(("lora_a", "lora_b")))
