"""Activations that are computed again in the backward instead of being kept (arXiv:1604.06174).

`full` keeps a block's input alone. `selective` keeps what matrix products and attention computed and repeats the cheap
rest: norms, rotations, activation functions, casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainspec_cli.spec.run import Recompute

_aten = torch.ops.aten
COSTLY = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.convolution.default,
        _aten._grouped_mm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations whose results `selective` keeps."""


def apply_recompute(blocks: Sequence[nn.Module], recompute: Recompute) -> None:
    """Change the blocks' forwards in place; names of parameters stay as they are."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_costly)
    for block in blocks:
        block.forward = _recomputed(block.forward, options)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, **options)

    return recomputed


def _keep_costly(_context: Any, operation: Any, *_inputs: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
