"""Mixture of experts instead of a feed-forward layer: the router, with load balancing, and routed and shared experts.

Routed tokens are sorted by expert, processed by one grouped matmul, and returned to their original order.

Shapes: B samples, S tokens per sample, T tokens, K experts per token, E experts, M copies of tokens sorted by expert, D
hidden size, F expert width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.layers import FeedForward, GatedActivation, precise
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec


class SortedTokens(NamedTuple):
    """Copies of tokens, sorted by expert. Dropped copies come last."""

    x_MD: Tensor
    counts_E: Tensor
    """Number of copies for each expert, int64. The counts sum to M minus the number of dropped copies."""
    source_M: Tensor
    """The index (token * K + choice) of the copy in each row."""
    place_M: Tensor
    """The inverse permutation: the row of each copy."""

    def combine(self, y_MD: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, D): the weighted sum of each token's copies."""
        tokens, chosen = weights_TK.shape
        y_TKD = _Take.apply(y_MD, self.place_M, self.source_M).view(tokens, chosen, y_MD.shape[1])
        return torch.bmm(weights_TK.to(y_TKD.dtype)[:, None], y_TKD)[:, 0]


def sort_by_expert(x_TD: Tensor, indices_TK: Tensor, num_experts: int) -> SortedTokens:
    """Sort copies of tokens by expert. The index `num_experts` marks a dropped copy."""
    expert_M = indices_TK.flatten()
    source_M = expert_M.argsort(stable=True)
    place_M = torch.empty_like(source_M).scatter_(0, source_M, torch.arange(len(source_M), device=source_M.device))
    counts_E = count_experts(indices_TK, num_experts)
    return SortedTokens(_Take.apply(x_TD, source_M // indices_TK.shape[1], place_M), counts_E, source_M, place_M)


def count_experts(indices: Tensor, num_experts: int) -> Tensor:
    """Return the number of copies per expert, (E,) int64, on the device and with a static shape. Dropped copies are not
    counted."""
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(0, indices.flatten(), torch.ones_like(indices.flatten()))[:num_experts]


class _Take(torch.autograd.Function):
    """Gathers x[rows], (M, D). The copies of row t are at copies_M[t * M/T : (t + 1) * M/T], which makes the backward
    pass a gather instead of a scatter."""

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
    """Return (M, F): each expert's rows times its matrix. Rows beyond the counts are undefined."""
    if x_MD.dtype == torch.float64:  # the grouped kernels do not support fp64
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
    """Compute the same result with one matmul per expert. The host waits for the counts."""
    counts = counts_E.tolist()
    parts = x_MD.split([*counts, len(x_MD) - sum(counts)])
    return torch.cat([part @ weight for part, weight in zip(parts, [*weight_EDF, weight_EDF[0]], strict=True)])


class Experts(GatedActivation):
    """The feed-forward layers of the routed experts, on sorted rows. Rows beyond the counts become zeros.

    `up` contains the columns of the gate, followed by those of the linear half. Without a gate, it contains only the
    latter.
    """

    grouped_matmul = staticmethod(grouped_matmul)

    def __init__(self, model: DecoderModel):
        super().__init__(model.activation, model.gate_limit)
        assert model.experts is not None
        experts = model.experts
        self.model = model
        self.num_experts = experts.num_experts
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
        inner_MF = self._inner(_add_bias(self.multiply(x_MD, "up", counts_E), self.up_bias, expert_M))
        y_MD = _add_bias(self.multiply(inner_MF, "down", counts_E), self.down_bias, expert_M)
        return self._without_dropped(y_MD, counts_E)

    def multiply(self, x_MD: Tensor, matrix: str, counts_E: Tensor) -> Tensor:
        """Return each row times its expert's matrix, `up` or `down`."""
        return self.grouped_matmul(x_MD, getattr(self, matrix), counts_E)

    def _inner(self, x_MF: Tensor) -> Tensor:
        """Apply the activation. On return, before the second matmul, both halves are freed unless the backward pass
        needs them."""
        gate_MF, up_MF = x_MF.chunk(2, dim=-1) if self.gated else (None, x_MF)
        return self.activate(gate_MF, up_MF)

    def _without_dropped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Set rows without an expert to zero in both passes, because grouped kernels leave them undefined."""
        if not self.drops:
            return x_MD
        taken_M1 = torch.arange(len(x_MD), device=x_MD.device)[:, None] < counts_E.sum()
        return torch.where(taken_M1, x_MD, 0)


def _add_bias(y_MF: Tensor, bias_EF: Tensor | None, expert_M: Tensor | None) -> Tensor:
    return y_MF if bias_EF is None or expert_M is None else y_MF + bias_EF[expert_M]


def dispatch_here(x_TD: Tensor, indices_TK: Tensor, weights_TK: Tensor, experts: Experts) -> Tensor:
    """The dispatch of tokens if all experts are on this rank."""
    copies = sort_by_expert(x_TD, indices_TK, experts.num_experts)
    return copies.combine(experts(copies.x_MD, copies.counts_E), weights_TK)


# Routing


SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}


class Router(nn.Module):
    """Scores all experts and chooses the best ones.

    Balancing without an auxiliary loss (arXiv:2408.15664): `balance_bias_E` is added to the scores for the choice only,
    and `update_balance` adjusts it after each step. Balancing with an auxiliary loss (DeepSeek-V3, arXiv:2412.19437,
    eq. 17-20, for the chosen experts): the gradient of the loss is added in the backward pass. The loss of a sequence
    is weighted by its number of tokens, so with `loss_scale` = 1 / global tokens, the coefficient applies to the mean
    over tokens.
    """

    balance_bias_E: Tensor | None
    tokens_per_expert_E: Tensor
    loss_scale: Tensor

    def __init__(self, hidden_size: int, experts: ExpertSpec):
        super().__init__()
        self.spec = experts
        self.score = SCORES[experts.score]
        self.weight = nn.Parameter(torch.empty(experts.num_experts, hidden_size))
        self.bias = nn.Parameter(torch.empty(experts.num_experts)) if experts.bias else None
        bias = torch.empty(experts.num_experts, dtype=torch.float32) if experts.has_choice_bias else None
        self.register_buffer("balance_bias_E", bias)
        counter = torch.empty(experts.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert_E", counter, persistent=False)
        self.register_buffer("loss_scale", torch.empty((), dtype=torch.float32), persistent=False)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts_BE: counts_BE
        """A function that converts counts for this rank's part of each sequence to counts for the full sequence."""

    def init_buffers(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.loss_scale.fill_(1.0)
        if self.balance_bias_E is not None:
            self.balance_bias_E.zero_()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (expert indices (B, S, K) int64, where E marks a dropped choice; their weights (B, S, K), at least
        fp32)."""
        logits_BSE = F.linear(x_BSD, self.weight, self.bias)
        scores_BSE = self.score(precise(logits_BSE))
        indices_BSK = self._choose(scores_BSE.detach())
        weights_BSK = scores_BSE.gather(-1, indices_BSK)
        if self.spec.normalise_weights:  # avoid dividing by 0: all sigmoid scores may have been rounded to 0
            weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + 1e-20)
        weights_BSK = weights_BSK * self.spec.weight_scale
        if torch.is_grad_enabled():
            self.tokens_per_expert_E += count_experts(indices_BSK, self.spec.num_experts)
            if self.spec.balance_loss:
                weights_BSK = _WithLoss.apply(weights_BSK, self._balance_loss(scores_BSE, indices_BSK))
        if self.spec.capacity_factor is not None:
            indices_BSK, weights_BSK = self._within_capacity(indices_BSK, weights_BSK)
        return indices_BSK, weights_BSK

    def _choose(self, scores_BSE: Tensor) -> Tensor:
        """Choose the K best experts; with groups, only from the best groups (DeepSeek-V3's node-limited routing)."""
        if self.balance_bias_E is not None:
            scores_BSE = scores_BSE + self.balance_bias_E
        groups = self.spec.num_groups
        kept = self.spec.top_groups
        if kept < groups:
            grouped = scores_BSE.unflatten(-1, (groups, -1))
            best = (
                grouped.topk(min(self.spec.group_best, grouped.shape[-1]), dim=-1)
                .values.sum(-1)
                .topk(kept, dim=-1)
                .indices
            )
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores_BSE = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        return scores_BSE.topk(self.spec.top_k, dim=-1).indices

    def _balance_loss(self, scores_BSE: Tensor, indices_BSK: Tensor) -> Tensor:
        """Return a scalar: the number of tokens, times the sum over experts of (fraction of choices) x (mean normalised
        score)."""
        visits_BSE = torch.zeros_like(scores_BSE).scatter_(-1, indices_BSK, 1.0)
        counts_BE = self.sum_over_sequence(visits_BSE.sum(1))
        tokens = counts_BE.sum(-1, keepdim=True) / self.spec.top_k
        frequency_BE = counts_BE * self.spec.num_experts / (self.spec.top_k * tokens)
        summed_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).sum(1)
        return (frequency_BE * summed_BE).sum() * self.spec.balance_loss * self.loss_scale

    def _within_capacity(self, indices_BSK: Tensor, weights_BSK: Tensor) -> tuple[Tensor, Tensor]:
        """Limit the tokens per expert and sequence, keeping the highest weights. Dropped choices get the index
        `num_experts` and weight 0."""
        experts = self.spec.num_experts
        factor = self.spec.capacity_factor or 0.0
        choices_BM = indices_BSK.flatten(1)
        weights_BM = weights_BSK.flatten(1)
        capacity = math.ceil(factor * choices_BM.shape[1] / experts)
        by_weight = weights_BM.detach().argsort(dim=1, descending=True, stable=True)
        by_expert = by_weight.gather(1, choices_BM.gather(1, by_weight).argsort(dim=1, stable=True))
        sorted_BM = choices_BM.gather(1, by_expert)
        first_BM = torch.searchsorted(sorted_BM, sorted_BM)
        rank_BM = torch.arange(sorted_BM.shape[1], device=sorted_BM.device) - first_BM
        kept_BM = torch.empty_like(choices_BM, dtype=torch.bool).scatter_(1, by_expert, rank_BM < capacity)
        kept = kept_BM.view_as(indices_BSK)
        return indices_BSK.where(kept, experts), weights_BSK.where(kept, 0.0)

    @torch.no_grad()
    def update_balance(self, counts_E: Tensor) -> None:
        """Adjust the bias after a step, using the counts of the global batch, and reset the counter.

        With recomputation, tokens are counted twice, which does not change the order of the experts.
        """
        if self.balance_bias_E is not None:
            counts_E = counts_E.float()
            self.balance_bias_E += self.spec.balance_rate * torch.sign(counts_E.mean() - counts_E)
        self.tokens_per_expert_E.zero_()


class _WithLoss(torch.autograd.Function):
    """Returns x unchanged; the backward pass adds the gradient of the balancing loss."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, _loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dx, dx.new_ones(())


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts chosen by the router (arXiv:1701.06538) and to every shared expert.

    `dispatch` sends tokens to experts and back; expert parallelism replaces it.
    """

    def __init__(self, model: DecoderModel):
        super().__init__()
        assert model.experts is not None
        spec = model.experts
        self.router = Router(model.hidden_size, spec)
        self.experts = Experts(model)
        self.dispatch: Callable[..., Tensor] = dispatch_here
        self.shared: FeedForward | None = None
        if spec.shared_experts:
            width = spec.shared_experts * (spec.shared_expert_ffn_size or spec.expert_ffn_size)
            self.shared = FeedForward(model.hidden_size, width, gated=model.gated_mlp, activation=model.activation)
        self.shared_gate = nn.Parameter(torch.empty(1, model.hidden_size)) if spec.shared_gate else None

    def forward(self, x_BSD: Tensor) -> Tensor:
        indices_BSK, weights_BSK = self.router(x_BSD)
        routed = self.dispatch(x_BSD.flatten(0, 1), indices_BSK.flatten(0, 1), weights_BSK.flatten(0, 1), self.experts)
        y_BSD = routed.view_as(x_BSD)
        if self.shared is None:
            return y_BSD
        shared_BSD = self.shared(x_BSD)
        if self.shared_gate is not None:
            shared_BSD = shared_BSD * F.linear(x_BSD, self.shared_gate).sigmoid()
        return y_BSD + shared_BSD
