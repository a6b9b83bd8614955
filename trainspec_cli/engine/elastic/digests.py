"""Whether the replica groups still hold the same parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trainspec_cli.engine.shares import Share


@torch.no_grad()
def local_digest(shares: Sequence[Share]) -> Tensor:
    """One number of this rank's part, (1,) int64: the sum of its bits as whole numbers, which any one flip changes."""
    sums = [share.local.detach().view(torch.int32).sum(dtype=torch.int64) for share in shares if share.local.numel()]
    return torch.stack(sums).sum(0, keepdim=True) if sums else torch.zeros(1, dtype=torch.int64)


def diverging_groups(digests: Sequence[Tensor]) -> list[int]:
    """Places of those that differ from the majority; where there is none (two groups), all of them."""
    values = [int(digest) for digest in digests]
    counted = Counter(values).most_common(2)
    if len(counted) < 2:
        return []
    (usual, most), (_, next_most) = counted
    return [place for place, value in enumerate(values) if value != usual or most == next_most]
