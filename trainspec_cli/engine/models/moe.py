"""Mixture of experts instead of the feed-forward: router, with the balancing of experts; routed and shared experts.

Shapes: B samples, S tokens per sample, D hidden size, E experts, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.experts import Experts, LocalDispatch, count_experts
from trainspec_cli.engine.models.feed_forward import FeedForward
from trainspec_cli.engine.models.norm import precise
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec

SCORES: dict[str, Callable[[Tensor], Tensor]] = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}


class Router(nn.Module):
    """Scores every expert and chooses the best.

    Balancing without a loss (arXiv:2408.15664): `balance_bias_E` is added to the scores only for the choice;
    `update_balance` moves it after a step. Balancing by a loss (DeepSeek-V3, arXiv:2412.19437, eq. 17-20, of the
    experts as chosen): its gradient is added in the backward. A sequence's loss is weighted by its number of tokens, so
    that with `loss_scale` = 1 / global tokens the coefficient is that of the mean over tokens.
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
        bias = torch.empty(experts.num_experts, dtype=torch.float32) if experts.balance_rate else None
        self.register_buffer("balance_bias_E", bias)
        counter = torch.empty(experts.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert_E", counter, persistent=False)
        self.register_buffer("loss_scale", torch.empty((), dtype=torch.float32), persistent=False)
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda counts_BE: counts_BE
        """Turns counts of this rank's part of each sequence into those of the whole sequence."""

    def init_buffers(self) -> None:
        self.tokens_per_expert_E.zero_()
        self.loss_scale.fill_(1.0)
        if self.balance_bias_E is not None:
            self.balance_bias_E.zero_()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return (experts (B, S, K) int64, E for a dropped choice; their weights (B, S, K), fp32 at least)."""
        logits_BSE = F.linear(x_BSD, self.weight, self.bias)
        scores_BSE = self.score(precise(logits_BSE))
        indices_BSK = self._choose(scores_BSE.detach())
        weights_BSK = scores_BSE.gather(-1, indices_BSK)
        if self.spec.normalise_weights:
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
        """Choose the K best experts; with groups, from the best groups alone (DeepSeek-V3's node-limited routing)."""
        if self.balance_bias_E is not None:
            scores_BSE = scores_BSE + self.balance_bias_E
        groups = self.spec.num_groups
        kept = self.spec.top_groups
        if kept < groups:
            grouped = scores_BSE.unflatten(-1, (groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(kept, dim=-1).indices
            outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            scores_BSE = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
        return scores_BSE.topk(self.spec.top_k, dim=-1).indices

    def _balance_loss(self, scores_BSE: Tensor, indices_BSK: Tensor) -> Tensor:
        """Return tokens x sum over experts of (share of choices) x (mean of normalised scores), a scalar."""
        visits_BSE = torch.zeros_like(scores_BSE).scatter_(-1, indices_BSK, 1.0)
        counts_BE = self.sum_over_sequence(visits_BSE.sum(1))
        tokens = counts_BE.sum(-1, keepdim=True) / self.spec.top_k
        frequency_BE = counts_BE * self.spec.num_experts / (self.spec.top_k * tokens)
        summed_BE = (scores_BSE / scores_BSE.sum(-1, keepdim=True)).sum(1)
        return (frequency_BE * summed_BE).sum() * self.spec.balance_loss * self.loss_scale

    def _within_capacity(self, indices_BSK: Tensor, weights_BSK: Tensor) -> tuple[Tensor, Tensor]:
        """Keep each expert's highest weights of a sequence; the others become `num_experts` with weight 0."""
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
        """Move the bias after a step, by the counts of the global batch, and reset the counter.

        Recomputed forwards count twice, which changes no order.
        """
        if self.balance_bias_E is not None:
            counts_E = counts_E.float()
            self.balance_bias_E += self.spec.balance_rate * torch.sign(counts_E.mean() - counts_E)
        self.tokens_per_expert_E.zero_()


class _WithLoss(torch.autograd.Function):
    """Returns x unchanged; in the backward, the loss is minimised too."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, _loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return dx, dx.new_ones(())


class MixtureOfExperts(nn.Module):
    """Sends each token to the experts that the router chooses for it (arXiv:1701.06538) and to every shared one.

    `dispatch` moves tokens to experts and back; expert parallelism replaces it.
    """

    def __init__(self, model: DecoderModel):
        super().__init__()
        assert model.experts is not None
        spec = model.experts
        self.router = Router(model.hidden_size, spec)
        self.experts = Experts(model)
        self.dispatch: nn.Module = LocalDispatch()
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
