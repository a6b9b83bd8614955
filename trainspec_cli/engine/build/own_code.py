"""User-defined blocks and losses in a run, which are tested on small inputs before the first step.

The engine shards, recomputes and resumes blocks, and distributes samples over ranks. So a block has to be causal and
may depend only on its input, sample by sample. Each token's loss may depend only on that token.

Shapes: B samples, S tokens per sample, D hidden size, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.models.own import BlockMaker, LossOfTokens
from trainspec_cli.engine.own_code import has_values, is_no_fault, refused
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.user_code import Extension, arguments, load, user_code_errors

TRIAL_TOKENS = 32
AGREEMENT = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Maximum difference between outputs that should be equal, relative to the largest value."""
AGREEMENT_ELSE = 1e-4
LOSS_TRIAL_TOKENS = 6
LOSS_AGREEMENT = 1e-5
"""Maximum relative difference between the losses of tokens that are computed together and separately."""


def try_own_block(plan: Plan, layer: int, compute: torch.dtype, device: torch.device) -> None:
    """If blocks are user-defined, test the block of a layer in the run's format on its device. Raises RecipeError for a
    block that cannot be trained."""
    if not isinstance(plan.spec.model, OwnModel) or not has_values():
        return
    maker = BlockMaker(plan.spec.model)
    tolerance = AGREEMENT.get(compute, AGREEMENT_ELSE)
    generator = torch.Generator().manual_seed(0)
    block = maker.make_with_values(layer, plan.spec.train.seed).to(device)
    for parameter in block.parameters():
        parameter.data = parameter.data.to(compute)
    length = min(plan.spec.data.seq_len, TRIAL_TOKENS)

    def draw() -> Tensor:
        return torch.randn((2, length, maker.model.hidden_size), generator=generator).to(device, compute)

    def forward(x_BSD: Tensor) -> Any:
        with user_code_errors(maker.extension, "on random input before the run", RecipeError):
            return block(x_BSD)

    def agree(one: Tensor, other: Tensor) -> bool:
        scale = max(1.0, float(one.detach().abs().max()))
        return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale)

    def gradients() -> dict[str, Tensor | None]:
        entering = x_BSD.clone().requires_grad_()
        wanted: dict[str, Tensor | nn.Parameter] = {**dict(block.named_parameters()), "its input": entering}
        leaving = forward(entering)
        with user_code_errors(maker.extension, "in a backward before the run", RecipeError):
            weights = torch.linspace(-1.0, 1.0, leaving.shape[-1], device=leaving.device, dtype=leaving.dtype)
            found = torch.autograd.grad((leaving * weights).sum(), list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    # Check the shape of the output, also without samples, as on a rank whose samples are used up.
    x_BSD = draw()
    y_BSD = forward(x_BSD)
    for given in (x_BSD, x_BSD[:0]):
        got = y_BSD if given is x_BSD else forward(given)
        form = f"{given.dtype} of shape {tuple(given.shape)}"
        other = f"{got.dtype} of shape {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
        if other != form:
            hint = "a block maps (samples, tokens, hidden) to the same; cast to x.dtype what was computed in another"
            raise refused(maker.extension, f"maps {form} to {other}", hint)
        if not got.isfinite().all():
            hint = "check its initial values"
            raise refused(maker.extension, "gives values that are not finite for random input", hint)
    buffers = [buffer.clone() for buffer in block.buffers()]
    if not agree(y_BSD, forward(x_BSD)):
        hint = "remove dropout and other random numbers"
        raise refused(maker.extension, "returns a different output at each call", hint)
    if any(not torch.equal(*pair) for pair in zip(buffers, block.buffers(), strict=True)):
        hint = "a block must not keep state from step to step"
        raise refused(maker.extension, "changes a buffer in its forward", hint)

    # Check the dependencies: a token's output depends only on its sample, and not on later tokens.
    half = length // 2
    other_BSD = draw()
    later_BSD = torch.cat((x_BSD[:, :half], other_BSD[:, half:]), dim=1)
    if half and not agree(y_BSD[:, :half], forward(later_BSD)[:, :half]):
        hint = "the model predicts the next token: let a token see only itself and earlier ones"
        raise refused(maker.extension, "lets a token see later ones", hint)
    if not agree(y_BSD[:1], forward(torch.cat((x_BSD[:1], other_BSD[1:])))[:1]):
        hint = "layouts spread samples over ranks: compute no statistics over the first dim"
        raise refused(maker.extension, "mixes the samples of a batch", hint)

    # Check the backward pass: every parameter has a gradient, which is the same if the forward pass is recomputed.
    plain = gradients()
    unused = next((name for name, gradient in plain.items() if gradient is None), None)
    if unused is not None:
        raise refused(maker.extension, f"does not use `{unused}`", "remove parameters without a gradient")
    if plan.recompute == "none":
        return
    apply_recompute([block], plan.recompute)
    again = gradients()
    if not all(agree(plain[name], again[name]) for name in plain):  # type: ignore[arg-type]
        hint = "change no result of a matrix product in place, or set recompute=full"
        raise refused(maker.extension, f"has a different gradient with recompute={plan.recompute}", hint)


def load_loss(
    extension: Extension, options: Mapping[str, object], vocab_size: int, device: torch.device
) -> LossOfTokens:
    """Import a loss, and test it on a few tokens. Raises RecipeError if the code is wrong or the losses of different
    tokens depend on one another."""
    call = partial(load(extension), **arguments(options))

    def loss(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        with user_code_errors(extension, "in a step", passes=is_no_fault):
            return call(logits_TV, targets_T)  # type: ignore[no-any-return]

    if not has_values():
        return loss
    generator = torch.Generator().manual_seed(0)
    tokens = LOSS_TRIAL_TOKENS
    logits_TV = torch.randn((tokens, vocab_size), generator=generator).to(device).requires_grad_()
    targets_T = torch.randint(vocab_size, (tokens,), generator=generator).to(device)
    with user_code_errors(extension, "on random logits before the run", RecipeError):
        whole_T = call(logits_TV, targets_T)
        got = type(whole_T).__name__
        has_form = isinstance(whole_T, Tensor) and whole_T.shape == (tokens,)
        if isinstance(whole_T, Tensor):
            got = "a tensor without a gradient" if has_form else f"a tensor of shape {tuple(whole_T.shape)}"
        if not has_form or not whole_T.requires_grad:
            what = f"returned {got} for {tokens} tokens; expected their losses, of shape ({tokens},)"
            hint = "return each token's loss (reduction='none'); the engine computes the mean"
            raise refused(extension, what, hint)
        parts_T = torch.cat([call(logits_TV[part], targets_T[part]) for part in (slice(1), slice(1, None))])
        (gradient_TV,) = torch.autograd.grad(whole_T.sum(), logits_TV)
    if not torch.allclose(whole_T, parts_T, rtol=LOSS_AGREEMENT, atol=LOSS_AGREEMENT):
        what = "gives a token a different loss with other tokens than alone"
        raise refused(
            extension, what, "compute loss i from logits[i] and targets[i] alone; the engine computes the mean"
        )
    if not gradient_TV.isfinite().all():
        raise refused(extension, "has a gradient that is not finite", "check how it handles small probabilities")
    return loss
