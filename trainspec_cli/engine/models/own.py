"""User-defined blocks (`model.block=FILE.py:make`) between the engine's embedding and its final norm and head, and a
user-defined loss (`train.loss=FILE.py:NAME`) instead of cross-entropy.

A block's code initialises the block's parameters, on a CPU and with a separate seed for each block, so their values
depend neither on the layout nor on the devices. A loss function returns the loss of each token, computed only from that
token's logits and target, and the engine computes the mean, so the result is the same in every layout.

Shapes: T tokens, D hidden size, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.engine.models.language_model import LanguageModel
from trainspec_cli.engine.models.layers import precise
from trainspec_cli.engine.own_code import is_no_fault, refused
from trainspec_cli.recipe.keys.model import OwnModel, loss_chunk_tokens
from trainspec_cli.recipe.user_code import BLOCK, arguments, came_through_user_code, load, user_code_errors

PREFIX = "blocks."


class OwnLanguageModel(LanguageModel):
    """A language model with user-defined blocks."""

    writes_per_layer: ClassVar[int] = 1

    def __init__(self, model: OwnModel, _seq_len: int, layers: range | None):
        maker = BlockMaker(model)
        super().__init__(model, layers, maker.make)
        self.maker = maker
        self._whole: tuple[tuple[int, int], nn.Module] | None = None
        """The most recently initialised block, with its layer and seed."""

    def forward(self, *inputs: Tensor | None, **named: Tensor | None) -> Tensor:
        with user_code_errors(
            self.maker.extension,
            "in a step",
            passes=lambda error: is_no_fault(error) or not came_through_user_code(error),
        ):
            return super().forward(*inputs, **named)  # type: ignore[arg-type]

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """A user-defined block's parameters get the values from its code; all others are initialised as in any language
        model."""
        if not name.startswith(PREFIX):
            super().init_parameter(name, full, generator)
            return
        layer, _, inside = name.removeprefix(PREFIX).partition(".")
        full.copy_(self._with_values(int(layer)).get_parameter(inside))

    def init_buffers(self) -> None:
        for layer, block in self.blocks.items():
            for name, buffer in block.named_buffers():
                buffer.copy_(self._with_values(int(layer)).get_buffer(name))
        self._whole = None

    def _with_values(self, layer: int) -> nn.Module:
        """Return a layer's block with its initial values. Only one block at a time is kept."""
        if self._whole is None or self._whole[0] != (layer, self.seed):
            self._whole = None
            self._whole = (layer, self.seed), self.maker.make_with_values(layer, self.seed)
        return self._whole[1]


class BlockMaker:
    """Calls the recipe's function that creates blocks, and checks the result. Raises RecipeError."""

    def __init__(self, model: OwnModel):
        (self.extension,) = BLOCK.named(model.block, model.options)
        self.model = model
        self._call = load(self.extension)

    def make(self, layer: int) -> nn.Module:
        """Return the block of a layer, on torch's default device."""
        with user_code_errors(self.extension, f"when the block of layer {layer} was created", RecipeError):
            block = self._call(self.model.hidden_size, layer, **arguments(self.model.options))
        if not isinstance(block, nn.Module):
            what = f"returned {type(block).__name__}; expected a torch.nn.Module"
            raise refused(self.extension, what, code="wrong_type")
        for message, hint in _faults(block):
            raise refused(self.extension, f"returned a block whose {message}", hint)
        found = sum(parameter.numel() for parameter in block.parameters())
        if self.model.block_params not in (None, found):  # None while the block is created only to count its parameters
            path = "model.block_params"
            message = f"`{path}` is {self.model.block_params}, but {self.extension.text} creates layer {layer} with"
            message += f" {found} parameters"
            raise RecipeError(
                Problem("contradiction", message, path, f"set {path}={found}; every layer must have the same number")
            )
        return block

    def make_with_values(self, layer: int, seed: int) -> nn.Module:
        """Return the block of a layer on the CPU, with values that depend only on seed and layer."""
        digest = hashlib.sha256(f"{seed}/{PREFIX}{layer}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            return self.make(layer)


def _faults(block: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the parts of a block that cannot be sharded, saved or moved, with a remedy for each."""
    names = dict(block.named_parameters(remove_duplicate=False))
    if len(names) != len(list(block.parameters())):
        yield "parameters include the same tensor under two names", "use a separate parameter in each place"
    for name, parameter in names.items():
        if parameter.dtype != torch.float32:
            yield (
                f"parameter `{name}` is {parameter.dtype}",
                "make it torch.float32: precision.compute sets the compute format",
            )
        elif not parameter.dim():
            yield f"parameter `{name}` has no dimension and cannot be sharded", "use the shape (1,)"
        elif not parameter.requires_grad:
            yield f"parameter `{name}` is not trained", "make it a buffer: self.register_buffer(...)"
    for place, module in block.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                path = f"{place}.{name}".lstrip(".")
                yield (
                    f"attribute `{path}` is a tensor that is neither parameter nor buffer",
                    f"self.register_buffer({name!r}, ...)",
                )


LossOfTokens = Callable[[Tensor, Tensor], Tensor]
"""Maps (logits (T, V), targets (T,)) to each token's loss, (T,)."""


class OwnLinearLoss(LinearCrossEntropy):
    """Returns the summed user-defined loss if gradients are computed; evaluation uses cross-entropy. Logits exist for
    one chunk of tokens at a time, and are recomputed in the backward pass."""

    def __init__(self, loss: LossOfTokens):
        super().__init__()
        self.own = loss

    def forward(self, x_BSD: Tensor, weight_VD: Tensor, targets_BS: Tensor | None) -> Tensor:
        if targets_BS is None or not torch.is_grad_enabled():
            return super().forward(x_BSD, weight_VD, targets_BS)
        x_TD = x_BSD.flatten(0, -2)
        targets_T = targets_BS.flatten()
        if not len(targets_T):  # a rank whose samples are used up takes part with empty batches
            return F.linear(x_TD, weight_VD).sum()
        step = loss_chunk_tokens(weight_VD.shape[0])
        total = x_TD.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets_T), step):
            chunk = x_TD[start : start + step], weight_VD, targets_T[start : start + step]
            total = total + checkpoint(self._sum_chunk, *chunk, use_reentrant=False, preserve_rng_state=False)
        return total

    def _sum_chunk(self, x_CD: Tensor, weight_VD: Tensor, targets_C: Tensor) -> Tensor:
        """Sum the losses of one chunk. Tokens without a target do not count."""
        loss_C = self.own(precise(F.linear(x_CD, weight_VD)), targets_C.clamp_min(0))
        return torch.where(targets_C != IGNORED_TARGET, loss_C, 0.0).sum()


build = OwnLanguageModel
