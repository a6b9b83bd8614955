"""Low-rank adapters (LoRA, arXiv:2106.09685), which are trained while the matrices are frozen. The matrices may be
stored in 4 bits (QLoRA, arXiv:2305.14314) and are then dequantised for each matmul.

Shapes: W (F, D), and its adapter's A (R, D) and B (F, R). Of E experts, on M rows: W (E, D, F), A (E, D, R) and B
(E, R, F).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.experts import Experts
from trainspec_cli.engine.nf4 import Nf4, Place, dequantise, magnitude_table, pair_table, shapes_of
from trainspec_cli.engine.shares import ADAPTERS, TENSORS, Cut, Share, local_part
from trainspec_cli.recipe.keys.training import LoraSpec


class QuantisedWeight(nn.Module):
    """A matrix, or a stack of matrices (those of experts), stored in NF4. Its tensors are buffers, which FSDP2 neither
    shards nor casts."""

    nf4_codes: Tensor
    nf4_magnitudes: Tensor
    nf4_scales: Tensor
    nf4_pairs: Tensor
    nf4_levels: Tensor

    def __init__(self, *shape: int):
        super().__init__()
        tables = (torch.empty(256, 2, device="meta"), torch.empty(256, device="meta"))
        # These buffers are not persistent, because a checkpoint stores them as shares (`shares.quantised_parameters`),
        # without the tables.
        for name, tensor in zip((*TENSORS, "nf4_pairs", "nf4_levels"), (*shapes_of(*shape), *tables), strict=True):
            self.register_buffer(name, tensor, persistent=False)
        self._place = Place()

    def init_buffers(self) -> None:
        self.nf4_pairs.copy_(pair_table(self.nf4_pairs.device))
        self.nf4_levels.copy_(magnitude_table(self.nf4_levels.device))

    def place(self, cut: Cut) -> None:
        """Record how the magnitudes and weights are split over ranks."""
        *inner, blocks = self.nf4_magnitudes.shape[1:]
        columns = cut.full_size if cut.dim == 1 else blocks
        row, column = (cut.start * math.prod(inner), 0) if cut.dim == 0 else (0, cut.start)
        self._place = Place(row, column, columns)

    def held(self) -> tuple[Place, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return what `_weight` needs."""
        return self._place, self.nf4_codes, self.nf4_magnitudes, self.nf4_scales, self.nf4_pairs, self.nf4_levels


class QuantisedLinear(QuantisedWeight):
    """Computes W x + b with W stored in NF4."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.out_features, linear.in_features)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = _FrozenProduct.apply(x, bias, *self.held())
        return product

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of W."""
        place, *held = self.held()
        return _weight(tuple(held), place, dtype)


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


class _FrozenGroupedProduct(torch.autograd.Function):
    """The same for rows that are sorted by expert. `multiply` is the grouped matmul."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, multiply: Any, counts_E: Tensor, place: Place, *held: Tensor) -> Tensor:
        ctx.save_for_backward(counts_E, *held)
        ctx.multiply = multiply
        ctx.place = place
        ctx.dtype = x_MD.dtype
        product: Tensor = multiply(x_MD, _weight(held, place, x_MD.dtype), counts_E)
        return product

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_MF: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        counts_E, *held = ctx.saved_tensors
        weight_EDF = _weight(tuple(held), ctx.place, ctx.dtype)
        return ctx.multiply(dout_MF, weight_EDF.transpose(1, 2), counts_E), *(None,) * 8


def _weight(held: tuple[Tensor, ...], place: Place, dtype: torch.dtype) -> Tensor:
    codes, magnitudes, scales, pairs, levels = held
    return dequantise(Nf4(codes, magnitudes, scales), place, pairs, levels, dtype)


class AdaptedLinear(nn.Module):
    """A linear layer plus (alpha / R) B A x. Initially, the output is unchanged, because B starts at zero.

    With a magnitude m (F,), each row of V = W + (alpha / R) B A is scaled to the length m (DoRA, arXiv:2402.09353, eq.
    5). As in section 4.3, the length of V has no gradient. m starts as the lengths of W's rows (`start_magnitude`)."""

    bias: Any
    multiply: Callable[[Tensor, Tensor | None], Tensor]
    full_weight: Callable[[torch.dtype], Tensor]

    def adapt(self, linear: nn.Linear, spec: LoraSpec) -> None:
        self.lora_a = nn.Parameter(torch.empty(spec.rank, linear.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(linear.out_features, spec.rank, device="meta"))
        self.lora_m = nn.Parameter(torch.empty(linear.out_features, device="meta")) if spec.magnitude else None
        self.lora_scale = spec.scale
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares_F: squares_F
        """A function that adds up squares of the parts of each row, if ranks hold different columns."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.multiply(x, self.bias if self.lora_m is None else None)
        product = product + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.lora_scale
        if self.lora_m is None:
            return product
        with torch.no_grad():
            adapter = self.lora_b[None], self.lora_a[None]
            # Selective recomputation would keep the result of `addmm`, a whole matrix for every layer.
            merged = torch.baddbmm(self.full_weight(x.dtype)[None], *adapter, alpha=self.lora_scale)
            length_F = self.lengths(merged[0])
        product = product * (self.lora_m / length_F).to(x.dtype)
        return product if self.bias is None else product + self.bias

    def lengths(self, weight_FD: Tensor) -> Tensor:
        """Return the lengths of the rows of which this rank holds a part, at least fp32."""
        at_least = torch.promote_types(weight_FD.dtype, torch.float32)
        length_F = torch.linalg.vector_norm(weight_FD, dim=1, dtype=at_least)
        return self.sum_over_ranks(length_F.square()).sqrt()

    @torch.no_grad()
    def start_magnitude(self) -> None:
        """Set m to the lengths of W's rows. Called collectively by ranks that hold parts of the same rows."""
        assert self.lora_m is not None
        part = Share("", self.lora_m)
        weight = local_part(self.weight) if isinstance(self, LoraLinear) else self.full_weight(torch.float32)
        length_F = self.lengths(weight)
        # FSDP2 shards W and m alike, but not a quantised W.
        part.local.copy_(length_F if isinstance(self, LoraLinear) else part.part_of(length_F))


class LoraLinear(AdaptedLinear, nn.Linear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.adapt(linear, spec)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def full_weight(self, _dtype: torch.dtype) -> Tensor:
        """Return this rank's part of W, which FSDP2 has gathered and cast."""
        return self.weight


class QuantisedLoraLinear(AdaptedLinear, QuantisedLinear):
    def __init__(self, linear: nn.Linear, spec: LoraSpec):
        super().__init__(linear)
        self.adapt(linear, spec)


class AdaptedExperts(Experts):
    """Routed experts with an adapter for each expert's matrix, or with matrices in NF4, or both. A quantised matrix is
    a module instead of a parameter."""

    def __init__(self, experts: Experts, spec: LoraSpec):
        super().__init__(experts.model)
        self.lora_scale = spec.scale
        for matrix in ("up", "down"):
            weight_EDF = getattr(self, matrix)
            num_experts, inputs, outputs = weight_EDF.shape
            if spec.is_quantised:
                delattr(self, matrix)
                setattr(self, matrix, QuantisedWeight(*weight_EDF.shape))
            if f"experts.{matrix}" in spec.targets:
                shapes = {"a": (num_experts, inputs, spec.rank), "b": (num_experts, spec.rank, outputs)}
                for half, shape in shapes.items():
                    setattr(self, f"{matrix}_lora_{half}", nn.Parameter(torch.empty(shape, device="meta")))

    def multiply(self, x_MD: Tensor, matrix: str, counts_E: Tensor) -> Tensor:
        weight = getattr(self, matrix)
        if isinstance(weight, QuantisedWeight):
            y_MF: Tensor = _FrozenGroupedProduct.apply(x_MD, self.grouped_matmul, counts_E, *weight.held())
        else:
            y_MF = self.grouped_matmul(x_MD, weight, counts_E)
        if not hasattr(self, f"{matrix}_lora_a"):
            return y_MF
        a_EDR, b_ERF = (getattr(self, f"{matrix}_lora_{half}") for half in "ab")
        narrow_MR = self.grouped_matmul(x_MD, a_EDR, counts_E)
        return y_MF + self.grouped_matmul(narrow_MR, b_ERF, counts_E) * self.lora_scale


def apply_lora(part: Any, spec: LoraSpec) -> None:
    """Add an adapter to each matrix of the blocks that is named in `spec`, and quantise all matrices of the blocks if
    `spec.is_quantised` (on meta, in place). Only adapters are trained."""
    if not spec.rank:
        return
    adapted = QuantisedLoraLinear if spec.is_quantised else LoraLinear
    for name, module in list(part.named_modules()):
        owner, _, leaf = name.rpartition(".")
        if not f"{owner}.".startswith(part.blocks_prefix):
            continue
        replaced: nn.Module | None = None
        if isinstance(module, Experts):
            replaced = AdaptedExperts(module, spec)
        elif isinstance(module, nn.Linear) and part.adapted(leaf, spec):
            replaced = adapted(module, spec)
        elif isinstance(module, nn.Linear) and spec.is_quantised:
            replaced = QuantisedLinear(module)
        if replaced is not None:
            setattr(part.get_submodule(owner), leaf, replaced)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(name.endswith(ADAPTERS))


def start_magnitudes(parts: Iterable[nn.Module]) -> None:
    """Set the magnitudes of adapters to the lengths of the rows of their matrices. Called collectively by all ranks."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, AdaptedLinear) and module.lora_m is not None:
                module.start_magnitude()
