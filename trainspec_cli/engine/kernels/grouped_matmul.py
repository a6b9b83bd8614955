"""Each expert's rows times its matrix, one product after another; see `models.experts.grouped_matmul`.

Shapes: M rows sorted by expert, E experts, D inputs, F outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.compiler.disable
def loop(x_MD: Tensor, weight_EDF: Tensor, counts_E: Tensor) -> Tensor:
    """Return (M, F); rows beyond the counts are undefined. The host waits for the counts."""
    counts = counts_E.tolist()
    parts = x_MD.split([*counts, len(x_MD) - sum(counts)])
    return torch.cat([part @ weight for part, weight in zip(parts, [*weight_EDF, weight_EDF[0]], strict=True)])
