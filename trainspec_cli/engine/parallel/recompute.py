"""Activations that are computed again in the backward instead of being kept (arXiv:1604.06174).

`full` keeps a block's input alone. `selective` keeps what matrix products and attention computed and repeats the cheap
rest: norms, rotations, activation functions, casts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from trainspec_cli.recipe.keys.run import Recompute

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


def apply_recompute(blocks: Sequence[nn.Module], recompute: Recompute, *, compiled: bool = False) -> None:
    """Change the blocks' forwards in place; names of parameters stay as they are."""
    if recompute == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy) if compiled else _keep_and_recall
    for block in blocks:
        forward = block.forward
        if compiled and recompute == "full":
            # A compiler leaves the whole of a checkpoint alone whose inside it cannot take in one graph: with tp, ep
            # or a split backward. Then it compiles the parts inside; else it takes both at once, as without this.
            forward = torch.compile(forward)
        block.forward = _recomputed(forward, options)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, **options)

    return recomputed


def _keep_and_recall() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """torch's own contexts want every operation to come again, which those of FSDP2's hooks inside a block do not."""
    kept: deque[Any] = deque()
    return _Keep(kept), _Recall(kept)


class _Keep(TorchDispatchMode):
    """Around the first pass."""

    def __init__(self, kept: deque[Any]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self.kept.append(tree_map_only(Tensor, Tensor.detach, result))
        return result


class _Recall(TorchDispatchMode):
    """Around the second: costly operations come in the same order, and their results are at hand."""

    def __init__(self, kept: deque[Any]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kept.popleft() if func in COSTLY else func(*args, **(kwargs or {}))


def _policy(_context: Any, operation: Any, *_inputs: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE
