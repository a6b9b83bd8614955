"""Fuse functions by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def compiled_in_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for each shape separately, so that results do not depend on earlier shapes.

    Without gradients the plain function is called: evaluation has its own shapes, and each would be compiled.
    """
    fused = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*inputs: Any) -> Any:
        return fused(*inputs) if torch.is_grad_enabled() else function(*inputs)

    return call
