"""Cross-entropy of a linear head with all logits at once, or in chunks chosen by torch.

The functions are equivalent to `models.cross_entropy.linear_cross_entropy`.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainspec_cli.engine.digest import IGNORED_TARGET


def full(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, _chunk: object = None) -> Tensor:
    """Compute all logits together, in the format of x, and then convert them to fp32."""
    logits_TV = F.linear(x_TD, weight_VD)
    wide_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    return F.cross_entropy(wide_TV, targets_T, ignore_index=IGNORED_TARGET, reduction="sum")


def native(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, _chunk: object = None) -> Tensor:
    """Use torch's function, which chooses chunks by device and format (torch 2.13 and later)."""
    options = torch.nn.LinearCrossEntropyOptions()
    loss = F.linear_cross_entropy(
        x_TD, weight_VD, targets_T, ignore_index=IGNORED_TARGET, reduction="sum", options=options
    )
    return loss.float()
