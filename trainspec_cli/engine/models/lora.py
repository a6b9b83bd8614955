"""Low-rank adapters (LoRA, arXiv:2106.09685), which are trained while the matrices are frozen. The matrices may be
stored in 4 bits (QLoRA, arXiv:2305.14314) and are then dequantised for each matmul.

Shapes: W (F, D), and its adapter's A (R, D) and B (F, R).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.nf4 import Nf4, Place, dequantise, magnitude_table, pair_table, shapes_of
from trainspec_cli.engine.shares import TENSORS, Cut
from trainspec_cli.recipe.keys.training import LoraSpec


class QuantisedLinear(nn.Module):
    """Computes W x + b with W stored in NF4. The tensors of W are buffers, which FSDP2 neither shards nor casts."""

    nf4_codes: Tensor
    nf4_magnitudes: Tensor
    nf4_scales: Tensor
    nf4_pairs: Tensor
    nf4_levels: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        held = shapes_of(linear.out_features, linear.in_features)
        self.bias = linear.bias
        tables = (torch.empty(256, 2, device="meta"), torch.empty(256, device="meta"))
        # These buffers are not persistent, because a checkpoint stores them as shares (`shares.quantised_parameters`),
        # without the tables.
        for name, tensor in zip((*TENSORS, "nf4_pairs", "nf4_levels"), (*held, *tables), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self._place = Place()

    def init_buffers(self) -> None:
        self.nf4_pairs.copy_(pair_table(self.nf4_pairs.device))
        self.nf4_levels.copy_(magnitude_table(self.nf4_levels.device))

    def place(self, cut: Cut) -> None:
        """Record how the magnitudes and weights are split over ranks."""
        columns = cut.full_size if cut.dim == 1 else self.nf4_magnitudes.shape[1]
        row, column = (cut.start, 0) if cut.dim == 0 else (0, cut.start)
        self._place = Place(row, column, columns)

    def forward(self, x: Tensor) -> Tensor:
        held = self.nf4_codes, self.nf4_magnitudes, self.nf4_scales, self.nf4_pairs, self.nf4_levels
        product: Tensor = _FrozenProduct.apply(x, self.bias, self._place, *held)
        return product


class _FrozenProduct(torch.autograd.Function):
    """A matmul that keeps only the 4-bit weights for the backward pass, which dequantises them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, place: Place, *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        ctx.place = place
        ctx.dtype = x.dtype
        return F.linear(x, _weight(held, place, x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return dout @ _weight(ctx.saved_tensors, ctx.place, ctx.dtype), *(None,) * 7


def _weight(held: tuple[Tensor, ...], place: Place, dtype: torch.dtype) -> Tensor:
    codes, magnitudes, scales, pairs, levels = held
    return dequantise(Nf4(codes, magnitudes, scales), place, pairs, levels, dtype)


class _Adapted(nn.Module):
    """A linear layer plus (alpha / R) B A x. Initially, the output is unchanged, because B starts at zero."""

    def adapt(self, linear: nn.Linear, spec: LoraSpec) -> None:
        self.lora_a = nn.Parameter(torch.empty(spec.rank, linear.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, spec.rank, device="meta"))
        self.lora_scale = spec.scale

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = super().forward(x)  # type: ignore[misc]  # the layer that this is mixed into
        return product + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale


class LoraLinear(_Adapted, nn.Linear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.adapt(linear, spec)


class QuantisedLoraLinear(_Adapted, QuantisedLinear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear)
        self.adapt(linear, spec)


def apply_lora(part: Any, spec: LoraSpec) -> None:
    """Add an adapter to each matrix of the blocks that is named in `spec`, and quantise all matrices of the blocks if
    `spec.is_quantised` (on meta, in place). Only adapters are trained."""
    if not spec.rank:
        return
    adapted = QuantisedLoraLinear if spec.is_quantised else LoraLinear
    for name, module in list(part.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if not isinstance(module, nn.Linear) or not f"{owner}.".startswith(part.blocks_prefix):
            continue
        if part.adapted(leaf, spec):
            setattr(part.get_submodule(owner), leaf, adapted(module, spec))
        elif spec.is_quantised:
            setattr(part.get_submodule(owner), leaf, QuantisedLinear(module))
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.endswith(("lora_a", "lora_b")))
