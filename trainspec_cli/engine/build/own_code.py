"""A user-defined block in a run: tried on small inputs before the first step, not believed.

The engine shards, recomputes and resumes blocks, and spreads samples over ranks; so a block has to be a function of its
input alone, sample by sample, and causal.

Shapes: B samples, S tokens per sample, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.models.own import BlockMaker
from trainspec_cli.engine.own_code import has_values, refused
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.recipe.extensions.load import own_errors
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.results.plan import Plan

TRIAL_TOKENS = 32
AGREEMENT = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The difference, relative to the largest value, to which outputs that have to be equal agree."""
AGREEMENT_ELSE = 1e-4


def try_own_block(plan: Plan, layer: int, compute: torch.dtype, device: torch.device) -> None:
    """Try the block of a layer, where blocks are the user's own, in the run's format on its device. Raises RecipeError
    for what cannot be trained with."""
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
        with own_errors(maker.extension, "on random input before the run", RecipeError):
            return block(x_BSD)

    def agree(one: Tensor, other: Tensor) -> bool:
        scale = max(1.0, float(one.detach().abs().max()))
        return torch.allclose(one, other, rtol=0.0, atol=tolerance * scale)

    def gradients() -> dict[str, Tensor | None]:
        entering = x_BSD.clone().requires_grad_()
        wanted: dict[str, Tensor | nn.Parameter] = {**dict(block.named_parameters()), "its input": entering}
        leaving = forward(entering)
        with own_errors(maker.extension, "in a backward before the run", RecipeError):
            weights = torch.linspace(-1.0, 1.0, leaving.shape[-1], device=leaving.device, dtype=leaving.dtype)
            found = torch.autograd.grad((leaving * weights).sum(), list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    # Its form: also that of no samples, which a rank whose share is used up takes part with.
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
            hint = "look at its first values"
            raise refused(maker.extension, "gives values that are not finite for random input", hint)
    buffers = [buffer.clone() for buffer in block.buffers()]
    if not agree(y_BSD, forward(x_BSD)):
        hint = "leave dropout and other random numbers out"
        raise refused(maker.extension, "gives another output at each call", hint)
    if any(not torch.equal(*pair) for pair in zip(buffers, block.buffers(), strict=True)):
        hint = "a block may keep nothing from step to step"
        raise refused(maker.extension, "changes a buffer in its forward", hint)

    # Its reach: a token's output depends on its own sample alone, and there on no later token.
    half = length // 2
    other_BSD = draw()
    later_BSD = torch.cat((x_BSD[:, :half], other_BSD[:, half:]), dim=1)
    if half and not agree(y_BSD[:, :half], forward(later_BSD)[:, :half]):
        hint = "it predicts the next token: let it see the token itself and those before alone"
        raise refused(maker.extension, "lets a token see later ones", hint)
    if not agree(y_BSD[:1], forward(torch.cat((x_BSD[:1], other_BSD[1:])))[:1]):
        hint = "layouts spread samples over ranks: take no statistics over the first dim"
        raise refused(maker.extension, "mixes the samples of a batch", hint)

    # Its backward: every parameter has a gradient, the same where the forward is computed again.
    plain = gradients()
    unused = next((name for name, gradient in plain.items() if gradient is None), None)
    if unused is not None:
        raise refused(maker.extension, f"does not use `{unused}`", "leave out what has no gradient")
    if plan.recompute == "none":
        return
    apply_recompute([block], plan.recompute)
    again = gradients()
    if not all(agree(plain[name], again[name]) for name in plain):  # type: ignore[arg-type]
        hint = "change no result of a matrix product in place, or type recompute=full"
        raise refused(maker.extension, f"has another gradient with recompute={plan.recompute}", hint)
