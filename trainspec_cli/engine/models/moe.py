"""Mixture of experts instead of the feed-forward: router, routed experts, shared experts.

Shapes: B samples, S tokens per sample, D hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.experts import Experts, LocalDispatch
from trainspec_cli.engine.models.feed_forward import FeedForward
from trainspec_cli.engine.models.router import Router
from trainspec_cli.spec.recipe.model import DecoderModel


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
