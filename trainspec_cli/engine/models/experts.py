"""Routed experts: sort tokens by expert, multiply by one grouped matrix product, and restore the order.

Shapes: T tokens, K experts per token, E experts, M copies of tokens sorted by expert, D hidden size, F width of an
expert.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.feed_forward import GatedActivation
from trainspec_cli.recipe.keys.model import DecoderModel


class SortedTokens(NamedTuple):
    """Copies of tokens in their experts' order; copies without an expert come last."""

    x_MD: Tensor
    counts_E: Tensor
    """Copies of each expert, int64; they sum to M minus the dropped ones."""
    source_M: Tensor
    """The copy (token * K + choice) at each row."""
    place_M: Tensor
    """The inverse: the row of each copy."""

    def combine(self, y_MD: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, D): the weighted sum of each token's copies."""
        tokens, chosen = weights_TK.shape
        y_TKD = _Take.apply(y_MD, self.place_M, self.source_M).view(tokens, chosen, y_MD.shape[1])
        return torch.bmm(weights_TK.to(y_TKD.dtype)[:, None], y_TKD)[:, 0]


def sort_by_expert(x_TD: Tensor, indices_TK: Tensor, num_experts: int) -> SortedTokens:
    """Sort copies of tokens by expert; an index of `num_experts` marks a dropped copy."""
    expert_M = indices_TK.flatten()
    source_M = expert_M.argsort(stable=True)
    place_M = torch.empty_like(source_M).scatter_(0, source_M, torch.arange(len(source_M), device=source_M.device))
    counts_E = count_experts(indices_TK, num_experts)
    return SortedTokens(_Take.apply(x_TD, source_M // indices_TK.shape[1], place_M), counts_E, source_M, place_M)


def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Return (E,) int64, on the device and of static shape; dropped copies are not counted."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(0, indices.flatten(), torch.ones_like(indices.flatten()))[:num_experts]


class _Take(torch.autograd.Function):
    """x[rows] (M, D). The copies of row t are at copies_M[t * M/T : (t + 1) * M/T], which makes the backward a gather
    instead of a scatter."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_M: Tensor, copies_M: Tensor) -> Tensor:
        ctx.save_for_backward(copies_M)
        ctx.tokens, ctx.copies = len(x_TD), len(rows_M) // max(1, len(x_TD))
        return x_TD[rows_M]

    @staticmethod
    def backward(ctx: Any, dy_MD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (copies_M,) = ctx.saved_tensors
        return dy_MD[copies_M].view(ctx.tokens, ctx.copies, dy_MD.shape[1]).sum(1), None, None


def grouped_matmul(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """Return (M, F): each expert's rows times its matrix; rows beyond the counts are undefined."""
    if x_MD.dtype == torch.float64:  # the grouped kernels take 32 bits at most
        return matmul_in_turn(x_MD, weight_EDF, counts_E)
    if x_MD.device.type == "cpu" or x_MD.dtype != torch.bfloat16:
        return _grouped_mm_eagerly(x_MD, weight_EDF, counts_E)
    return _grouped_mm(x_MD, weight_EDF, counts_E)


def _grouped_mm(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    return F.grouped_mm(x_MD, weight_EDF, offs=counts_E.cumsum(0).to(torch.int32))


# The compiler supports the grouped kernel only for bf16 on GPUs.
_grouped_mm_eagerly = torch.compiler.disable(_grouped_mm)


@torch.compiler.disable
def matmul_in_turn(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """Compute the same, one product after another; the host waits for the counts."""
    counts = counts_E.tolist()
    parts = x_MD.split([*counts, len(x_MD) - sum(counts)])
    return torch.cat([part @ weight for part, weight in zip(parts, [*weight_EDF, weight_EDF[0]], strict=True)])


class Experts(GatedActivation):
    """The routed experts' feed-forwards on sorted rows; rows beyond the counts become zeros.

    `up` holds the gate's columns and then the linear half's; without a gate, only the latter.
    """

    grouped_matmul = staticmethod(grouped_matmul)

    def __init__(self, model: DecoderModel):
        super().__init__(model.activation, model.gate_limit)
        assert model.experts is not None
        experts = model.experts
        hidden = model.hidden_size
        width = experts.expert_ffn_size
        halves = 2 if model.gated_mlp else 1
        self.up = nn.Parameter(torch.empty(experts.num_experts, hidden, halves * width))
        self.down = nn.Parameter(torch.empty(experts.num_experts, width, hidden))
        self.up_bias = nn.Parameter(torch.empty(experts.num_experts, halves * width)) if experts.bias else None
        self.down_bias = nn.Parameter(torch.empty(experts.num_experts, hidden)) if experts.bias else None
        self.gated = model.gated_mlp
        self.drops = experts.capacity_factor is not None

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        expert_M = None
        if self.up_bias is not None:
            row_M = torch.arange(len(x_MD), device=counts_E.device)
            expert_M = torch.searchsorted(counts_E.cumsum(0), row_M, right=True).clamp(max=len(counts_E) - 1)
        x_MD = self._without_dropped(x_MD, counts_E)
        inner_MF = self._inner(_add_bias(self.grouped_matmul(x_MD, self.up, counts_E), self.up_bias, expert_M))
        y_MD = _add_bias(self.grouped_matmul(inner_MF, self.down, counts_E), self.down_bias, expert_M)
        return self._without_dropped(y_MD, counts_E)

    def _inner(self, x_MF: Tensor) -> Tensor:
        """Both halves are freed on return, before the second product, unless the backward needs them."""
        gate_MF, up_MF = x_MF.chunk(2, dim=-1) if self.gated else (None, x_MF)
        return self.activate(gate_MF, up_MF)

    def _without_dropped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Set rows without an expert to zero, forward and backward: grouped kernels leave them undefined."""
        if not self.drops:
            return x_MD
        taken_M1 = torch.arange(len(x_MD), device=x_MD.device)[:, None] < counts_E.sum()
        return torch.where(taken_M1, x_MD, 0)


def _add_bias(y_MF: Tensor, bias_EF: Tensor | None, expert_M: Tensor | None) -> Tensor:
    return y_MF if bias_EF is None or expert_M is None else y_MF + bias_EF[expert_M]


class LocalDispatch(nn.Module):
    """Dispatches tokens to experts that are all on this rank."""

    def forward(self, x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, experts: nn.Module) -> Tensor:
        copies = sort_by_expert(x_TD, indices_TK, experts.up.shape[0])  # type: ignore[union-attr, index, arg-type]
        return copies.combine(experts(copies.x_MD, copies.counts_E), weights_TK)
