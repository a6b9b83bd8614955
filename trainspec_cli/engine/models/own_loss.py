"""A loss of one's own (`train.loss=FILE.py:NAME`) in the place of cross-entropy, called as `loss(logits, targets)`.

It gives each token's loss, from that token's logits and target alone, and the engine takes the mean: so it is the same
in every layout. Logits exist one chunk of tokens at a time, and once more in the backward.

Shapes: T tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.engine.models.norm import precise
from trainspec_cli.engine.own_code import has_values, is_no_fault, refused
from trainspec_cli.recipe.extensions.load import arguments, load, own_errors
from trainspec_cli.recipe.extensions.source import Extension
from trainspec_cli.recipe.keys.model import loss_chunk_tokens

TRIAL_TOKENS = 6
AGREEMENT = 1e-5
"""The relative difference to which tokens' losses have to agree with those of some of the tokens alone."""

LossOfTokens = Callable[[Tensor, Tensor], Tensor]


class OwnLinearLoss(LinearCrossEntropy):
    """Returns the summed loss of one's own where gradients are computed; an evaluation has cross-entropy."""

    def __init__(self, loss: LossOfTokens):
        super().__init__()
        self.own = loss

    def forward(self, x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor | None) -> Tensor:
        if targets_BS is None or not torch.is_grad_enabled():
            return super().forward(x_BSD, weight_VD, targets_BS)
        x_TD = x_BSD.flatten(0, -2)
        targets_T = targets_BS.flatten()
        if not len(targets_T):  # a rank whose share of the samples is used up takes part with none
            return F.linear(x_TD, weight_VD).sum()
        step = loss_chunk_tokens(weight_VD.shape[0])
        total = x_TD.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets_T), step):
            chunk = x_TD[start : start + step], weight_VD, targets_T[start : start + step]
            total = total + checkpoint(self._sum_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total

    def _sum_chunk(self, x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> Tensor:
        """Sum one chunk's losses; tokens without a target count nothing."""
        loss_C = self.own(precise(F.linear(x_CD, weight_VD)), targets_C.clamp_min(0))
        return torch.where(targets_C != IGNORED_TARGET, loss_C, 0.0).sum()


def load_loss(
    extension: Extension, options: Mapping[str, object], vocab_size: int, device: torch.device
) -> LossOfTokens:
    """Import a loss, and try it on a few tokens. Raises RecipeError for code that is wrong, or whose tokens depend on
    one another."""
    call = load(extension)
    given = arguments(options)

    def loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        with own_errors(extension, "in a step", passes=is_no_fault):
            return call(logits_TV, targets_T, **given)  # type: ignore[no-any-return]

    if has_values():
        _try_out(extension, lambda logits, targets: call(logits, targets, **given), vocab_size, device)
    return loss


def _try_out(extension: Extension, loss: LossOfTokens, vocab_size: int, device: torch.device) -> None:
    """Call the loss on random logits of a few tokens, together and in parts. Raises RecipeError."""
    generator = torch.Generator().manual_seed(0)
    logits_TV = torch.randn((TRIAL_TOKENS, vocab_size), generator=generator).to(device).requires_grad_()
    targets_T = torch.randint(vocab_size, (TRIAL_TOKENS,), generator=generator).to(device)
    with own_errors(extension, "on random logits before the run", RecipeError):
        whole_T: object = loss(logits_TV, targets_T)
        got = type(whole_T).__name__
        if isinstance(whole_T, Tensor):
            has_form = whole_T.shape == (TRIAL_TOKENS,)
            got = "a tensor without a gradient" if has_form else f"a tensor of shape {tuple(whole_T.shape)}"
        if not isinstance(whole_T, Tensor) or not has_form or not whole_T.requires_grad:
            what = f"returned {got} for {TRIAL_TOKENS} tokens; their losses are needed, of shape ({TRIAL_TOKENS},)"
            hint = "return each token's loss (reduction='none'); the engine takes the mean"
            raise refused(extension, what, hint)
        parts_T = torch.cat([loss(logits_TV[part], targets_T[part]) for part in (slice(1), slice(1, None))])
        (gradient_TV,) = torch.autograd.grad(whole_T.sum(), logits_TV)
    if not torch.allclose(whole_T, parts_T, rtol=AGREEMENT, atol=AGREEMENT):
        what = "gives a token another loss beside other tokens than alone"
        raise refused(extension, what, "take logits[i] and targets[i] alone into loss i; the engine takes the mean")
    if not gradient_TV.isfinite().all():
        raise refused(extension, "has a gradient that is not finite", "see how it treats small probabilities")
