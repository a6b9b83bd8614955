"""A block and a loss of one's own in a run: tried on small inputs before the first step, not believed.

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
from trainspec_cli.engine.models.own_loss import OwnLinearLoss, load_loss
from trainspec_cli.engine.own_code import has_values
from trainspec_cli.engine.parallel.expert import apply_recompute
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.keys.run import Recompute
from trainspec_cli.recipe.own_code import LOSS, own_errors
from trainspec_cli.recipe.results.plan import Plan

TRIAL_TOKENS = 32
AGREEMENT = {torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The difference, relative to the largest value, to which outputs that have to be equal agree."""
AGREEMENT_ELSE = 1e-4


def use_own_loss(part: Any, plan: Plan, device: torch.device) -> None:
    """Put the recipe's loss into the stage that has one. Raises RecipeError for a loss that cannot be trained with."""
    for extension in LOSS.named(plan.spec.train.loss, plan.spec.train.loss_options):
        if part.loss is not None:
            options = plan.spec.train.loss_options
            vocab_size = plan.spec.model.vocab_size  # type: ignore[union-attr]
            part.loss = OwnLinearLoss(load_loss(extension, options, vocab_size, device))


def try_own_block(plan: Plan, layer: int, compute: torch.dtype, device: torch.device) -> None:
    """Try the block of a layer, where blocks are the user's own. Raises RecipeError for what cannot be trained with."""
    if isinstance(plan.spec.model, OwnModel) and has_values():
        length = min(plan.spec.data.seq_len, TRIAL_TOKENS)
        _Trial(BlockMaker(plan.spec.model), layer, plan.spec.train.seed, compute, device, length).run(plan.recompute)


class _Trial:
    """Forwards and backwards of one block in the run's format on its device."""

    def __init__(
        self, maker: BlockMaker, layer: int, seed: int, compute: torch.dtype, device: torch.device, length: int
    ):
        self.maker, self.tolerance = maker, AGREEMENT.get(compute, AGREEMENT_ELSE)
        self.block = maker.make_with_values(layer, seed).to(device)
        for parameter in self.block.parameters():
            parameter.data = parameter.data.to(compute)
        self._generator = torch.Generator().manual_seed(0)
        self._form = (2, length, maker.model.hidden_size), compute, device

    def run(self, recompute: Recompute) -> None:
        x_BSD = self._draw()
        y_BSD = self._forward(x_BSD)
        self._check_form(x_BSD, y_BSD)
        self._check_form(x_BSD[:0], self._forward(x_BSD[:0]))
        buffers = [buffer.clone() for buffer in self.block.buffers()]
        if not self._agree(y_BSD, self._forward(x_BSD)):
            raise self.maker.refuse("gives another output at each call", "leave dropout and other random numbers out")
        if any(not torch.equal(*pair) for pair in zip(buffers, self.block.buffers(), strict=True)):
            raise self.maker.refuse("changes a buffer in its forward", "a block may keep nothing from step to step")
        self._check_reach(x_BSD, y_BSD)
        self._check_backward(x_BSD, recompute)

    def _draw(self) -> Tensor:
        shape, dtype, device = self._form
        return torch.randn(shape, generator=self._generator).to(device, dtype)

    def _forward(self, x_BSD: Tensor) -> Any:
        with own_errors(self.maker.extension, "on random input before the run", RecipeError):
            return self.block(x_BSD)

    def _agree(self, one: Tensor, other: Tensor) -> bool:
        scale = max(1.0, float(one.detach().abs().max()))
        return torch.allclose(one, other, rtol=0.0, atol=self.tolerance * scale)

    def _check_form(self, x_BSD: Tensor, y_BSD: object) -> None:
        wanted = f"{x_BSD.dtype} of shape {tuple(x_BSD.shape)}"
        got = f"{y_BSD.dtype} of shape {tuple(y_BSD.shape)}" if isinstance(y_BSD, Tensor) else type(y_BSD).__name__
        if got != wanted:
            hint = "a block maps (samples, tokens, hidden) to the same; cast to x.dtype what was computed in another"
            raise self.maker.refuse(f"maps {wanted} to {got}", hint)
        if isinstance(y_BSD, Tensor) and not y_BSD.isfinite().all():
            raise self.maker.refuse("gives values that are not finite for random input", "look at its first values")

    def _check_reach(self, x_BSD: Tensor, y_BSD: Tensor) -> None:
        """A token's output depends on its own sample alone, and there on no later token."""
        half = x_BSD.shape[1] // 2
        other_BSD = self._draw()
        later_BSD = torch.cat((x_BSD[:, :half], other_BSD[:, half:]), dim=1)
        if half and not self._agree(y_BSD[:, :half], self._forward(later_BSD)[:, :half]):
            hint = "it predicts the next token: let it see the token itself and those before alone"
            raise self.maker.refuse("lets a token see later ones", hint)
        if not self._agree(y_BSD[:1], self._forward(torch.cat((x_BSD[:1], other_BSD[1:])))[:1]):
            hint = "layouts spread samples over ranks: take no statistics over the first dim"
            raise self.maker.refuse("mixes the samples of a batch", hint)

    def _check_backward(self, x_BSD: Tensor, recompute: Recompute) -> None:
        gradients = self._gradients(x_BSD)
        unused = next((name for name, gradient in gradients.items() if gradient is None), None)
        if unused is not None:
            raise self.maker.refuse(f"does not use `{unused}`", "leave out what has no gradient")
        if recompute == "none":
            return
        apply_recompute([self.block], recompute)
        again = self._gradients(x_BSD)
        if not all(self._agree(gradients[name], again[name]) for name in gradients):  # type: ignore[arg-type]
            what = f"has another gradient with recompute={recompute}"
            raise self.maker.refuse(what, "change no result of a matrix product in place, or type recompute=full")

    def _gradients(self, x_BSD: Tensor) -> dict[str, Tensor | None]:
        entering = x_BSD.clone().requires_grad_()
        wanted: dict[str, Tensor | nn.Parameter] = {**dict(self.block.named_parameters()), "its input": entering}
        leaving = self._forward(entering)
        with own_errors(self.maker.extension, "in a backward before the run", RecipeError):
            weights = torch.linspace(-1.0, 1.0, leaving.shape[-1], device=leaving.device, dtype=leaving.dtype)
            found = torch.autograd.grad((leaving * weights).sum(), list(wanted.values()), allow_unused=True)
        return dict(zip(wanted, found, strict=True))
