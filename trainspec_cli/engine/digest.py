"""One digest for a model's weights, the same for every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.engine.shares import Share, unique_shares


@torch.no_grad()
def weights_sha256(shares: Sequence[Share], pipeline: dist.ProcessGroup) -> str:
    """SHA-256 over the parameters in name order, each as its name and the SHA-256 of its little-endian bytes.

    Called by every rank together; one full parameter at a time is held.
    """
    own = {share.name: _sha256(share.gather()) for share in unique_shares(shares)}
    stages: list[dict[str, str]] = [{}] * pipeline.size()
    dist.all_gather_object(stages, own, group=pipeline)
    digest = hashlib.sha256()
    for name, parameter in sorted({item for stage in stages for item in stage.items()}):
        digest.update(f"{name} {parameter}\n".encode())
    return digest.hexdigest()


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
