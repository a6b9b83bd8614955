"""AdamW (arXiv:1711.05101) as the engine does it by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def fused(groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    """One kernel for all parameters, clipping and the guard in it (`update.guarded_update`)."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
