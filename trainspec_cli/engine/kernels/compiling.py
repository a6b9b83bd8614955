"""Functions that torch.compile has fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def compiled_in_training(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for each shape by itself, so that a step's digits do not depend on what was computed before it; plain
    where no gradients are wanted: evaluation meets shapes of its own, and each would be compiled."""
    fused = torch.compile(function, dynamic=False)

    @wraps(function)
    def call(*inputs: Any) -> Any:
        return fused(*inputs) if torch.is_grad_enabled() else function(*inputs)

    return call
